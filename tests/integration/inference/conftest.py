"""A reference that owes nothing to the stage engine: the uncut stateful model, one prompt alone."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from inference.devices import exact_properties

ZOO = Path(__file__).parents[2] / "data" / "zoo"


class Uncut:
    """Greedy generation by the runtime's own stateful execution of a whole model."""

    def __init__(self, path: Path, kv_precision: str) -> None:
        properties = {**exact_properties("CPU"), "KV_CACHE_PRECISION": kv_precision}
        compiled = ov.Core().compile_model(path, "CPU", properties)
        self._request = compiled.create_infer_request()
        self._names = {name for port in compiled.inputs for name in port.get_names()}

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], np.ndarray[Any, Any]]:
        """``count`` tokens and the logits, ``[count, vocabulary]``, that they were drawn from."""
        self._request.reset_state()
        tokens, logits, past, fresh = list[int](), [], 0, prompt
        for _ in range(count):
            end = past + len(fresh)
            feed = {
                "input_ids": np.array([fresh], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(past, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            self._request.infer({name: feed[name] for name in feed if name in self._names})
            row = self._request.get_output_tensor(0).data[0, -1].copy()
            logits.append(row)
            tokens.append(int(row.argmax()))
            past, fresh = end, tokens[-1:]
        return tokens, np.stack(logits)


@pytest.fixture(scope="session")
def uncut() -> type[Uncut]:
    return Uncut


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Unpacks a tiny model of an architecture and gives the path of its ``.xml``."""
    root = tmp_path_factory.mktemp("zoo")

    def unpack(architecture: str) -> Path:
        target = root / architecture
        if not target.exists():
            with tarfile.open(ZOO / f"{architecture}.tar.xz") as archive:
                archive.extractall(target, filter="data")
        return target / "openvino_model.xml"

    yield unpack
