"""Fetching a model with the real hub client from a server that speaks as much of the hub's API."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference.store import download
from inference.store.download import pull
from inference.store.errors import StoreError
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from inference.tokenizer import Tokenizer

REPOSITORY = "acme/tiny-int4-ov"
WEIGHTS = "openvino_model.bin"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


@dataclass
class Hub:
    """A hub with one repository, and the ways in which it can misbehave."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    cut_after: list[int] = field(default_factory=list)  # bytes of body, one per coming response
    ignore_range: bool = False
    replaced: dict[str, bytes] = field(default_factory=dict)  # served instead of what is announced
    refuse: tuple[int, str] | None = None  # status and error code for everything
    requests: list[tuple[str, int]] = field(default_factory=list)  # (file, first byte asked for)
    url: str = ""

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if name.endswith(".bin"):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": REPOSITORY, "modelId": REPOSITORY, "sha": self.commit, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        path = self.path.split("?")[0]
        if hub.refuse is not None:
            return self._answer(hub.refuse[0], b"{}", {"X-Error-Code": hub.refuse[1]})
        if path == f"/api/models/{REPOSITORY}":
            return self._answer(200, json.dumps(hub.info()).encode(), {})
        prefix = f"/{REPOSITORY}/resolve/{hub.commit}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in hub.files:
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        data = hub.replaced.get(name, hub.files[name])
        start = 0
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        hub.requests.append((name, start))
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": hub.commit}
        if wanted is None or hub.ignore_range:
            return self._answer(200, data, headers)
        if start >= len(data):
            return self._answer(416, b"", headers)
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._answer(206, data[start:], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.hub.cut_after and len(body) > self.hub.cut_after[0]:
            self.wfile.write(body[: self.hub.cut_after.pop(0)])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(body)


@pytest.fixture(scope="module")
def model_files(demo_model: ModelManifest) -> dict[str, bytes]:
    """The demo model as a hub repository would hold it."""
    files = {f.path: (demo_model.path / f.path).read_bytes() for f in demo_model.files}
    return files | {"config.json": json.dumps(CONFIG).encode()}


@pytest.fixture
def hub(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    others = {"README.md": b"# read me", ".gitattributes": b"*", "../evil.json": b"{}"}
    hub = Hub(model_files | others)
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_fetches_what_belongs_to_the_model(hub: Hub, store: ModelStore, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    model = pull(store, REPOSITORY, lambda *step: told.append(step))
    assert {f.path for f in model.files} == set(hub.files) - {
        "README.md", ".gitattributes", "../evil.json",
    }  # fmt: skip
    assert not list(tmp_path.rglob("evil.json"))
    total = sum(f.size for f in model.files)
    done = [step[1] for step in told]
    assert done == sorted(done) and done[-1] == total
    assert {step[2] for step in told} == {total}
    assert (model.layers, model.context_length, model.architecture) == (30, 8192, "llama")
    assert model.eos_token_ids == (2,) and "<|im_start|>" in (model.chat_template or "")
    assert Tokenizer(model).decode(Tokenizer(model).encode("Hello there")) == "Hello there"
    # The same content imported from a folder is the same model.
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in model.files:
        (folder / file.path).write_bytes(hub.files[file.path])
    assert store.import_dir(folder, "from-folder").digest == model.digest
    # A second pull asks nobody.
    hub.requests.clear()
    assert pull(store, REPOSITORY) == model
    assert not hub.requests


def test_goes_on_after_cut_connections(hub: Hub, store: ModelStore) -> None:
    hub.cut_after = [30 << 20, 20 << 20]
    model = pull(store, REPOSITORY)
    starts = [start for name, start in hub.requests if name == WEIGHTS]
    assert starts[0] == 0 and len(starts) == 3
    assert 0 < starts[1] < starts[2] < len(hub.files[WEIGHTS])
    assert store.get(REPOSITORY) == model


def test_goes_on_where_an_earlier_attempt_was_stopped(hub: Hub, store: ModelStore) -> None:
    class Stopped(Exception):
        pass

    def stop_half_way(name: str, done: int, total: int) -> None:
        if name == WEIGHTS and done > 50 << 20:
            raise Stopped

    with pytest.raises(Stopped):
        pull(store, REPOSITORY, stop_half_way)
    assert store.list() == []
    fetched = [name for name, _ in hub.requests]
    hub.requests.clear()
    pull(store, REPOSITORY)
    again = [name for name, _ in hub.requests]
    assert WEIGHTS in again and set(again) & set(fetched) == {WEIGHTS}
    assert next(start for name, start in hub.requests if name == WEIGHTS) > 40 << 20


def test_a_server_without_ranges(hub: Hub, store: ModelStore) -> None:
    hub.ignore_range = True
    hub.cut_after = [30 << 20]
    pull(store, REPOSITORY)
    assert [name for name, _ in hub.requests].count(WEIGHTS) == 2


def test_a_new_commit_is_not_mixed_with_an_old_one(hub: Hub, store: ModelStore) -> None:
    hub.replaced[WEIGHTS] = hub.files[WEIGHTS][:-1] + b"!"
    with pytest.raises(StoreError, match="not what the hub announced"):
        pull(store, REPOSITORY)
    hub.replaced.clear()
    hub.requests.clear()
    hub.commit = "b" * 40
    hub.files["tokenizer_config.json"] = b"{}"
    model = pull(store, REPOSITORY)
    assert {name for name, _ in hub.requests} == {f.path for f in model.files}


@pytest.mark.parametrize(
    ("served", "message"),
    [
        (b"other", "longer than the hub announced"),
        (b"", "Consistency check failed"),
    ],
)
def test_more_or_less_than_announced(
    hub: Hub, store: ModelStore, served: bytes, message: str
) -> None:
    name = "openvino_tokenizer.xml"
    data = hub.files[name]
    hub.replaced[name] = data + served if served else data[:-10]
    with pytest.raises(StoreError, match=message):
        pull(store, REPOSITORY)
    assert store.list() == []


def test_small_files_are_checked_too(hub: Hub, store: ModelStore) -> None:
    hub.replaced["config.json"] = hub.files["config.json"].replace(b"30", b"31")
    with pytest.raises(StoreError, match=r"config\.json is not what the hub announced"):
        pull(store, REPOSITORY)
    hub.replaced.clear()
    hub.requests.clear()
    pull(store, REPOSITORY)
    assert hub.requests == [("config.json", 0)]


def test_several_at_once_download_once(hub: Hub, store: ModelStore) -> None:
    models: list[ModelManifest] = []

    def fetch() -> None:
        models.append(pull(ModelStore(store.root), REPOSITORY))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 3 and len({m.digest for m in models}) == 1
    assert [name for name, _ in hub.requests].count(WEIGHTS) == 1


@pytest.mark.parametrize(
    ("refuse", "message"),
    [
        ((401, "GatedRepo"), "accept its terms at http://127.*HF_TOKEN"),
        ((404, "RepoNotFound"), f"has no model {REPOSITORY}"),
        ((503, ""), "refused"),
    ],
)
def test_refusals_are_explained(
    hub: Hub, store: ModelStore, refuse: tuple[int, str], message: str
) -> None:
    hub.refuse = refuse
    with pytest.raises(StoreError, match=message):
        pull(store, REPOSITORY)


def test_a_hub_that_is_not_there(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(StoreError, match="http://127"):
            pull(store, REPOSITORY)


def test_repositories_that_hold_something_else(hub: Hub, store: ModelStore) -> None:
    for file, message in (
        ("model.gguf", "GGUF"),
        ("model.safetensors", "exported"),
        ("openvino_language_model.xml", "more than text"),
        ("README.md", "has no openvino_model.xml"),
    ):
        hub.files = {file: b"x"}
        with pytest.raises(StoreError, match=message):
            pull(store, REPOSITORY)


def test_a_name_without_an_owner_lists_what_is_known(store: ModelStore) -> None:
    with pytest.raises(StoreError, match=r"smollm2-135m-instruct.*OpenVINO/Qwen3-8B-int4-ov"):
        pull(store, "qwen9")
    with pytest.raises(StoreError, match="cannot be a model's name"):
        pull(store, "../../etc/passwd")
