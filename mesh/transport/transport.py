"""The node's network: one host, one link for each peer, and gossip.

This is the face of the package; what it needs from py-libp2p is behind the modules beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import multiaddr.exceptions
import trio
from multiaddr import Multiaddr

from ca.certificate import Certificate, CertificateError
from mesh.identity import Identity, PeerId, TrustStore
from mesh.transport.contacts import Contacts
from mesh.transport.errors import DialError, ListenError, NotAdmitted
from mesh.transport.frames import FrameKind, encode_body
from mesh.transport.host import build_host, key_pair_of
from mesh.transport.kademlia import Lookup
from mesh.transport.keeper import Keeper
from mesh.transport.link import Link
from mesh.transport.linkbench import ECHO, SINK, SOURCE, BenchServices
from mesh.transport.links import LinkDown, LinkEvent, Links, LinkUp
from mesh.transport.liveness import LivenessPolicy
from mesh.transport.mdns import LocalDiscovery
from mesh.transport.netwatch import watch_network
from mesh.transport.observe import ObservedAddresses
from mesh.transport.opening import LINK_PROTOCOL, Door
from mesh.transport.portmap import PortMapping
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.core import Tuning
from mesh.transport.quic.listen import MeshQuicTransport, endpoint_of, quic_address
from mesh.transport.quic.tls import pack_chain, unpack_chain
from mesh.transport.reach import DIAL_BACK, PUNCH, SEEN, Reachability
from mesh.transport.relay import Relay, RelayLimits
from mesh.transport.serving import Handler, Services, StreamHandler
from mesh.transport.topics import Topics, Validator

logger = logging.getLogger(__name__)

MAX_SIGHTINGS = 256  # nodes seen on the local network that are remembered


@dataclass(frozen=True)
class TransportConfig:
    """What an operator can set. Times in seconds."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/udp/0/quic-v1",)
    announce: tuple[str, ...] = ()  # told to others beside the addresses of the interfaces
    tuning: Tuning = field(default_factory=Tuning)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    idle_timeout: float = 60.0  # a connection that carries nothing for so long is dead
    relay: RelayLimits = field(default_factory=RelayLimits)
    peers: tuple[str, ...] = ()  # full addresses of peers to keep links to
    keep_links: bool = True  # dial again peers whose link was lost
    remember: Path | None = None  # file of peers seen before; None: do not remember
    kademlia: bool = False  # look up peers whose addresses nobody told, for larger meshes
    upnp: bool = False  # ask the router for a port
    mdns: bool = False  # announce and look for nodes of the network on the local network
    mdns_interfaces: tuple[str, ...] = ()  # addresses of the interfaces for that; empty: all


class Transport:
    """Use ``async with Transport.open(...)``."""

    def __init__(self, config: TransportConfig, identity: Identity, trust: TrustStore) -> None:
        self.config = config
        self.peer_id: PeerId = identity.peer_id
        self.certificate = identity.certificate
        self._trust = trust
        self._services = Services()
        self._observed = ObservedAddresses()
        self._mapped: list[Multiaddr] = []  # by the router, for this node
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
        self._relay = Relay(
            self._host,
            chain=lambda: self.certificate.chain_der,
            verify=self._verify_peer,
            limits=config.relay,
        )
        self._links = Links(
            me=self.peer_id,
            swarm=self._swarm,
            quic=self._quic,
            services=self._services,
            liveness=config.liveness,
            renewed=self._renewed_peer,
            relay=self._relay,
        )
        self._reach = Reachability(
            links=self._links,
            quic=self._quic,
            observed=self._observed,
            own=self._own_endpoints,
            promote=self._links.promote,
        )
        bench = BenchServices()
        self._services.add(ECHO, bench.echo)
        self._services.add(SINK, bench.sink)
        self._services.add_stream(SOURCE, bench.source)
        self._services.add(SEEN, self._reach.seen)
        self._services.add(DIAL_BACK, self._reach.dial_back)
        self._services.add(PUNCH, self._reach.punch)
        self._discovery: LocalDiscovery | None = None
        self._sightings: dict[PeerId, tuple[str, ...]] = {}
        self._contacts = Contacts(config.remember)
        self._keeper = Keeper(
            self.peer_id,
            self._links,
            self._contacts,
            keep_all=config.keep_links,
            rng=Random(),
        )
        self._lookup = Lookup(self._host, self._links) if config.kademlia else None
        self._door = Door(self._links.offered)
        self._host.set_stream_handler(LINK_PROTOCOL, self._door.lane_opened)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: TransportConfig, identity: Identity, trust: TrustStore
    ) -> AsyncIterator[Transport]:
        """Listen and serve until the context is left; then close every link properly.

        Raises ListenError, with a message for the user, when an address cannot be listened on, and
        DialError for one of ``config.peers`` that is no full address.
        """
        transport = cls(config, identity, trust)
        unhook = trust.on_revocation(lambda _: transport.recheck(time.time()))
        failure: Exception | None = None
        left = False
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(transport._quic.endpoint.run)
                transport._quic.endpoint.on_accept = transport._links.accepted
                try:
                    async with (
                        transport._host.run([]),
                        transport._topics.running(),
                        transport._lookup.running() if transport._lookup else nullcontext(),
                    ):
                        transport._links.nursery = nursery
                        try:
                            await transport._listen()
                            await transport._find_peers(nursery)
                            yield transport
                        except Exception as error:
                            failure = error  # raised below, outside of five nested nurseries
                        transport._links.shut()
                        left = True
                except* RuntimeError as closing:
                    # Tasks of py-libp2p that read what peers still send start others meanwhile,
                    # in a nursery that is closing.
                    if not left:
                        raise
                    logger.debug("while closing: %s", closing.exceptions)
                finally:
                    transport._links.nursery = None
                    with trio.CancelScope(shield=True), trio.move_on_after(2):
                        await transport._host.close()
                nursery.cancel_scope.cancel()
        finally:
            unhook()
        if failure is not None:
            raise failure

    async def _keep_gossip(self) -> None:
        """Peers with a link are in gossip, and others are not."""
        async with trio.open_nursery() as nursery, self.events() as events:
            async for event in events:
                if isinstance(event, LinkUp):
                    link = event.link
                    nursery.start_soon(self._topics.ensure, link.peer, link.wait_down)
                elif isinstance(event, LinkDown):
                    nursery.start_soon(self._topics.clear, event.peer)

    def _network_changed(self, nursery: trio.Nursery) -> None:
        """See which links still work, and dial again what does not."""
        for link in list(self.links.values()):
            nursery.start_soon(link.check)
        self._keeper.hurry()
        if self._discovery is not None:
            self._discovery.network_changed(self.addresses)

    async def _find_peers(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._keep_gossip)
        nursery.start_soon(watch_network, partial(self._network_changed, nursery))
        nursery.start_soon(self._reach.run)
        if self.config.upnp and (own := self._own_endpoints()):
            mapping = PortMapping(own[0][1], self._port_mapped)
            nursery.start_soon(mapping.run)
        await nursery.start(self._keeper.run)
        for address in self.config.peers:
            self._keeper.keep_address(address)
        if self.config.mdns:
            self._discovery = LocalDiscovery(
                network=self._trust.network,
                peer_id=self.peer_id,
                found=self._found,
                interfaces=self.config.mdns_interfaces,
            )
            nursery.start_soon(self._discovery.run, self.addresses)

    def _found(self, peer: PeerId, addresses: Sequence[str]) -> None:
        # What answers to mDNS is unproved until the handshake: those who proved it stay longest.
        self._sightings.pop(peer, None)
        if len(self._sightings) >= MAX_SIGHTINGS:
            oldest = next((p for p in self._sightings if p not in self.links), None)
            del self._sightings[oldest or next(iter(self._sightings))]
        self._sightings[peer] = tuple(addresses)
        self._keeper.suggest(peer, addresses)

    @property
    def sightings(self) -> Mapping[PeerId, tuple[str, ...]]:
        """Who has been seen on the local network, admitted or not, and where. A live view."""
        return MappingProxyType(self._sightings)

    # -- addresses ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        for text in self.config.listen:
            try:
                address = Multiaddr(text)
            except (multiaddr.exceptions.Error, ValueError) as error:
                raise ListenError(
                    f"not an address to listen on: {text!r}, as in /ip4/0.0.0.0/udp/4001/quic-v1"
                ) from error
            listener = self._quic.create_listener(None)
            await listener.listen(address)
            # Not through Swarm.listen, which hides why an address cannot be had.
            self._swarm.listeners[text] = listener

    @property
    def addresses(self) -> list[str]:
        """Where this node can be reached, as far as it knows, each ending in ``/p2p/<PeerId>``."""
        return [str(address) for address in self._host.get_addrs()]

    def _advertised(self, listening: Sequence[Multiaddr]) -> list[Multiaddr]:
        own = [endpoint_of(address) for address in listening]
        observed = [quic_address(*pair) for pair in self._observed.confirmed(own)]
        announced = [Multiaddr(text) for text in self.config.announce]
        return list(dict.fromkeys([*listening, *observed, *self._mapped, *announced]))

    def _port_mapped(self, host: str, port: int) -> None:
        self._mapped = [quic_address(host, port)]

    def _own_endpoints(self) -> list[tuple[str, int]]:
        return [
            endpoint_of(address)
            for listener in self._swarm.listeners.values()
            for address in listener.get_addrs()
        ]

    @property
    def is_reachable(self) -> bool:
        """A peer has dialled this node at an observed address with success: it can relay."""
        return self._observed.is_reachable

    # -- admission ----------------------------------------------------------------------------

    def _verify_peer(self, chain: Sequence[bytes] | None, peer: PeerId) -> Certificate:
        return self._trust.verify_peer(chain, peer, time.time())

    def _is_admitted(self, connection: Any) -> bool:
        """A connection that is not QUIC: its certificate was checked before it got streams."""
        return getattr(connection, "certificate", None) is not None

    def recheck(self, now: float) -> None:
        """Close links whose certificate does not count any more at ``now`` (epoch seconds).

        Called by itself whenever a newer revocation list is taken.
        """
        for link in list(self.links.values()):
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
        for link in list(self.links.values()):
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
        return self._links.up

    def link(self, peer: PeerId) -> Link | None:
        return self._links.up.get(peer)

    async def connect(self, address: str, timeout: float = 10.0) -> Link:
        """The link to the peer at a full address (``/ip4/…/udp/…/quic-v1/p2p/…``).

        Raises DialError, and NotAdmitted when either side does not admit the other.
        """
        return await self._links.connect(address, timeout)

    async def link_to(
        self, peer: PeerId, addresses: Sequence[str], *, timeout: float = 10.0
    ) -> Link:
        """The link to ``peer``: the one there is, or a new one by the first address that answers.

        Raises as :meth:`connect` does.
        """
        try:
            return await self._links.link_to(peer, addresses, timeout=timeout)
        except DialError:
            if self._lookup is None:
                raise
            found = await self._lookup.find(peer)
            if not set(found) - set(addresses):
                raise
            return await self._links.link_to(peer, found, timeout=timeout)

    def keep(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Keep a link to ``peer``: dial until it is up, and again when it is lost."""
        self._keeper.keep(peer, addresses)

    def drop(self, peer: PeerId) -> None:
        """Do not dial ``peer`` any more, and end its link."""
        self._keeper.drop(peer)
        self._contacts.remove(peer)
        if (link := self.link(peer)) is not None:
            link.down("not wanted any more")

    @property
    def known_peers(self) -> Mapping[PeerId, Sequence[str]]:
        """Peers whose addresses are known, linked or not."""
        return self._contacts.all()

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[LinkEvent]]:
        """Links that come up and go down from now on."""
        return self._links.events()

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
