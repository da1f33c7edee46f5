"""A look into an OpenVINO IR before the runtime gets it.

An IR is an XML file that describes a graph and a .bin file with its constants. Both may come from
anywhere, so they are read here first with a streaming parser and with bounds: no document types or
entities, no operations from outside the standard sets, no constant that lies outside the .bin.
What a language model's manifest needs to know about the graph is gathered on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from inference.store.errors import StoreError

MAX_XML = 256 << 20  # bytes; a 70B model's is about 20 MB
MAX_DEPTH = 64
MAX_LAYERS = 2_000_000
MAX_ATTRIBUTE = 4 << 20  # characters; a tokenizer's chat template is one attribute
_CHUNK = 1 << 20
_EXTENSION = "extension"  # the operations of openvino-tokenizers


@dataclass(frozen=True)
class State:
    """A variable that the model keeps from call to call; -1 is a dimension that varies."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """What :func:`inspect` found. ``info`` holds the flat entries of the model's ``rt_info``."""

    inputs: tuple[str, ...]
    states: tuple[State, ...]
    operations: int
    info: Mapping[str, str]


def inspect(xml: Path, *, weights: int, extensions: bool = False) -> Graph:
    """Check the IR ``xml``, whose .bin file has ``weights`` bytes.

    ``extensions`` allows the operations of openvino-tokenizers. Raises :class:`StoreError`.
    """
    reader = _Reader(xml.name, weights, extensions)
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        size = xml.stat().st_size
        if size > MAX_XML:
            raise StoreError(f"{xml.name} has {size} bytes, more than an IR ever needs")
        with xml.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                parser.Parse(chunk, False)
            parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise StoreError(f"{xml.name} is not XML: {error}") from None
    except OSError as error:
        raise StoreError(f"cannot read {xml.name}: {error.strerror or error}") from None
    return reader.graph()


@dataclass
class _Reader:
    name: str
    weights: int
    extensions: bool
    depth: int = 0
    operations: int = 0
    in_info: int = 0  # depth at which <rt_info> of the whole model began; 0: not in it
    kind: str = ""  # type of the operation whose attributes come next
    layer_name: str = ""
    inputs: list[str] = field(default_factory=list)
    states: dict[str, State] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)

    def doctype(self, *_: object) -> None:
        raise StoreError(f"{self.name} has a document type declaration, which an IR never has")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise StoreError(f"{self.name} is nested deeper than {MAX_DEPTH}")
        if self.depth == 1 and (tag != "net" or attributes.get("version") not in ("10", "11")):
            raise StoreError(f"{self.name} is not an OpenVINO IR of version 10 or 11")
        if any(len(value) > MAX_ATTRIBUTE for value in attributes.values()):
            raise StoreError(f"{self.name} has an attribute of more than {MAX_ATTRIBUTE} bytes")
        if tag == "layer":
            self._operation(attributes)
        elif tag == "data":
            self._data(attributes)
        elif tag == "port" and self.kind == "Parameter" and "names" in attributes:
            self.inputs.extend(attributes["names"].split(",", 8))
        elif tag == "rt_info" and self.depth == 2:
            self.in_info = self.depth
        elif self.in_info and self.depth == self.in_info + 1:
            value = attributes.get("value")
            if value is not None:
                self.info[attributes.get("name", tag) if tag == "info" else tag] = value

    def end(self, tag: str) -> None:
        if self.depth == self.in_info:
            self.in_info = 0
        if tag == "layer":
            self.kind = ""
        self.depth -= 1

    def _operation(self, attributes: dict[str, str]) -> None:
        self.operations += 1
        if self.operations > MAX_LAYERS:
            raise StoreError(f"{self.name} has more than {MAX_LAYERS} operations")
        self.kind = attributes.get("type", "")
        self.layer_name = attributes.get("name", "")
        origin = attributes.get("version", "")
        allowed = origin.startswith("opset") or (self.extensions and origin == _EXTENSION)
        if not allowed:
            raise StoreError(
                f"{self.name} uses the operation {self.kind[:80]!r} of {origin[:80]!r}, "
                "which is not part of OpenVINO"
            )

    def _data(self, attributes: dict[str, str]) -> None:
        if self.kind == "Const":
            offset, size = (_count(attributes.get(key, "")) for key in ("offset", "size"))
            if offset is None or size is None or offset + size > self.weights:
                raise StoreError(
                    f"{self.name}: the constant {self.layer_name[:80]!r} lies outside the "
                    f".bin file of {self.weights} bytes"
                )
        elif self.kind == "ReadValue" and "variable_id" in attributes:
            shape = _shape(attributes.get("variable_shape", ""))
            if shape is None:
                raise StoreError(f"{self.name}: a state has no proper shape")
            name = attributes["variable_id"]
            self.states[name] = State(name, shape)

    def graph(self) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.states.values()), self.operations, self.info)


def _count(text: str) -> int | None:
    """A non-negative decimal number of up to 18 digits, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _shape(text: str) -> tuple[int, ...] | None:
    """``"?,3,?,64"`` as numbers with -1 for what varies (``?`` or a range), or None."""
    if not text:
        return ()
    sizes: list[int] = []
    for part in text.split(",", 16):
        if part == "?" or ".." in part:
            sizes.append(-1)
            continue
        size = _count(part)
        if size is None or size > 1 << 24:
            return None
        sizes.append(size)
    return tuple(sizes)
