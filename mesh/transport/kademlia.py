"""Finding the address of a peer nobody here has a link to: Kademlia, for meshes too large for all
pairs to be linked.

py-libp2p's implementation of the lookup, as a server of peers only: no values, no providers, no
random walks. It learns of admitted peers when their links come up, and asks only admitted ones,
since nothing else can be connected to.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from mesh.identity import PeerId
from mesh.transport.errors import TransportError
from mesh.transport.keeper import dialable
from mesh.transport.link import Link
from mesh.transport.links import Links, LinkUp

logger = logging.getLogger(__name__)

_REMEMBER = 3600  # seconds for which an address stays in the library's address book
_LOOKUP = 10.0  # seconds
_DIAL = 3.0  # seconds for each peer on the way


class Lookup:
    """Use inside :meth:`running`."""

    def __init__(self, host: Any, links: Links) -> None:
        self._host = host
        self._links = links
        self._table = KadDHT(
            host,
            DHTMode.SERVER,
            enable_random_walk=False,
            enable_providers=False,
            enable_values=False,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._host.get_network().dial_peer = self._dial
        async with background_trio_service(self._table), trio.open_nursery() as nursery:
            nursery.start_soon(self._learn)
            yield
            nursery.cancel_scope.cancel()

    async def _dial(self, peer: ID) -> list[Any]:
        """The library wants a connection to a peer on the way to another: it gets a link."""
        name = PeerId(peer.to_base58())
        book = self._host.get_peerstore()
        try:
            addresses = [f"{address}/p2p/{name}" for address in book.addrs(peer)]
            await self._links.link_to(name, addresses, timeout=_DIAL)
        except (TransportError, PeerStoreError) as error:
            raise SwarmException(f"{name} cannot be reached: {error}") from error
        connections: list[Any] = self._host.get_network().get_connections(peer)
        return connections

    async def _learn(self) -> None:
        async with self._links.events() as events:
            for link in list(self._links.up.values()):
                await self._add(link)
            async for event in events:
                if isinstance(event, LinkUp):
                    await self._add(event.link)

    async def _add(self, link: Link) -> None:
        addresses = [
            Multiaddr(text.partition("/p2p/")[0]) for text in dialable(link.peer, link.carrier)
        ]
        if addresses:
            peer = ID.from_string(link.peer)
            self._host.get_peerstore().add_addrs(peer, addresses, _REMEMBER)
            await self._table.add_peer(peer)

    async def find(self, peer: PeerId) -> list[str]:
        """Addresses of ``peer`` as the mesh knows them; empty when it does not. Never raises."""
        found: Any = None
        with trio.move_on_after(_LOOKUP):
            try:
                found = await self._table.find_peer(ID.from_string(peer))
            except Exception as error:
                logger.debug("lookup of %s: %r", peer, error)
        if found is None:
            return []
        suffix = f"/p2p/{peer}"
        return [
            text if text.endswith(suffix) else text + suffix
            for text in (str(address) for address in found.addrs)
        ]
