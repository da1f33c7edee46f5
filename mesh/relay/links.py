"""What the relay needs from the network, and the transport as that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import trio

from mesh.identity import PeerId
from mesh.relay.refusal import Refusal
from mesh.transport import (
    Lane,
    Link,
    RemoteError,
    Transport,
    TransportError,
)

Buffer = bytes | bytearray | memoryview


class PeerLost(Exception):
    """There is no link to ``peer``, or it does not answer."""

    def __init__(self, peer: PeerId, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


class Links(Protocol):
    """Asking peers and telling them things, by PeerId."""

    @property
    def me(self) -> PeerId: ...

    async def reach(self, peer: PeerId) -> None:
        """Make sure that there is a link. Raises :class:`PeerLost`."""
        ...

    async def request(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, timeout: float
    ) -> Any:
        """The body of the answer. Raises :class:`PeerLost` and what the peer raised, a Refusal."""
        ...

    async def send(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, bulky: bool = False
    ) -> None:
        """One way, in order among messages that are equally ``bulky``. Raises :class:`PeerLost`."""
        ...

    def try_send(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, bulky: bool = False
    ) -> bool:
        """:meth:`send` at once. False when it would have to wait or there is no link."""
        ...

    def serial(self, peer: PeerId) -> int | None:
        """Serial number of the certificate of a peer or of this node; None without a link."""
        ...


class TransportLinks:
    """:class:`Links` over a node's transport, which dials a peer's ``addresses`` when needed."""

    def __init__(self, transport: Transport, addresses: Callable[[PeerId], Sequence[str]]) -> None:
        self._transport = transport
        self._addresses = addresses

    @property
    def me(self) -> PeerId:
        return self._transport.peer_id

    async def reach(self, peer: PeerId) -> None:
        try:
            if peer != self.me:
                await self._link(peer)
        except TransportError as error:
            raise PeerLost(peer, str(error)) from error

    async def _link(self, peer: PeerId) -> Link:
        link = self._transport.link(peer)
        if link is None or not link.is_up:
            link = await self._transport.link_to(peer, self._addresses(peer))
        return link

    async def request(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, timeout: float
    ) -> Any:
        link: Link | None = None
        try:
            with trio.move_on_after(timeout):
                link = await self._link(peer)
            if link is not None:
                return (await link.request(kind, body, payload, timeout=timeout)).body
        except RemoteError as error:
            raise Refusal.told(error.code, f"{peer}: {error.message}") from error
        except TransportError as error:
            raise PeerLost(peer, str(error)) from error
        raise PeerLost(peer, f"no answer to {kind} in {timeout:g} s")

    async def send(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, bulky: bool = False
    ) -> None:
        lane = Lane.ACTIVATIONS if bulky else Lane.CONTROL
        try:
            link = await self._link(peer)
            await link.send(kind, body, payload, lane=lane)
        except TransportError as error:
            raise PeerLost(peer, str(error)) from error

    def try_send(
        self, peer: PeerId, kind: str, body: Any, payload: Buffer = b"", *, bulky: bool = False
    ) -> bool:
        link = self._transport.link(peer)
        lane = Lane.ACTIVATIONS if bulky else Lane.CONTROL
        try:
            return link is not None and link.try_send(kind, body, payload, lane=lane)
        except TransportError:
            return False

    def serial(self, peer: PeerId) -> int | None:
        if peer == self.me:
            return self._transport.certificate.serial
        link = self._transport.link(peer)
        return None if link is None else link.certificate.serial


async def at_once(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run all calls together. The first Refusal or PeerLost cancels the others and is raised."""
    failures: list[Refusal | PeerLost] = []

    async def run(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except (Refusal, PeerLost) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(run, call)
    if failures:
        raise failures[0]
