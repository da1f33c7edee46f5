"""A process that holds one stage of the demo model, for tests that kill it.

    stage_process.py NAME FIRST LAST NOW FOLDER KEPT_BYTES

Prints one line of JSON with its PeerId and addresses when the stage is loaded. Lines of JSON on its
standard input tell it addresses of peers, and an empty one asks what it holds of sessions, which it
prints. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import platformdirs
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.issue import issue, make_root
from ca.naming import Role
from inference.paged import StageConfig
from inference.split import read_splittable
from inference.stage import Stage
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from mesh.identity import PeerId, TrustStore, identity_of
from mesh.relay.links import TransportLinks
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.transport import Transport, TransportConfig

NETWORK = "fault"
LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"


def model() -> ModelManifest:
    usual = platformdirs.user_cache_path("meshnode", appauthor=False) / "models"
    return pull(ModelStore(Path(os.environ.get("MESHNODE_MODELS") or usual)), DEMO_MODEL)


def open_stage(manifest: ModelManifest, first: int, last: int) -> Stage:
    cut = read_splittable(manifest.file("openvino_model.xml")).cut(first, last)
    config = StageConfig(threads=1, kv_bytes=96 << 20)
    stage = Stage(cut, config, context_length=manifest.context_length)
    stage.warm_up()
    return stage


@asynccontextmanager
async def open_node(
    name: str, now: float, folder: Path
) -> AsyncIterator[tuple[Transport, Relay, dict[PeerId, Sequence[str]]]]:
    """A node of a network whose CA every process of a test makes for itself, the same."""
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")[:32])
    authority = Ed25519PrivateKey.from_private_bytes(b"authority".ljust(32, b"."))
    root = load_root(make_root(authority, NETWORK, serial=1, now=now))
    der = issue(
        authority,
        root.der,
        network=NETWORK,
        name=name,
        public_key=key.public_key(),
        roles=[Role.SERVE, Role.USE],
        serial=1000 + sum(name.encode()),
        now=now,
        days=1,
    )
    own = identity_of(key, [der], [root], now=now)
    trust = TrustStore(NETWORK, [root], folder / name)
    known: dict[PeerId, Sequence[str]] = {}
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), own, trust) as transport:
        relay = Relay(TransportLinks(transport, lambda peer: known.get(peer, ())))
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_relay, relay, transport)
            yield transport, relay, known
            nursery.cancel_scope.cancel()


async def main(name: str, first: int, last: int, now: float, folder: Path, kept_bytes: int) -> None:
    manifest = model()
    stage = open_stage(manifest, first, last)
    async with (
        open_node(name, now, folder) as (transport, relay, known),
        relay.stage(stage, manifest.digest, kept_bytes=kept_bytes) as host,
    ):
        print(json.dumps({"peer": transport.peer_id, "addresses": transport.addresses}), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            if line.strip():
                known.update(json.loads(line))
                continue
            held = {
                "chains": len(host.table.chains),
                "sessions": stage.sessions,
                "blocks": stage.blocks - stage.free_blocks,
                "kept bytes": host.kept.bytes,
            }
            print(json.dumps(held), flush=True)


if __name__ == "__main__":
    name, first, last, now, folder, kept = sys.argv[1:]
    trio.run(main, name, int(first), int(last), float(now), Path(folder), int(kept))
