"""GGUF files: reading what their header says, and turning them into OpenVINO IR.

The conversion is OpenVINO GenAI's own (weights keep their 4 or 8 bits, no torch needed). It runs in
a process of its own: a file that the runtime chokes on must not take the node along, and the memory
that it needs once is given back.

The format of the header: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from inference.store.errors import StoreError

GGUF_SOURCE = "model.gguf"  # the name under which a GGUF file counts in a model's digest
MAX_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_STRING = 4 << 20  # bytes
MAX_ARRAY = 4_000_000  # items; the largest vocabularies have 262,144
MAX_HEADER = 512 << 20  # bytes of keys and values
CONVERT_TIMEOUT = 3600.0  # seconds
_CUT = 8192  # tokens, in the tokenizers that OpenVINO GenAI makes

Value = int | float | bool | str

# Type number -> struct code, for values of fixed size.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """Scalars and texts of a GGUF header by key, and the lengths of its arrays by key."""

    values: Mapping[str, Value]
    lengths: Mapping[str, int]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(path: Path) -> GgufHeader:
    """Header of the GGUF file at ``path``. Raises :class:`StoreError`."""
    try:
        with path.open("rb") as stream:
            return _Reader(stream).header()
    except _Malformed as error:
        raise StoreError(f"{path.name} is not a usable GGUF file: {error}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path.name}: {error.strerror or error}") from None


def convert(gguf: Path) -> None:
    """Write model, tokenizer and detokenizer as OpenVINO IR beside ``gguf``.

    Blocks for seconds to minutes. Raises :class:`StoreError` with the runtime's own words.
    """
    code = (
        "import sys, openvino_genai;"
        "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(gguf)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CONVERT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StoreError(f"converting {gguf.name} took more than {CONVERT_TIMEOUT:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        reason = said[-1][:500] if said else f"the converter ended with status {done.returncode}"
        raise StoreError(f"OpenVINO cannot convert {gguf.name}: {reason}")
    if not (gguf.parent / "openvino_model.xml").is_file():
        raise StoreError(
            f"OpenVINO wrote no model for {gguf.name}; its architecture is not supported"
        )
    _lift_limit(gguf.parent / "openvino_tokenizer.xml")


def _lift_limit(tokenizer: Path) -> None:
    """Make the tokenizer that OpenVINO GenAI wrote take prompts of any length.

    Whatever the model's context, it keeps the last 8,192 tokens and drops the rest without a word:
    a ``Minimum`` with that constant. The constant is raised in the .bin file.
    """
    root = ElementTree.parse(tokenizer).getroot()
    layers = {layer.get("id"): layer for layer in root.iter("layer")}
    for edge in root.iter("edge"):
        source, target = layers[edge.get("from-layer")], layers[edge.get("to-layer")]
        if source.get("type") != "Const" or target.get("type") != "Minimum":
            continue
        constant = source.find("data")
        if constant is None or constant.get("element_type") != "i32":
            continue
        with tokenizer.with_suffix(".bin").open("r+b") as weights:
            weights.seek(int(constant.get("offset", "0")))
            if weights.read(4) == struct.pack("<i", _CUT):
                weights.seek(-4, 1)
                weights.write(struct.pack("<i", 2**31 - 1))


class _Malformed(Exception):
    pass


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = MAX_HEADER

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise _Malformed("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise _Malformed(f"version {version} is not known")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise _Malformed(f"{tensors} tensors and {keys} keys are too many")
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(keys):
            key = self._string()
            kind = self._number("I")
            if kind == _ARRAY:
                lengths[key] = self._skip_array()
            else:
                values[key] = self._value(kind)
        return GgufHeader(values, lengths)

    def _take(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise _Malformed(f"its header is longer than {MAX_HEADER} bytes")
        data = self._stream.read(size)
        if len(data) != size:
            raise _Malformed("it ends within its header")
        return data

    def _number(self, code: str) -> int:
        value = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return int(value)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        code = _FIXED.get(kind)
        if code is None:
            raise _Malformed(f"a value has the unknown type {kind}")
        value: Value = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def _string(self) -> str:
        size = self._number("Q")
        if size > MAX_STRING:
            raise _Malformed(f"a text of {size} bytes is too long")
        return self._take(size).decode("utf-8", "replace")

    def _skip_array(self) -> int:
        kind, count = self._number("I"), self._number("Q")
        if count > MAX_ARRAY:
            raise _Malformed(f"an array of {count} items is too long")
        if kind == _STRING:
            for _ in range(count):
                size = self._number("Q")
                if size > MAX_STRING:
                    raise _Malformed(f"a text of {size} bytes is too long")
                self._take(size)
        elif kind in _FIXED:
            self._take(count * struct.calcsize("<" + _FIXED[kind]))
        else:
            raise _Malformed(f"an array has items of the type {kind}")
        return count
