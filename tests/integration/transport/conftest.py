"""Real transports on loopback: nodes with certificates, each with a trust store of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from mesh.identity import Identity, TrustStore
from mesh.transport import Transport, TransportConfig

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"


class Network:
    """A CA and the transports of the nodes that it admits."""

    def __init__(self, folder: Path, authority: Any) -> None:
        self.folder = folder
        self.authority = authority

    def identity(self, name: str, **options: Any) -> Identity:
        identity: Identity = self.authority.identity(name, **{"now": time.time(), **options})
        return identity

    def trust(self, name: str) -> TrustStore:
        return TrustStore(self.authority.network, [self.authority.root], self.folder / name)

    def open(
        self,
        name: str,
        config: TransportConfig | None = None,
        *,
        identity: Identity | None = None,
        trust: TrustStore | None = None,
    ) -> AbstractAsyncContextManager[Transport]:
        return Transport.open(
            config or TransportConfig(listen=(LOOPBACK,)),
            identity or self.identity(name),
            trust or self.trust(name),
        )


@pytest.fixture
def network(tmp_path: Path, make_authority: Callable[..., Any]) -> Network:
    return Network(tmp_path, make_authority("testnet", time.time() - 100 * 86_400))
