"""Keeps links: dials peers that are wanted, again and again, with growing pauses.

Peers come from the configuration, from mDNS, from what was remembered, and from whoever calls
:meth:`Keeper.keep`. A link that is lost is dialled again at once, then with back-off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import trio

from mesh.identity import PeerId
from mesh.transport.addresses import parse_address
from mesh.transport.backoff import Backoff
from mesh.transport.carrier import Carrier
from mesh.transport.contacts import Contacts
from mesh.transport.errors import DialError, NotAdmitted, TransportError
from mesh.transport.links import Links, LinkUp
from mesh.transport.quic.connection import MeshConnection

logger = logging.getLogger(__name__)

MAX_KEPT = 256  # peers that are dialled again and again
_STABLE = 10.0  # seconds up after which a loss starts the back-off afresh
_GIVE_UP_AFTER = 7 * 86_400.0  # seconds in vain before a peer is no longer wanted


class Keeper:
    """Run it with :meth:`run` for as long as links shall be kept."""

    def __init__(
        self, me: PeerId, links: Links, contacts: Contacts, *, keep_all: bool, rng: Random
    ) -> None:
        """``keep_all``: keep every link that comes up, whoever dialled."""
        self._me = me
        self._links = links
        self._contacts = contacts
        self._keep_all = keep_all
        self._rng = rng
        self._kept: dict[PeerId, trio.CancelScope] = {}
        self._hurry = trio.Event()
        self._nursery: trio.Nursery | None = None

    @property
    def kept(self) -> frozenset[PeerId]:
        return frozenset(self._kept)

    def keep(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Keep a link to ``peer``. Said again, it adds addresses and has them tried at once."""
        if peer == self._me:
            return
        news = self._contacts.add(peer, addresses, now=time.time())
        if peer in self._kept:
            if news:
                self.hurry()
            return
        if self._nursery is None or len(self._kept) >= MAX_KEPT:
            return
        scope = self._kept[peer] = trio.CancelScope()
        self._nursery.start_soon(self._keep, peer, scope)

    def keep_address(self, address: str) -> None:
        """The same for a full address. Raises DialError for what is none."""
        peer, _ = parse_address(address)
        self.keep(peer, [address])

    def drop(self, peer: PeerId) -> None:
        """Do not dial the peer any more; a link that is up stays."""
        if (scope := self._kept.pop(peer, None)) is not None:
            scope.cancel()

    def hurry(self) -> None:
        """Something has changed (a network, an address): try again now what waits."""
        self._hurry.set()
        self._hurry = trio.Event()

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Keep links until cancelled. Starts with everybody who is remembered."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._remember)
            for peer, addresses in self._contacts.all().items():
                self.keep(peer, addresses)
            task_status.started()

    async def _keep(self, peer: PeerId, scope: trio.CancelScope) -> None:
        backoff = Backoff(self._rng)
        in_vain_since = trio.current_time()
        with scope:
            while True:
                wait = await self._once(peer, backoff)
                if wait is None:
                    in_vain_since = trio.current_time()
                    continue
                if trio.current_time() - in_vain_since > _GIVE_UP_AFTER:
                    logger.info("%s has not been seen for a week: forgotten", peer)
                    self._contacts.remove(peer)
                    break
                hurry = self._hurry
                with trio.move_on_after(wait):
                    await hurry.wait()
        if self._kept.get(peer) is scope:
            del self._kept[peer]

    async def _once(self, peer: PeerId, backoff: Backoff) -> float | None:
        """Dial and hold one link. Returns seconds to wait after a failure; None after a link."""
        try:
            link = await self._links.link_to(peer, self._contacts.addresses(peer))
        except NotAdmitted as error:
            logger.info("%s: %s", peer, error)
            return backoff.refused()
        except (DialError, TransportError, OSError) as error:
            logger.debug("%s: %s", peer, error)
            return backoff.failed()
        began = trio.current_time()
        await link.wait_down()
        if trio.current_time() - began >= _STABLE:
            backoff.succeeded()
            return None
        return backoff.failed()

    async def _remember(self) -> None:
        """Write down where a peer was reached, whoever dialled: sockets are shared, so the address
        of an incoming connection is one that can be dialled."""
        async with self._links.events() as events:
            async for event in events:
                if isinstance(event, LinkUp):
                    peer = event.link.peer
                    addresses = dialable(peer, event.link.carrier)
                    if self._contacts.add(peer, addresses, now=time.time()):
                        await trio.to_thread.run_sync(self._contacts.save)
                    if self._keep_all:
                        self.keep(peer, addresses)


def dialable(peer: PeerId, carrier: Carrier) -> list[str]:
    """The address at the other end of a direct connection."""
    if not isinstance(carrier.connection, MeshConnection):
        return []
    return [f"{address}/p2p/{peer}" for address in carrier.connection.get_transport_addresses()]
