"""All links of a node: dialling, taking offers, and one link for each peer.

Who gives way when both sides dial is decided in ``pairing``; here is what follows from it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import trio
from multiaddr import Multiaddr

from ca.certificate import Certificate
from mesh.identity import PeerId
from mesh.transport.addresses import parse_address, parse_circuit
from mesh.transport.carrier import Carrier
from mesh.transport.errors import DialError, NotAdmitted, TransportError
from mesh.transport.link import Link
from mesh.transport.liveness import Liveness, LivenessPolicy
from mesh.transport.opening import Offer, Refused, open_lanes
from mesh.transport.pairing import Existing, Hello, Verdict, Welcome, decide
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.listen import MeshQuicTransport
from mesh.transport.relay import Relay
from mesh.transport.serving import Services

logger = logging.getLogger(__name__)

_STAGGER = 0.15  # seconds between dials to several addresses of one peer
_DIRECT_FIRST = 2.5  # seconds for a direct path before a relay is tried
_MOST_RELAYS = 4  # linked peers asked to relay, one after the other
_OTHER_SIDE = 5.0  # seconds for a link that the peer opens to appear here
_GOODBYE = 1.0  # seconds that closing a relayed connection may take


@dataclass(frozen=True)
class LinkUp:
    """A peer can be talked to."""

    link: Link


@dataclass(frozen=True)
class LinkDown:
    """A peer's link is gone. Another may already be on its way."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class LinkMoved:
    """A link goes on over another path: its ``path`` and round trip time are different now."""

    link: Link


LinkEvent = LinkUp | LinkDown | LinkMoved


class Links:
    """The table of links. ``nursery`` runs what they need; without one nothing new begins."""

    def __init__(
        self,
        *,
        me: PeerId,
        swarm: Any,
        quic: MeshQuicTransport,
        services: Services,
        liveness: LivenessPolicy,
        renewed: Callable[[Link, object], Certificate],
        relay: Relay,
    ) -> None:
        self.nursery: trio.Nursery | None = None
        self._me = me
        self._swarm = swarm
        self._quic = quic
        self._services = services
        self._liveness = liveness
        self._renewed = renewed
        self._relay = relay
        self._boot = os.urandom(8)
        self._links: dict[PeerId, Link] = {}
        self._last_links: dict[PeerId, bytes] = {}
        self._dials: dict[PeerId, trio.Event] = {}
        self._offering: dict[PeerId, trio.Event] = {}  # set when the peer has answered, or has not
        self._appeared: dict[PeerId, trio.Event] = {}
        self._listeners: set[trio.MemorySendChannel[LinkEvent]] = set()

    @property
    def up(self) -> Mapping[PeerId, Link]:
        """Links that are up. A live view."""
        return MappingProxyType(self._links)

    async def connect(self, address: str, timeout: float = 10.0) -> Link:
        """The link to the peer at a full address (``/ip4/…/udp/…/quic-v1/p2p/…``).

        Raises DialError, and NotAdmitted when either side does not admit the other.
        """
        peer, _ = parse_address(address)
        return await self.link_to(peer, [address], timeout=timeout)

    async def link_to(
        self, peer: PeerId, addresses: Sequence[str], *, timeout: float = 10.0
    ) -> Link:
        """The link to ``peer``: the one there is, or a new one by the first address that answers.

        Raises as :meth:`connect` does.
        """
        if peer == self._me:
            raise DialError("that is this node itself")
        with trio.move_on_after(timeout):
            while True:
                link = self._links.get(peer)
                if link is not None:
                    return link
                under_way = self._dials.get(peer)
                if under_way is None:
                    return await self._dial(peer, addresses)
                await under_way.wait()
        raise DialError(f"{peer} did not answer in {timeout:g} s")

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        if self.nursery is None:
            raise DialError("the transport is not running")
        done = self._dials[peer] = trio.Event()
        appeared = self._appeared.setdefault(peer, trio.Event())
        result: list[Link | Exception] = []

        async def dial() -> None:
            try:
                result.append(await self._dial_and_open(peer, addresses))
            except (TransportError, OSError) as error:
                result.append(error)
            nursery.cancel_scope.cancel()

        async def accept() -> None:
            await appeared.wait()
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dial)
                nursery.start_soon(accept)
        finally:
            self._dials.pop(peer, None)
            self._appeared.pop(peer, None)
            done.set()
        link = self._links.get(peer)
        if link is not None:
            return link
        if result and isinstance(result[0], Exception):
            raise result[0]
        raise DialError("the link was lost at once")

    async def _dial_and_open(self, peer: PeerId, addresses: Sequence[str]) -> Link:
        """Directly if that works, else through a relay."""
        relays = self._relays_to(peer, addresses)
        connection: MeshConnection | None = None
        failure: TransportError = DialError(f"no address for {peer}")
        try:
            with trio.move_on_after(_DIRECT_FIRST if relays else math.inf):
                failure = DialError(f"{peer} does not answer directly")
                connection = await self._dial_first(peer, addresses)
        except NotAdmitted:
            raise
        except TransportError as error:
            failure = error
        if connection is not None:
            return await self._open_direct(peer, connection)
        for relay, address in relays:
            try:
                if relay not in self._links and address is not None:
                    await self.link_to(relay, [address])
                return await self._open_relayed(peer, await self._relay.dial(relay, peer))
            except NotAdmitted:
                raise
            except TransportError as error:
                logger.debug("not through %s: %s", relay, error)
        raise failure

    def _relays_to(self, peer: PeerId, addresses: Sequence[str]) -> list[tuple[PeerId, str | None]]:
        """Peers that may relay: those that an address names, then those linked directly."""
        named = [split for text in addresses if (split := parse_circuit(text)) is not None]
        relays: dict[PeerId, str | None] = dict(named)
        linked = [link.peer for link in self._links.values() if link.path != "relayed"]
        for other in linked[:_MOST_RELAYS]:
            relays.setdefault(other, None)
        relays.pop(peer, None)
        relays.pop(self._me, None)
        return list(relays.items())

    async def _open_direct(self, peer: PeerId, connection: MeshConnection) -> Link:
        try:
            net_connection = await self._swarm.add_conn(connection, direction="outbound")
            link = await self._offer_link(peer, net_connection, path="direct")
        except BaseException as error:
            refused = connection.close_reason.startswith("not admitted")
            reason = connection.close_reason
            connection.shut(reason="the link was not opened")
            if refused and isinstance(error, Exception):
                raise NotAdmitted(f"the peer refused us: {reason}") from error
            if isinstance(error, Exception) and not isinstance(error, TransportError):
                raise DialError(f"the link was not opened: {error}") from error
            raise
        if link.carrier.connection is not connection:
            connection.shut(reason="the peer's own offer was taken")
        return link

    async def _open_relayed(self, peer: PeerId, net_connection: Any) -> Link:
        link: Link | None = None
        try:
            link = await self._offer_link(peer, net_connection, path="relayed")
        finally:
            if link is None or link.carrier.connection is not net_connection.muxed_conn:
                with trio.move_on_after(_GOODBYE, shield=True):
                    await net_connection.close()
        return link

    async def _offer_link(self, peer: PeerId, net_connection: Any, *, path: str) -> Link:
        """The link over this connection, or, where the peer was first, the one over its own."""
        if (link := self._links.get(peer)) is not None:
            return link
        hello = Hello(link=os.urandom(16), lane=0, boot=self._boot, last=self._last_links.get(peer))
        try:
            carrier, welcome = await self._offer(peer, net_connection, hello, path)
        except Refused as refusal:
            if refusal.code != Verdict.DUPLICATE.value:
                raise
            with trio.move_on_after(_OTHER_SIDE):
                await self._appeared.setdefault(peer, trio.Event()).wait()
            link = self._links.get(peer)
            if link is None:
                raise
            return link
        return self._start_link(peer, hello.link, welcome.boot, carrier)

    async def _offer(
        self, peer: PeerId, net_connection: Any, hello: Hello, path: str
    ) -> tuple[Carrier, Welcome]:
        answered = self._offering[peer] = trio.Event()
        try:
            return await open_lanes(net_connection, hello, path=path)
        finally:
            del self._offering[peer]
            answered.set()

    async def _dial_first(self, peer: PeerId, addresses: Sequence[str]) -> MeshConnection:
        """Dial all addresses, one after the other in quick succession; the first to answer wins."""
        targets = []
        for text in addresses:
            named, address = parse_address(text)
            if named == peer and parse_circuit(text) is None:
                targets.append(address)
        if not targets:
            raise DialError(f"no address for {peer}")
        winner: list[MeshConnection] = []
        errors: list[TransportError] = []

        async def attempt(address: Multiaddr, failed: trio.Event) -> None:
            try:
                connection = await self._quic.dial(address)
            except TransportError as error:
                errors.append(error)
                failed.set()
                return
            if winner:
                connection.shut(reason="another address answered first")
            else:
                winner.append(connection)
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                for address in targets:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed)
                    with trio.move_on_after(_STAGGER):
                        await failed.wait()
        except BaseException:
            for connection in winner:
                connection.shut(reason="dial given up")
            raise
        if winner:
            return winner[0]
        raise next((e for e in errors if isinstance(e, NotAdmitted)), errors[0])

    def accepted(self, connection: MeshConnection) -> None:
        """An inbound connection whose peer is admitted."""
        if self.nursery is None:
            connection.shut(reason="shutting down")
        else:
            self.nursery.start_soon(self._register, connection)

    async def _register(self, connection: MeshConnection) -> None:
        # Not through the swarm's own handler: it counts every connection ever accepted against a
        # limit that it never gives back.
        try:
            await self._swarm.add_conn(connection, direction="inbound")
        except Exception as error:
            logger.info("a connection was not taken: %s", error)
            connection.shut(reason="not taken")

    async def offered(self, offer: Offer) -> None:
        """A peer offers a link; see ``pairing`` for who gives way to whom."""
        peer = PeerId(offer.connection.peer_id.to_base58())
        while True:
            current = self._links.get(peer)
            existing = None
            if current is not None:
                existing = Existing(current.link_id, current.peer_boot, current.offered_here)
            answered = self._offering.get(peer)
            verdict = decide(
                offer.hello,
                me=self._me,
                peer=peer,
                existing=existing,
                offering=answered is not None,
            )
            if verdict is not Verdict.WAIT or answered is None:
                break
            await answered.wait()
        if verdict is Verdict.ACCEPT:
            if current is not None:
                current.down("replaced by a new link from the same peer")
            carrier = offer.welcome(self._boot, path=self._path_of(offer.connection))
            self._start_link(peer, offer.hello.link, offer.hello.boot, carrier)
        elif verdict is Verdict.MOVE and current is not None and current.can_move:
            path = self._path_of(offer.connection, moving=current.path == "relayed")
            await current.move(offer.welcome(self._boot, path=path))
            self._emit(LinkMoved(current))
        else:
            refusal = Verdict.UNKNOWN if verdict is Verdict.MOVE else verdict
            offer.refuse(refusal.value)

    async def promote(self, link: Link, connection: MeshConnection) -> None:
        """Move a link to a connection that this side dialled. Raises DialError."""
        try:
            net_connection = await self._swarm.add_conn(connection, direction="outbound")
        except Exception as error:
            raise DialError(f"the connection was not taken: {error}") from error
        hello = Hello(link=link.link_id, lane=0, boot=self._boot, moves=True)
        carrier, _ = await open_lanes(net_connection, hello, path="punched")
        await link.move(carrier)
        self._emit(LinkMoved(link))

    def _path_of(self, connection: Any, *, moving: bool = False) -> str:
        if not isinstance(connection, MeshConnection):
            return "relayed"
        return "punched" if moving else "direct"

    def _start_link(self, peer: PeerId, link_id: bytes, peer_boot: bytes, carrier: Carrier) -> Link:
        connection = carrier.connection
        link = Link(
            link_id=link_id,
            peer=peer,
            peer_boot=peer_boot,
            certificate=self._certificate_of(connection),
            carrier=carrier,
            services=self._services,
            liveness=Liveness(self._liveness),
            clock=time.monotonic,
            new_certificate=self._renewed,
            on_down=self._link_down,
        )
        if self.nursery is None:
            link.down("shutting down")
            raise DialError("the transport is shutting down")
        if connection.is_closed:
            link.down(carrier.close_reason or "the connection was lost")
            raise DialError(carrier.close_reason or "the connection was lost")
        self._links[peer] = link
        self._last_links[peer] = link_id
        self.nursery.start_soon(link.run)
        if (appeared := self._appeared.get(peer)) is not None:
            appeared.set()
        logger.info("link to %s is up (%s)", peer, carrier.path)
        self._emit(LinkUp(link))
        return link

    def _certificate_of(self, connection: Any) -> Certificate:
        certificate: Certificate | None = getattr(connection, "certificate", None)
        if certificate is None:
            raise NotAdmitted("the connection carries no certificate")
        return certificate

    def _link_down(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            logger.info("link to %s is down: %s", link.peer, link.close_reason)
            self._emit(LinkDown(link.peer, link.close_reason or ""))

    def shut(self) -> None:
        """End every link."""
        for link in list(self._links.values()):
            link.down("this node is shutting down")

    # -- events -------------------------------------------------------------------------------

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[LinkEvent]]:
        """Links that come up and go down from now on."""
        send, receive = trio.open_memory_channel[LinkEvent](float("inf"))
        self._listeners.add(send)
        try:
            async with receive:
                yield receive
        finally:
            self._listeners.discard(send)
            send.close()

    def _emit(self, event: LinkEvent) -> None:
        for listener in self._listeners:
            try:
                listener.send_nowait(event)
            except trio.BrokenResourceError:
                continue
