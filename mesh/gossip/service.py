"""Gossip at work: a thin layer of I/O around the pure tables.

One loop waits for the earliest of their deadlines (membership, publishing, dialling, anti-entropy)
or for something to happen; nothing is polled.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Unpack

import trio

from ca.certificate import CertificateError
from ca.crl import RevocationList
from mesh.gossip import events
from mesh.gossip.advert import (
    Advert,
    HoldingLoad,
    LoadReport,
    SignedAdvert,
    in_time,
    sign_advert,
    sign_load,
)
from mesh.gossip.announcement import Announcement, Changes
from mesh.gossip.anti_entropy import Record
from mesh.gossip.checking import CHECK_EVERY, Checking
from mesh.gossip.dialing import Dialing
from mesh.gossip.events import Effect, Mine, MyLoad, Tick
from mesh.gossip.knowledge import Knowledge
from mesh.gossip.membership import Table
from mesh.gossip.publishing import Publishing
from mesh.gossip.talks import Talks
from mesh.gossip.view import LinkView, View, build_view
from mesh.identity import Identity, PeerId, TrustStore
from mesh.transport import Link, LinkDown, LinkMoved, LinkUp, Transport, TransportError

logger = logging.getLogger(__name__)

SYNC_EVERY = 10.0  # s
PUBLISH_TIMEOUT = 5.0  # s
LEAVE_TIME = 1.0  # s that saying goodbye may take
VIEW_AGE = 1.0  # s after which round trip times in a view are read again
MAX_ADDRESSES = 8
MAX_PEER_ID = 128  # characters
MAX_TOPIC_LIST = 48 << 10  # bytes of a revocation list that fits a gossip message
SPREAD = 3  # peers that get one that does not


class GossipService:
    """Keeps this node's view of the mesh, and the mesh's view of this node.

    ``boot`` must be greater with every start of the node (milliseconds since the epoch, or one more
    than the last); ``on_boot`` is called when others remember this node by a greater one, so that
    the greater one can be kept. Start :meth:`run` in a nursery; everything else may be called from
    the same trio loop at any time.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        trust: TrustStore,
        *,
        boot: int,
        rng: random.Random,
        on_boot: Callable[[int], None] = lambda boot: None,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._trust = trust
        self._rng = rng
        self._on_boot = on_boot
        self._sequence = 0
        self._said = Announcement()
        self._publishing = Publishing()
        self._dialing = Dialing(identity.peer_id)
        self._checking = Checking(rng)
        self._knowledge = Knowledge(
            Table(identity.peer_id, boot),
            trust,
            on_effect=self._carry_out,
            on_change=self._table_changed,
        )
        self._talks = Talks(
            transport,
            identity,
            trust,
            self._knowledge,
            boot=lambda: self.boot,
            refresh=self._refresh,
            rng=rng,
        )
        self._topics = {
            name: f"/mesh/{identity.network}/{name}/1"
            for name in ("advert", "load", "doubt", "revocation")
        }
        self._nursery: trio.Nursery | None = None
        self._woken = trio.Event()
        self._changed = trio.Event()
        self._view: tuple[Table, View] | None = None
        self._sync_at = -math.inf
        self._list_from_topic = False

    # -- what the node sees and says ----------------------------------------------------------

    @property
    def boot(self) -> int:
        """What orders this node's starts; grows while it runs only if it began too low."""
        return self._knowledge.table.boot

    @property
    def view(self) -> View:
        """The mesh as this node sees it now."""
        table, now = self._knowledge.table, trio.current_time()
        if self._view is None or self._view[0] is not table or now - self._view[1].at > VIEW_AGE:
            links = {
                peer: LinkView(link.rtt, link.path) for peer, link in self._transport.links.items()
            }
            self._view = table, build_view(table, links, now)
        return self._view[1]

    async def wait_until(self, holds: Callable[[View], bool]) -> View:
        """The first view for which ``holds`` is true; it is asked again at every change."""
        while not holds(view := self.view):
            await self._changed.wait()
        return view

    async def views(self) -> AsyncIterator[View]:
        """The present view, then the newest one after every change; never ends."""
        while True:
            changed = self._changed
            yield self.view
            await changed.wait()

    def announce(self, **changes: Unpack[Changes]) -> None:
        """Change what this node says of itself; it is published at once, or nearly."""
        said = replace(self._said, **changes)
        if said != self._said:
            self._said = said
            self._publishing.advert_changed(trio.current_time())
            self._woken.set()

    def report(self, load: Iterable[HoldingLoad]) -> None:
        """The present load of all holdings; call at every change, it is published as is due."""
        before = self._publishing.load
        self._publishing.load_changed({item.id: item for item in load})
        if self._publishing.load == before:
            return
        self._knowledge.apply(MyLoad(self._publishing.load))
        self._woken.set()

    def renew(self, identity: Identity) -> None:
        """Go on with a renewed certificate for the same key."""
        self._identity = self._talks.identity = identity
        self._publishing.advert_changed(trio.current_time())
        self._woken.set()

    async def leave(self) -> None:
        """Say goodbye: no peer sends new work afterwards. Takes a second at most."""
        self._said = replace(self._said, state="left")
        with trio.move_on_after(LEAVE_TIME):
            signed = await self._publish_advert()
            record = Record(0.0, signed.envelope)

            async def tell(link: Link) -> None:
                try:
                    await self._talks.push(link, [record])
                except TransportError as error:
                    logger.debug("goodbye to %s: %s", link.peer, error)

            # Gossip may still be on its way when the links close; this is acknowledged.
            async with trio.open_nursery() as nursery:
                for link in list(self._transport.links.values()):
                    nursery.start_soon(tell, link)

    # -- running ------------------------------------------------------------------------------

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Take part in gossip until cancelled. Started once the topics are subscribed."""
        self._sign_advert()
        self._sync_at = trio.current_time() + SYNC_EVERY * self._rng.random()
        async with AsyncExitStack() as stack:
            accept = {
                "advert": self._accept_advert,
                "load": self._accept_load,
                "doubt": self._accept_doubt,
                "revocation": self._accept_list,
            }
            messages = [
                await stack.enter_async_context(
                    self._transport.subscribe(self._topics[name], validator)
                )
                for name, validator in accept.items()
            ]
            links = await stack.enter_async_context(self._transport.events())
            stack.callback(self._trust.on_revocation(self._on_list))
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                stack.callback(setattr, self, "_nursery", None)
                self._talks.serve()
                for link in list(self._transport.links.values()):
                    self._link_is_up(link)
                for topic in messages:
                    nursery.start_soon(_drain, topic)
                nursery.start_soon(self._follow_links, links)
                task_status.started()
                await self._keep_time()

    async def _keep_time(self) -> None:
        while True:
            # Before looking: whatever changes during an await below must not be missed.
            self._woken = trio.Event()
            now = trio.current_time()
            if self._knowledge.table.deadline <= now:
                self._knowledge.apply(Tick())
            match self._publishing.due(now):
                case "advert":
                    await self._publish_advert()
                case "load":
                    await self._publish_load()
            for peer in self._dialing.due(self._knowledge.table, now):
                self._start(self._dial, peer)
            silent = self._checking.due(self._knowledge.table, now, self._is_quiet)
            if silent is not None:
                self._start(self._check, silent)
            if self._sync_at <= now:
                self._sync_at = now + SYNC_EVERY * self._rng.uniform(0.9, 1.1)
                for link in self._talks.some_links(1):
                    self._start(self._talks.sync, link)
            deadline = min(
                self._knowledge.table.deadline,
                self._publishing.deadline,
                self._dialing.deadline,
                self._checking.deadline(self._knowledge.table),
                self._sync_at,
            )
            with trio.move_on_at(deadline):
                await self._woken.wait()

    def _table_changed(self) -> None:
        self._publishing.mesh_size(len(self._knowledge.table.entries))
        self._dialing.update(self._knowledge.table, trio.current_time())
        self._woken.set()
        self._changed.set()
        self._changed = trio.Event()

    def _start(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(task, *args)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case events.Became(peer, was, now, reason):
                logger.info("%s: %s -> %s (%s)", peer, was or "unknown", now, reason)
            case events.Probe(peer):
                self._start(self._talks.probe, peer)
            case events.Doubt(peer):
                if self._checking.raise_doubt(peer, trio.current_time()):
                    self._start(self._publish, "doubt", peer.encode())
            case events.Fetch(peer):
                link = self._talks.fetch(peer)
                if link is not None:
                    self._start(self._talks.sync, link)
            case events.Reboot(boot):
                logger.warning("others know a later start of this node: the clock was set back")
                self._sequence = 0
                self._on_boot(boot)
                self._publishing.advert_changed(trio.current_time())
            case events.Clash():
                logger.error("another node runs with this node's key; one of them must stop")

    # -- links --------------------------------------------------------------------------------

    async def _follow_links(self, links: AsyncIterator[LinkUp | LinkDown | LinkMoved]) -> None:
        async for event in links:
            match event:
                case LinkUp(link):
                    self._link_is_up(link)
                case LinkDown(peer, reason):
                    # A peer that came back at once may have its new link already.
                    if self._transport.link(peer) is None:
                        self._knowledge.apply(events.LinkDown(peer, reason))
                case LinkMoved():
                    self._view = None  # its path and round trip time are others now

    def _link_is_up(self, link: Link) -> None:
        self._knowledge.apply(events.LinkUp(link.peer))
        if self._identity.peer_id < link.peer:
            self._start(self._talks.sync, link)

    def _is_quiet(self, peer: PeerId) -> bool:
        link = self._transport.link(peer)
        return link is not None and link.silent_for > CHECK_EVERY

    async def _check(self, peer: PeerId) -> None:
        try:
            await self._talks.check(peer)
        finally:
            self._checking.finished(peer)

    async def _dial(self, peer: PeerId) -> None:
        try:
            await self._talks.dial(peer)
        finally:
            self._dialing.finished()
            self._woken.set()

    # -- speaking -----------------------------------------------------------------------------

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _sign_advert(self) -> SignedAdvert:
        said = self._said
        signed = sign_advert(
            self._identity,
            Advert(
                boot=self.boot,
                sequence=self._next_sequence(),
                beat=self._publishing.beat,
                state=said.state,
                software=said.software,
                addresses=tuple(self._transport.addresses[:MAX_ADDRESSES]),
                devices=said.devices,
                holdings=said.holdings,
                load=self._publishing.load,
                stored=said.stored,
                wants=in_time(said.wants, time.time()),
                speeds=said.speeds,
                links=said.links,
            ),
        )
        self._knowledge.apply(Mine(signed))
        return signed

    def _refresh(self) -> None:
        """A peer is about to get the advert of this node: with the load of now. A newcomer would
        take it for idle until the next load report."""
        mine = self._knowledge.table.entries.get(self._identity.peer_id)
        if mine is not None and mine.signed.advert.load != self._publishing.load:
            self._sign_advert()
            self._publishing.told_one()
            self._woken.set()

    async def _publish_advert(self) -> SignedAdvert:
        signed = self._sign_advert()
        self._publishing.sent_advert(trio.current_time(), self._rng.random())
        await self._publish("advert", signed.envelope)
        return signed

    async def _publish_load(self) -> None:
        report = LoadReport(
            boot=self.boot,
            sequence=self._next_sequence(),
            beat=self._publishing.beat,
            load=self._publishing.load,
        )
        self._publishing.sent_load(trio.current_time())
        await self._publish("load", sign_load(self._identity, report))

    async def _publish(self, topic: str, data: bytes) -> None:
        with trio.move_on_after(PUBLISH_TIMEOUT) as limit:
            await self._transport.publish(self._topics[topic], data)
        if limit.cancelled_caught:
            logger.warning("publishing to %s took more than %g s", topic, PUBLISH_TIMEOUT)

    # -- hearing: what a validator accepts it takes in, so that it is verified once -----------

    def _accept_advert(self, author: PeerId, data: bytes) -> bool:
        return author == self._identity.peer_id or self._knowledge.take_advert(data, author=author)

    def _accept_load(self, author: PeerId, data: bytes) -> bool:
        return author == self._identity.peer_id or self._knowledge.take_load(author, data)

    def _accept_doubt(self, author: PeerId, data: bytes) -> bool:
        if author == self._identity.peer_id:
            return True
        peer, now = PeerId(data[:MAX_PEER_ID].decode("ascii", "replace")), trio.current_time()
        table = self._knowledge.table
        if not self._checking.hear_doubt(table, author, peer, now):
            return False
        if peer == self._identity.peer_id:
            self._publishing.advert_changed(now)
            self._woken.set()
        elif peer not in table.links:
            self._knowledge.apply(events.Doubted(peer))
        elif self._is_quiet(peer) and self._checking.start(table, peer):
            self._knowledge.apply(events.Doubted(peer))
            self._start(self._check, peer)
        return True

    def _accept_list(self, author: PeerId, data: bytes) -> bool:
        if author == self._identity.peer_id:
            return True
        self._list_from_topic = True
        try:
            return self._trust.apply_crl(data)
        except CertificateError as error:
            logger.warning("revocation list from %s refused: %s", author, error)
            return False
        finally:
            self._list_from_topic = False

    def _on_list(self, newer: RevocationList) -> None:
        """A revocation list is in force, wherever it came from."""
        logger.warning("revocation list %d: %d revoked", newer.number, len(newer.revoked))
        if self._identity.certificate.serial in newer.revoked:
            logger.error("this node's own certificate is revoked: no peer will talk to it")
        self._knowledge.recheck("its certificate is revoked")
        if len(newer.der) > MAX_TOPIC_LIST:
            for link in self._talks.some_links(SPREAD):
                self._start(self._talks.sync, link)
        elif not self._list_from_topic:
            self._start(self._publish, "revocation", newer.der)


async def _drain(messages: AsyncIterator[object]) -> None:
    async for _ in messages:
        pass
