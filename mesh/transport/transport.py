"""The node's network: one host, one link for each peer, and gossip.

This is the face of the package; what it needs from py-libp2p is behind the modules beside it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import trio
from multiaddr import Multiaddr

from ca.certificate import Certificate, CertificateError
from mesh.identity import Identity, PeerId, TrustStore
from mesh.transport.addresses import parse_address
from mesh.transport.carrier import Carrier
from mesh.transport.errors import DialError, NotAdmitted, TransportError
from mesh.transport.frames import FrameKind, encode_body
from mesh.transport.host import build_host, key_pair_of
from mesh.transport.link import Link
from mesh.transport.liveness import Liveness, LivenessPolicy
from mesh.transport.opening import LINK_PROTOCOL, Door, Offer, Refused, open_lanes
from mesh.transport.pairing import Existing, Hello, Verdict, decide
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.core import Tuning
from mesh.transport.quic.listen import MeshQuicTransport
from mesh.transport.quic.tls import pack_chain, unpack_chain
from mesh.transport.serving import Handler, Services, StreamHandler
from mesh.transport.topics import Topics, Validator

logger = logging.getLogger(__name__)

_STAGGER = 0.15  # seconds between dials to several addresses of one peer
_OTHER_SIDE = 5.0  # seconds for a link that the peer opens to appear here


@dataclass(frozen=True)
class TransportConfig:
    """What an operator can set. Times in seconds."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/udp/0/quic-v1",)
    announce: tuple[str, ...] = ()  # told to others beside the addresses of the interfaces
    tuning: Tuning = field(default_factory=Tuning)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    idle_timeout: float = 60.0  # a connection that carries nothing for so long is dead


@dataclass(frozen=True)
class LinkUp:
    """A peer can be talked to."""

    link: Link


@dataclass(frozen=True)
class LinkDown:
    """A peer's link is gone. Another may already be on its way."""

    peer: PeerId
    reason: str


LinkEvent = LinkUp | LinkDown


class Transport:
    """Use ``async with Transport.open(...)``."""

    def __init__(self, config: TransportConfig, identity: Identity, trust: TrustStore) -> None:
        self.config = config
        self.peer_id: PeerId = identity.peer_id
        self.certificate = identity.certificate
        self._trust = trust
        self._boot = os.urandom(8)
        self._services = Services()
        self._links: dict[PeerId, Link] = {}
        self._last_links: dict[PeerId, bytes] = {}
        self._dials: dict[PeerId, trio.Event] = {}
        self._appeared: dict[PeerId, trio.Event] = {}
        self._listeners: set[trio.MemorySendChannel[LinkEvent]] = set()
        self._nursery: trio.Nursery | None = None
        keys = key_pair_of(identity.key)
        self._quic = MeshQuicTransport(
            keys.private_key,
            chain=identity.certificate.chain_der,
            verify=self._verify_peer,
            tuning=config.tuning,
            idle_timeout=config.idle_timeout,
            keepalive=config.liveness.idle_ping,
        )
        self._host = build_host(
            keys, self._quic, is_admitted=self._is_admitted, advertised=self._advertised
        )
        self._swarm = self._host.get_network()
        self._topics = Topics(self._host)
        self._door = Door(self._offered)
        self._host.set_stream_handler(LINK_PROTOCOL, self._door.lane_opened)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: TransportConfig, identity: Identity, trust: TrustStore
    ) -> AsyncIterator[Transport]:
        """Listen and serve until the context is left; then close every link properly.

        Raises ListenError, with a message for the user, when an address cannot be listened on.
        """
        transport = cls(config, identity, trust)
        unhook = trust.on_revocation(lambda _: transport.recheck(time.time()))
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(transport._quic.endpoint.run)
                transport._quic.endpoint.on_accept = transport._accepted
                try:
                    async with transport._host.run([]), transport._topics.running():
                        transport._nursery = nursery
                        await transport._listen()
                        yield transport
                        transport._shut_links()
                finally:
                    transport._nursery = None
                    with trio.CancelScope(shield=True), trio.move_on_after(2):
                        await transport._host.close()
                nursery.cancel_scope.cancel()
        finally:
            unhook()

    # -- addresses ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        for text in self.config.listen:
            address = Multiaddr(text)
            listener = self._quic.create_listener(None)
            await listener.listen(address)
            # Not through Swarm.listen, which hides why an address cannot be had.
            self._swarm.listeners[text] = listener

    @property
    def addresses(self) -> list[str]:
        """Where this node can be reached, as far as it knows, each ending in ``/p2p/<PeerId>``."""
        return [str(address) for address in self._host.get_addrs()]

    def _advertised(self, listening: Sequence[Multiaddr]) -> list[Multiaddr]:
        return [*listening, *(Multiaddr(text) for text in self.config.announce)]

    # -- admission ----------------------------------------------------------------------------

    def _verify_peer(self, chain: Sequence[bytes] | None, peer: PeerId) -> Certificate:
        return self._trust.verify_peer(chain, peer, time.time())

    def _is_admitted(self, connection: Any) -> bool:
        return False

    def recheck(self, now: float) -> None:
        """Close links whose certificate does not count any more at ``now`` (epoch seconds).

        Called by itself whenever a newer revocation list is taken.
        """
        for link in list(self._links.values()):
            try:
                self._trust.verify_peer(link.certificate.chain_der, link.peer, now)
            except CertificateError as error:
                link.down(f"not admitted any more: {error.message}")
        for connection in self._quic.endpoint.connections:
            if connection.certificate is None or connection.peer_id is None:
                continue
            try:
                peer = PeerId(connection.peer_id.to_base58())
                self._trust.verify_peer(connection.certificate.chain_der, peer, now)
            except CertificateError as error:
                connection.shut(reason=f"not admitted: {error.message}")

    def renew(self, certificate: Certificate) -> None:
        """Show a renewed certificate: in new handshakes, and to the peers of live links."""
        self.certificate = certificate
        self._quic.renew(certificate.chain_der)
        body = encode_body(pack_chain(certificate.chain_der))
        for link in list(self._links.values()):
            link.tell(FrameKind.CERTIFICATE, body)

    def _renewed_peer(self, link: Link, body: object) -> Certificate:
        if not isinstance(body, bytes):
            raise NotAdmitted("the certificate chain cannot be read")
        try:
            certificate = self._verify_peer(unpack_chain(body), link.peer)
        except CertificateError as error:
            raise NotAdmitted(error.message) from error
        if isinstance(connection := link.carrier.connection, MeshConnection):
            connection.certificate = certificate
        return certificate

    # -- links --------------------------------------------------------------------------------

    @property
    def links(self) -> Mapping[PeerId, Link]:
        """Links that are up. A live view."""
        return MappingProxyType(self._links)

    def link(self, peer: PeerId) -> Link | None:
        return self._links.get(peer)

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
        if peer == self.peer_id:
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
        if self._nursery is None:
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
        connection = await self._dial_first(peer, addresses)
        try:
            net_connection = await self._swarm.add_conn(connection, direction="outbound")
            return await self._offer_link(peer, net_connection, path="direct")
        except BaseException as error:
            refused = connection.close_reason.startswith("not admitted")
            reason = connection.close_reason
            connection.shut(reason="the link was not opened")
            if refused and isinstance(error, Exception):
                raise NotAdmitted(f"the peer refused us: {reason}") from error
            if isinstance(error, Exception) and not isinstance(error, TransportError):
                raise DialError(f"the link was not opened: {error}") from error
            raise

    async def _offer_link(self, peer: PeerId, net_connection: Any, *, path: str) -> Link:
        hello = Hello(link=os.urandom(16), lane=0, boot=self._boot, last=self._last_links.get(peer))
        try:
            carrier, welcome = await open_lanes(net_connection, hello, path=path)
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

    async def _dial_first(self, peer: PeerId, addresses: Sequence[str]) -> MeshConnection:
        """Dial all addresses, one after the other in quick succession; the first to answer wins."""
        targets = []
        for text in addresses:
            named, address = parse_address(text)
            if named == peer:
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

        async with trio.open_nursery() as nursery:
            for address in targets:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(_STAGGER):
                    await failed.wait()
        if winner:
            return winner[0]
        raise next((e for e in errors if isinstance(e, NotAdmitted)), errors[0])

    def _accepted(self, connection: MeshConnection) -> None:
        """An inbound connection whose peer is admitted."""
        if self._nursery is None:
            connection.shut(reason="shutting down")
        else:
            self._nursery.start_soon(self._register, connection)

    async def _register(self, connection: MeshConnection) -> None:
        # Not through the swarm's own handler: it counts every connection ever accepted against a
        # limit that it never gives back.
        try:
            await self._swarm.add_conn(connection, direction="inbound")
        except Exception as error:
            logger.info("a connection was not taken: %s", error)
            connection.shut(reason="not taken")

    async def _offered(self, offer: Offer) -> None:
        """A peer offers a link; see ``pairing`` for who gives way to whom."""
        peer = PeerId(offer.connection.peer_id.to_base58())
        while True:
            current = self._links.get(peer)
            existing = None
            if current is not None:
                existing = Existing(current.link_id, current.peer_boot, current.offered_here)
            dial = self._dials.get(peer)
            verdict = decide(
                offer.hello,
                me=self.peer_id,
                peer=peer,
                existing=existing,
                dialling=dial is not None,
            )
            if verdict is not Verdict.WAIT or dial is None:
                break
            await dial.wait()
        if verdict is Verdict.ACCEPT:
            if current is not None:
                current.down("replaced by a new link from the same peer")
            carrier = offer.welcome(self._boot, path=self._path_of(offer.connection))
            self._start_link(peer, offer.hello.link, offer.hello.boot, carrier)
        elif verdict is Verdict.MOVE and current is not None:
            carrier = offer.welcome(self._boot, path=self._path_of(offer.connection))
            await current.move(carrier)
        else:
            offer.refuse(verdict.value)

    def _path_of(self, connection: Any) -> str:
        return "direct" if isinstance(connection, MeshConnection) else "relayed"

    def _start_link(self, peer: PeerId, link_id: bytes, peer_boot: bytes, carrier: Carrier) -> Link:
        connection = carrier.connection
        link = Link(
            link_id=link_id,
            peer=peer,
            peer_boot=peer_boot,
            certificate=self._certificate_of(connection),
            carrier=carrier,
            services=self._services,
            liveness=Liveness(self.config.liveness),
            clock=time.monotonic,
            new_certificate=self._renewed_peer,
            on_down=self._link_down,
        )
        if self._nursery is None:
            link.down("shutting down")
            raise DialError("the transport is shutting down")
        if connection.is_closed:
            link.down(carrier.close_reason or "the connection was lost")
            raise DialError(carrier.close_reason or "the connection was lost")
        self._links[peer] = link
        self._last_links[peer] = link_id
        self._nursery.start_soon(link.run)
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

    def _shut_links(self) -> None:
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

    # -- services and gossip ------------------------------------------------------------------

    def serve(self, kind: str, handler: Handler) -> None:
        """Answer requests of ``kind`` with one message. Raises ValueError if it has a handler."""
        self._services.add(kind, handler)

    def serve_stream(self, kind: str, handler: StreamHandler) -> None:
        """Answer requests of ``kind`` with what an async generator yields. It is closed when the
        caller cancels, and held back while the caller does not read."""
        self._services.add_stream(kind, handler)

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip ``data`` (at most 64 KiB) to all subscribers of ``topic``."""
        await self._topics.publish(topic, data)

    def subscribe(
        self, topic: str, validator: Validator
    ) -> AbstractAsyncContextManager[AsyncIterator[tuple[PeerId, bytes]]]:
        """Gossip of ``topic`` as (author, data); ``validator`` decides what is passed on."""
        return self._topics.subscribe(topic, validator)
