"""Keeps links: dials peers that are wanted, again and again, with growing pauses.

Peers come from the configuration, from what was remembered, and from whoever calls
:meth:`Keeper.keep`. A link that is lost is dialled again at once, then with back-off.

What comes from mDNS anybody on the local network may have said. It goes through
:meth:`Keeper.suggest`: such *candidates* have places of their own, few of them, which they lose to
others once a dial has failed, and their addresses are tried after those that are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from mesh.identity import PeerId
from mesh.transport.addresses import parse_address
from mesh.transport.backoff import Backoff
from mesh.transport.carrier import Carrier
from mesh.transport.contacts import MAX_ADDRESSES, Contacts
from mesh.transport.errors import NotAdmitted, TransportError
from mesh.transport.link import Link
from mesh.transport.links import Links, LinkUp
from mesh.transport.quic.connection import MeshConnection

logger = logging.getLogger(__name__)

MAX_KEPT = 256  # peers that are dialled again and again
MAX_CANDIDATES = 64
_STABLE = 10.0  # seconds up after which a loss starts the back-off afresh
_GIVE_UP_AFTER = 7 * 86_400.0  # seconds in vain before a peer is no longer wanted
_GIVE_UP_CANDIDATE_AFTER = 3600.0
_HINT_TIME = 5.0  # seconds that an address on the local network has to answer


@dataclass(slots=True, eq=False)
class _Place:
    """A peer that is dialled again and again."""

    candidate: bool  # only suggested so far
    hints: tuple[str, ...] = ()  # addresses that were suggested
    failed: bool = False  # the last dial
    for_good: bool = False  # however long it is away
    news: trio.Event = field(default_factory=trio.Event)  # something that a dial may profit from
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


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
        self._places: dict[PeerId, _Place] = {}
        self._nursery: trio.Nursery | None = None

    def keep(self, peer: PeerId, addresses: Sequence[str], *, for_good: bool = False) -> None:
        """Keep a link to ``peer``. Said again, it adds addresses and has them tried at once.

        ``for_good``: dial it however long it has not been seen.
        """
        if peer == self._me:
            return
        news = self._contacts.add(peer, addresses, now=time.time())
        place = self._places.get(peer)
        if place is not None:
            place.for_good |= for_good
            if news:
                place.news.set()
            if not place.candidate:
                return
        if sum(not place.candidate for place in self._places.values()) >= MAX_KEPT:
            return
        if place is not None:
            place.candidate = False
        else:
            self._start(peer, _Place(candidate=False, for_good=for_good))

    def suggest(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Try to get a link to ``peer``, which is at these addresses if what was heard is true."""
        if peer == self._me:
            return
        place = self._places.get(peer)
        if place is None:
            candidates = [(p, place) for p, place in self._places.items() if place.candidate]
            if len(candidates) >= MAX_CANDIDATES:
                tried = next((p for p, place in candidates if place.failed), None)
                if tried is None:
                    logger.debug("no place for %s: too many are said to be there", peer)
                    return
                self.drop(tried)
            place = _Place(candidate=True)
            self._start(peer, place)
        hints = tuple(addresses[:MAX_ADDRESSES])
        if not set(hints) <= set(place.hints):
            place.news.set()
        place.hints = hints

    def _start(self, peer: PeerId, place: _Place) -> None:
        if self._nursery is not None:
            self._places[peer] = place
            self._nursery.start_soon(self._keep, peer, place)

    def keep_address(self, address: str) -> None:
        """The same, for good, for a full address. Raises DialError for what is none."""
        peer, _ = parse_address(address)
        self.keep(peer, [address], for_good=True)

    def drop(self, peer: PeerId) -> None:
        """Do not dial the peer any more; a link that is up stays."""
        if (place := self._places.pop(peer, None)) is not None:
            place.scope.cancel()

    def hurry(self) -> None:
        """Something has changed (a network, an address): try again now what waits."""
        for place in self._places.values():
            place.news.set()

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Keep links until cancelled. Starts with everybody who is remembered."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._remember)
            for peer, addresses in self._contacts.all().items():
                self.keep(peer, addresses)
            task_status.started()

    async def _keep(self, peer: PeerId, place: _Place) -> None:
        backoff = Backoff(self._rng)
        in_vain_since = trio.current_time()
        with place.scope:
            while True:
                place.news = trio.Event()  # before the dial: what is told meanwhile counts
                wait = await self._once(peer, place, backoff)
                if wait is None:
                    in_vain_since = trio.current_time()
                    continue
                if not place.candidate and not self._links.up:
                    in_vain_since = trio.current_time()  # this node may be what is cut off
                in_vain = trio.current_time() - in_vain_since
                if place.candidate and in_vain > _GIVE_UP_CANDIDATE_AFTER:
                    break
                if in_vain > _GIVE_UP_AFTER and not place.for_good:
                    logger.info("%s has not been seen for a week: forgotten", peer)
                    self._contacts.remove(peer)
                    break
                with trio.move_on_after(wait):
                    await place.news.wait()
        if self._places.get(peer) is place:
            del self._places[peer]

    async def _once(self, peer: PeerId, place: _Place, backoff: Backoff) -> float | None:
        """Dial and hold one link. Returns seconds to wait after a failure; None after a link."""
        known = self._contacts.addresses(peer)
        hints = [address for address in place.hints if address not in known]
        try:
            link = await self._dial(peer, known, hints)
        except NotAdmitted as error:
            logger.info("%s: %s", peer, error)
            place.failed = True
            return backoff.failed() if known and hints else backoff.refused()
        except (TransportError, OSError) as error:
            logger.debug("%s: %s", peer, error)
            place.failed = True
            return backoff.failed()
        place.failed = False
        began = trio.current_time()
        await link.wait_down()
        if trio.current_time() - began >= _STABLE:
            backoff.succeeded()
            return None
        return backoff.failed()

    async def _dial(self, peer: PeerId, known: list[str], hints: list[str]) -> Link:
        """Raises TransportError, OSError."""
        if not hints:
            return await self._links.link_to(peer, known)
        # One after the other, so that a stranger at a hint cannot answer in the peer's place.
        if known:
            with suppress(TransportError, OSError):
                return await self._links.link_to(peer, known)
        return await self._links.link_to(peer, hints, timeout=_HINT_TIME)

    async def _remember(self) -> None:
        """Write down where a peer was reached, whoever dialled: sockets are shared, so the address
        of an incoming connection is one that can be dialled."""
        async with self._links.events() as events:
            async for event in events:
                if isinstance(event, LinkUp):
                    peer = event.link.peer
                    addresses = dialable(peer, event.link.carrier)
                    if self._contacts.add(peer, addresses, now=time.time()):
                        await self._contacts.save()
                    if self._keep_all:
                        self.keep(peer, addresses)


def dialable(peer: PeerId, carrier: Carrier) -> list[str]:
    """The address at the other end of a direct connection."""
    if not isinstance(carrier.connection, MeshConnection):
        return []
    return [f"{address}/p2p/{peer}" for address in carrier.connection.get_transport_addresses()]
