"""Paths with faults: a proxy process between two transports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.issue import issue, make_root
from ca.naming import Role
from mesh.identity import TrustStore, identity_of
from mesh.transport import Transport, TransportConfig

PROXY = Path(__file__).with_name("udp_proxy.py")
LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"


class FaultyPath:
    """A running proxy. ``address`` is that of the transport behind it, through the proxy."""

    def __init__(self, address: str, options: str) -> None:
        parts = address.split("/")
        self._process = subprocess.Popen(
            [sys.executable, str(PROXY), "--to", f"127.0.0.1:{parts[4]}", *options.split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        parts[4] = self._line()
        self.address = "/".join(parts)

    def _line(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        return self._process.stdout.readline().strip()

    def tell(self, command: str) -> str:
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Pairs:
    """Two transports with a path between them."""

    def __init__(self, folder: Path, authority: Any) -> None:
        self._folder = folder
        self._authority = authority

    def transport(self, name: str, config: TransportConfig | None = None) -> Any:
        trust = TrustStore(self._authority.network, [self._authority.root], self._folder / name)
        identity = self._authority.identity(name, now=time.time())
        return Transport.open(config or TransportConfig(listen=(LOOPBACK,)), identity, trust)

    def member(self, network: str, seed: str, name: str) -> Any:
        """A transport of the network whose CA key comes from ``seed`` (see nat_node.py)."""
        ca_key = Ed25519PrivateKey.from_private_bytes(seed.encode().ljust(32, b"."))
        now = time.time()
        root = load_root(make_root(ca_key, network, serial=1, now=now - 3600))
        key = Ed25519PrivateKey.generate()
        certificate = issue(
            ca_key,
            root.der,
            network=network,
            name=name,
            public_key=key.public_key(),
            roles=[Role.SERVE, Role.USE],
            serial=3,
            now=now,
        )
        identity = identity_of(key, [certificate], [root], now=now)
        trust = TrustStore(network, [root], self._folder / name)
        return Transport.open(TransportConfig(listen=(LOOPBACK,)), identity, trust)

    @contextmanager
    def path(self, address: str, options: str = "") -> Iterator[FaultyPath]:
        path = FaultyPath(address, options)
        try:
            yield path
        finally:
            path.close()

    @asynccontextmanager
    async def linked(
        self, options: str, config: TransportConfig | None = None
    ) -> AsyncIterator[tuple[Transport, Transport, FaultyPath]]:
        """A client and a server, linked through a path with these faults."""
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(self.transport("server", config))
            client = await stack.enter_async_context(self.transport("client", config))
            path = stack.enter_context(self.path(server.addresses[0], options))
            await client.connect(path.address)
            yield client, server, path
            client._links.shut()


@pytest.fixture
def pairs(tmp_path: Path, make_authority: Callable[..., Any]) -> Pairs:
    return Pairs(tmp_path, make_authority("testnet", time.time() - 3600))
