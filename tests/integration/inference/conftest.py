"""Tiny models with random weights, one for each architecture."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ZOO = Path(__file__).parents[2] / "data" / "zoo"


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
