"""A process that serves a counting engine: ``python serving_process.py NAME FOLDER SECONDS``.

Prints its address and serves until its standard input ends.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import trio

from mesh.forward.execution import WholeModel
from mesh.forward.serving import ForwardServer
from mesh.identity import TrustStore
from mesh.transport import Transport, TransportConfig

TESTS = Path(__file__).resolve().parents[2]


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


async def main(name: str, folder: Path, seconds_per_token: float) -> None:
    nodes = load(TESTS / "integration" / "forward" / "conftest.py", "nodes")
    authority = load(TESTS / "conftest.py", "authority").TestAuthority(now=time.time())
    identity = authority.identity(name)
    engine = nodes.CountingEngine(seconds_per_token)
    server = ForwardServer(identity, lambda request, _: WholeModel(engine, nodes.MODEL, identity))
    trust = TrustStore(authority.network, [authority.root], folder)
    config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
    async with Transport.open(config, identity, trust) as transport, server.serving(transport):
        print(transport.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
