"""Gossip over real transports on loopback: many nodes in one trio run."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Role, load_root
from ca.crl import build_crl
from ca.issue import issue, make_root
from mesh.gossip.advert import Holding
from mesh.gossip.service import GossipService
from mesh.gossip.view import View
from mesh.identity import Identity, TrustStore, identity_of
from mesh.transport import Transport, TransportConfig


@dataclass
class Node:
    transport: Transport
    gossip: GossipService
    identity: Identity
    trust: TrustStore
    _stop: trio.Event
    _stopped: trio.Event

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    def alive(self) -> set[str]:
        return {n.peer for n in self.gossip.view.alive}

    async def sees(self, *others: Node, within: float = 10.0) -> None:
        """Waits until exactly these others are alive in its view, and linked."""
        wanted = {n.peer for n in others}

        def holds(view: View) -> bool:
            return {n.peer for n in view.alive} == wanted and all(n.link for n in view.alive)

        try:
            with trio.fail_after(within):
                await self.gossip.wait_until(holds)
        except trio.TooSlowError:
            raise AssertionError(f"sees {self.alive()}, not {wanted}") from None

    async def leave(self) -> None:
        await self.gossip.leave()
        await self.stop()

    async def stop(self) -> None:
        self._stop.set()
        await self._stopped.wait()


@dataclass
class Net:
    folder: Path
    nursery: trio.Nursery
    ca_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    root_der: bytes = b""
    boots: int = 0
    serials: int = 100
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root_der = make_root(self.ca_key, "acme", serial=1, now=time.time())

    def identity(self, name: str, *roles: Role, key: Ed25519PrivateKey | None = None) -> Identity:
        key = key or Ed25519PrivateKey.generate()
        self.serials += 1
        der = issue(
            self.ca_key,
            self.root_der,
            network="acme",
            name=name,
            public_key=key.public_key(),
            roles=roles or (Role.SERVE, Role.USE),
            serial=self.serials,
            now=time.time(),
        )
        return identity_of(key, (der,), (load_root(self.root_der),), now=time.time())

    def crl(self, number: int, *revoked: int) -> bytes:
        now = time.time()
        return build_crl(
            self.ca_key, self.root_der, number=number, now=now, revoked=dict.fromkeys(revoked, now)
        )

    async def start(self, who: Identity, boot: int | None = None) -> Node:
        self.boots += 1
        number = self.boots

        async def run(task_status: trio.TaskStatus[None]) -> None:
            folder = self.folder / f"{who.certificate.name}-{number}"
            trust = TrustStore("acme", [load_root(self.root_der)], folder)
            config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
            stop, stopped = trio.Event(), trio.Event()
            async with Transport.open(config, who, trust) as transport:
                gossip = GossipService(
                    transport,
                    who,
                    trust,
                    boot=number if boot is None else boot,
                    rng=random.Random(number),
                )
                async with trio.open_nursery() as nursery:
                    await nursery.start(gossip.run)
                    self.nodes.append(Node(transport, gossip, who, trust, stop, stopped))
                    task_status.started()
                    await stop.wait()
                    nursery.cancel_scope.cancel()
            stopped.set()

        await self.nursery.start(run)
        return self.nodes[-1]

    async def mesh(self, count: int) -> list[Node]:
        """``count`` nodes, each told of the first one only."""
        nodes = [await self.start(self.identity(f"node-{i}")) for i in range(count)]
        for node in nodes[1:]:
            await node.transport.connect(nodes[0].transport.addresses[0])
        return nodes


@pytest.fixture
def on_net(tmp_path: Path) -> Callable[..., None]:
    """Runs an async test with a :class:`Net`."""

    def run(test: Callable[[Net], object]) -> None:
        @asynccontextmanager
        async def net() -> AsyncIterator[Net]:
            async with trio.open_nursery() as nursery:
                opened = Net(tmp_path, nursery)
                yield opened
                for node in opened.nodes:
                    await node.stop()

        async def main() -> None:
            with trio.fail_after(120):
                async with net() as opened:
                    await test(opened)

        trio.run(main)

    return run


@pytest.fixture
def make_holding() -> Callable[..., Holding]:
    def make(id_: int = 0, model: str = "m", **changes: object) -> Holding:
        fields: dict[str, object] = {
            "id": id_,
            "model": model,
            "digest": "ab" * 32,
            "kind": "replica",
            "first": 0,
            "last": 30,
            "layers": 30,
            "context_length": 8192,
            "device": "CPU",
            "ready": True,
            "slots": 8,
            "queue": 64,
        }
        return Holding(**{**fields, **changes})

    return make
