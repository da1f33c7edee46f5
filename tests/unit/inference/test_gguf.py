"""GGUF headers, honest and not."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.store.errors import StoreError
from inference.store.gguf import convert, read_header
from inference.store.store import ModelStore


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def header(*entries: bytes, version: int = 3, keys: int | None = None) -> bytes:
    count = len(entries) if keys is None else keys
    return b"GGUF" + struct.pack("<IQQ", version, 0, count) + b"".join(entries)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
LAYERS = text("llama.block_count") + struct.pack("<II", 4, 30)
FLAG = text("flag") + struct.pack("<I?", 7, True)
TOKENS = text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
SCORES = text("scores") + struct.pack("<IIQ", 9, 6, 3) + bytes(12)


def test_reads_values_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(ARCHITECTURE, LAYERS, FLAG, TOKENS, SCORES) + b"tensors")
    found = read_header(path)
    assert found.text("general.architecture") == "llama"
    assert found.number("llama.block_count") == 30
    assert found.number("flag") is None and found.text("flag") is None
    assert found.lengths == {"tokens": 2, "scores": 3}


FLAWS = {
    "does not begin with GGUF": b"PK\3\4" + bytes(40),
    "version 9": header(version=9),
    "too many": header(keys=1 << 40),
    "ends within": header(ARCHITECTURE)[:-3],
    "too long": header(text("k") + struct.pack("<IQ", 8, 1 << 60)),
    "array of": header(text("k") + struct.pack("<IIQ", 9, 4, 1 << 50)),
    "items of the type": header(text("k") + struct.pack("<IIQ", 9, 9, 1)),
    "unknown type": header(text("k") + struct.pack("<I", 77)),
}


@pytest.mark.parametrize("message", FLAWS)
def test_refuses(tmp_path: Path, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(FLAWS[message])
    with pytest.raises(StoreError, match=message):
        read_header(path)


@given(data=st.binary(max_size=400))
def test_never_fails_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    for content in (data, header(data, keys=3), header(ARCHITECTURE, data)):
        path.write_bytes(content)
        try:
            read_header(path)
        except StoreError as error:
            assert "fuzzed.gguf" in str(error)


def test_what_the_runtime_cannot_convert_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(ARCHITECTURE, LAYERS))
    with pytest.raises(StoreError, match=r"OpenVINO cannot convert model\.gguf: ."):
        convert(path)
    store = ModelStore(tmp_path / "models")
    with pytest.raises(StoreError, match="OpenVINO cannot convert"):
        store.import_gguf(path, "tiny")
    assert store.list() == []
