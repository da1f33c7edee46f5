"""Where layers come from when no peer can give them: the real hub client against a local hub."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest
import trio

from ca.naming import Role
from inference.store.download import pull
from inference.store.errors import StoreError
from inference.store.store import ModelStore
from mesh.gossip.advert import Advert, StoredModel, Wanted
from mesh.gossip.view import NodeView, View
from mesh.models.shelf import Shelf
from mesh.models.source import ModelSource
from mesh.transport import DialError


def _hub_module():
    """The hub of the download tests: test modules cannot be imported by name."""
    path = Path(__file__).parents[1] / "inference" / "test_pull.py"
    spec = importlib.util.spec_from_file_location("hub_of_test_pull", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HUB = _hub_module()


@pytest.fixture
def hub(demo_model, monkeypatch):
    files = {f.path: (demo_model.path / f.path).read_bytes() for f in demo_model.files}
    hub = HUB.Hub(files | {"config.json": json.dumps(HUB.CONFIG).encode()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HUB.Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def wanted(manifest):
    return Wanted(
        name=manifest.name, digest=manifest.digest, version=1, publisher="A",
        layers=manifest.layers, layer_bytes=1, embedding_bytes=0, head_bytes=0, shared_bytes=0,
        kv_bytes=1, hidden=manifest.hidden_size, context_length=manifest.context_length,
    )  # fmt: skip


def source_in(folder, view=None):
    store = ModelStore(folder)

    async def unreachable(peer):
        raise DialError(f"{peer} does not answer")

    return ModelSource(
        store,
        Shelf(store),
        view=lambda: view or View("me", 0.0, MappingProxyType({})),
        reach=unreachable,
        transferred=lambda *facts: None,
    )


def test_layers_that_nobody_here_can_give_come_from_the_hub_once(hub, tmp_path):
    published = pull(ModelStore(tmp_path / "publisher"), HUB.REPOSITORY)
    before = len(hub.requests)
    source = source_in(tmp_path / "taker")
    manifest = trio.run(source.get, wanted(published), (10, 20))
    assert manifest.digest == published.digest and len(hub.requests) > before
    fetched = len(hub.requests)
    assert trio.run(source.get, wanted(published), (0, 10)) == manifest
    assert len(hub.requests) == fetched  # it is on this disk now


def test_the_hub_stands_in_for_peers_that_cannot_be_reached(hub, tmp_path):
    published = pull(ModelStore(tmp_path / "publisher"), HUB.REPOSITORY)
    before = len(hub.requests)
    stored = StoredModel(name=published.name, digest=published.digest)
    holder = NodeView(
        peer="P", name="p", roles=frozenset({Role.SERVE}), serial=1,
        advert=Advert(boot=1, sequence=1, beat=10.0, stored=(stored,)), status="alive", reason="",
        since=0.0, heard=0.0, holdings=(), load={}, load_at=0.0, link=None,
    )  # fmt: skip
    source = source_in(tmp_path / "taker", View("me", 0.0, MappingProxyType({"P": holder})))
    manifest = trio.run(source.get, wanted(published), (10, 20))
    assert manifest.digest == published.digest and len(hub.requests) > before


def test_other_weights_at_the_hub_are_refused(hub, tmp_path):
    published = pull(ModelStore(tmp_path / "publisher"), HUB.REPOSITORY)
    other = wanted(published).model_copy(update={"digest": "ab" * 32})
    with pytest.raises(StoreError, match="other weights"):
        trio.run(source_in(tmp_path / "taker").get, other, (10, 20))
