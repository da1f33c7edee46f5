"""The gossip of one node: its pure parts, driven as its service drives them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable
from typing import Any

from mesh.gossip import anti_entropy
from mesh.gossip.advert import Advert, Device, MeasuredSpeed, SeenLink
from mesh.gossip.checking import ANSWER_TIME, Checking
from mesh.gossip.dialing import Dialing
from mesh.gossip.events import (
    AdvertHeard,
    Became,
    Doubt,
    Doubted,
    LinkUp,
    Mine,
    NoAnswer,
    Probe,
    ProofOfLife,
    Tick,
    Unreachable,
)
from mesh.gossip.membership import Table, apply
from mesh.gossip.publishing import Publishing
from mesh.gossip.service import SYNC_EVERY
from mesh.gossip.talks import SYNCS_AT_ONCE
from mesh.gossip.view import View, build_view
from mesh.identity import PeerId
from simulator.messages import Opened
from simulator.placer import DIGEST, LAYER_BYTES, MB, WANTED_BY, Placer, wanted
from simulator.world import DIAL, World

REQUEST = 200  # bytes of a request of anti-entropy around its digest
RECORD = 20  # bytes around an advert in a transfer
LOOK_GAP = 0.5  # s between looks at whom to dial
SITES = 12  # places that nodes are at; near within one, far between them


class Node:
    """Node ``number`` in its start ``boot``. It joins at one that runs, if any does."""

    def __init__(self, world: World, number: int, boot: int = 1) -> None:
        self.world, self.number, self.boot = world, number, boot
        self.name = f"N{number:04}"
        self.peer: PeerId = world.mint.identity(self.name).peer_id
        self.rng = random.Random(f"{self.name} {boot}")
        ours = random.Random(self.name)  # what stays the same when it starts again
        self.memory = (16 + 15 + 11 * ours.choice([2, 4, 5, 6, 8])) * MB
        self.decode = ours.choice([0.001, 0.002, 0.004])
        self.site = ours.randrange(SITES)
        self.table = Table(self.peer, boot)
        self.publishing = Publishing()
        self.dialing = Dialing(self.peer)
        self.checking = Checking(self.rng)
        self.wants = (wanted(self.peer),) if number == WANTED_BY else ()
        self.placer = Placer(self)
        self.speeds: tuple[MeasuredSpeed, ...] = ()  # of what it has loaded
        self.seen: tuple[SeenLink, ...] = ()
        # Of each node that is there for this one, what matters of it for placement.
        self.known: dict[PeerId, int] = {}
        self.known_key = 0  # of the set of those nodes
        self.view_key = 0  # and of what matters of them
        self._sequence = itertools.count(1)
        self._publish_at = self._tick_at = self._dial_at = -1.0
        self._looks_at_links = False
        self._syncs = 0
        self._to_sync: deque[Node] = deque()
        others = sorted(world.nodes)
        world.add(self)
        self.advertise()
        world.after(self.rng.random(), self.publish)
        world.after(self.rng.random() * SYNC_EVERY, self.sync)
        if others:
            world.after(DIAL, lambda: self._dialled(self.rng.choice(others)))

    @property
    def runs(self) -> bool:
        return self.world.nodes.get(self.peer) is self

    @property
    def links(self) -> frozenset[PeerId]:
        return self.table.links

    @property
    def view(self) -> View:
        return build_view(self.table, {}, self.world.now)

    # -- speaking ---------------------------------------------------------------------------------

    def advertise(self) -> Opened:
        self.publishing.mesh_size(len(self.table.entries))
        advert = Advert(
            boot=self.boot,
            sequence=next(self._sequence),
            beat=self.publishing.beat,
            software="0.1.0",
            addresses=("/ip4/192.0.2.77/udp/4001/quic-v1/p2p/" + self.peer,),
            devices=(
                Device(
                    name="CPU",
                    full_name="Some CPU",
                    offered=self.memory,
                    decode_rate=round(LAYER_BYTES / self.decode),
                    prefill_rate=round(LAYER_BYTES / self.decode * 10),
                ),
            ),
            holdings=self.placer.holdings,
            wants=self.wants,
            speeds=self.speeds,
            links=self.seen,
        )
        opened = self.world.mint.open(self.world.mint.sign(self.name, advert))
        self.take(Mine(opened.signed))
        self._look_at(self.peer)
        return opened

    def loaded(self) -> None:
        """Something is loaded, and so measured."""
        self.speeds = (
            MeasuredSpeed(
                digest=DIGEST, device="CPU", prefill=self.decode / 10, decode=self.decode
            ),
        )
        self.changed()

    def changed(self) -> None:
        """What this node says of itself has changed."""
        self.publishing.advert_changed(self.world.now)
        self._schedule_publishing()

    def publish(self) -> None:
        if not self.runs:
            return
        if self.publishing.due(self.world.now) == "advert":
            opened = self.advertise()
            self.publishing.sent_advert(self.world.now, self.rng.random())
            self.world.spread(self, opened)
        self._schedule_publishing()

    def _schedule_publishing(self) -> None:
        when = self.publishing.deadline
        if self._publish_at != when:
            self._publish_at = when
            self.world.at(when, self.publish)

    # -- hearing ----------------------------------------------------------------------------------

    def hear(self, event: AdvertHeard, opened: Opened) -> None:
        self.take(event)
        peer = opened.signed.peer
        # Mostly a beat: nothing has changed, nobody was away.
        if self.known.get(peer) != opened.matters:
            self._look_at(peer)

    def hear_doubt(self, author: PeerId, peer: PeerId) -> None:
        if not self.checking.hear_doubt(self.table, author, peer, self.world.now):
            return
        if peer == self.peer:
            self.changed()
        elif peer not in self.links:
            self.take(Doubted(peer))
        elif self.checking.start(self.table, peer):
            self.take(Doubted(peer))
            self._check(peer)

    def take(self, event: Any) -> None:
        before = self.table
        self.table, effects = apply(before, event, self.world.now)
        for effect in effects:
            if isinstance(effect, Probe):
                self._probe(effect.peer)
            elif isinstance(effect, Became):
                self._look_at(effect.peer)
            elif isinstance(effect, Doubt) and self._tells_of(effect.peer):
                self.world.spread_doubt(self, effect.peer)
        deadline = self.table.deadline
        if deadline != before.deadline and not self.world.now < self._tick_at <= deadline:
            self._tick_at = deadline
            self.world.at(deadline, self._tick)

    def _tells_of(self, peer: PeerId) -> bool:
        return self.checking.raise_doubt(peer, self.world.now)

    def _tick(self) -> None:
        if self.runs and self.table.deadline <= self.world.now:
            self._tick_at = -1.0
            self.take(Tick())

    def _probe(self, peer: PeerId) -> None:
        def answer() -> None:
            target = self.world.nodes.get(peer)
            if target is not None and self.runs and self.world.connected(self.peer, peer):
                self.take(ProofOfLife(peer, target.boot))

        self.world.after(DIAL, answer)

    def _check(self, peer: PeerId) -> None:
        def ended() -> None:
            self.checking.finished(peer)
            if self.runs:
                target = self.world.nodes.get(peer)
                there = target is not None and self.world.connected(self.peer, peer)
                self.take(ProofOfLife(peer, target.boot) if there else NoAnswer(peer))

        self.world.after(ANSWER_TIME, ended)

    def _look_at(self, peer: PeerId) -> None:
        """Note what is known of ``peer`` now, and whether that matters."""
        entry = self.table.entries.get(peer)
        there = entry is not None and entry.status != "gone"
        matters = self.world.mint.open(entry.signed.envelope).matters if there else 0
        before = self.known.get(peer, 0)
        if matters == before:
            return
        self.view_key ^= hash((peer, before)) if before else 0
        self.view_key ^= hash((peer, matters)) if matters else 0
        if matters:
            self.known[peer] = matters
        else:
            del self.known[peer]
        if not (before and matters):
            self.known_key ^= hash(peer)
            self._schedule_dialing()
        self.placer.news()

    # -- links ------------------------------------------------------------------------------------

    def linked(self, other: Node) -> None:
        self.take(LinkUp(other.peer))
        self.take(ProofOfLife(other.peer, other.boot))
        self._schedule_links()

    def _schedule_dialing(self) -> None:
        if self._dial_at < self.world.now:
            self._dial_at = self.world.now + LOOK_GAP
            self.world.at(self._dial_at, self._look_whom_to_dial)

    def _look_whom_to_dial(self) -> None:
        if self.runs:
            self.dialing.update(self.table, self.world.now)
            self._dial()

    def _dial(self) -> None:
        if not self.runs:
            return
        for peer in self.dialing.due(self.table, self.world.now):
            self.world.after(DIAL, lambda peer=peer: self._dial_ended(peer))
        if self.dialing.deadline < float("inf"):
            self.world.at(self.dialing.deadline, self._dial)

    def _dial_ended(self, peer: PeerId) -> None:
        self.dialing.finished()
        self._dialled(peer)
        self._dial()

    def _dialled(self, peer: PeerId) -> None:
        target = self.world.nodes.get(peer)
        if not self.runs or peer in self.links:
            return
        if target is not None and self.world.connected(self.peer, peer):
            self.world.link(self, target)
        else:
            self.take(Unreachable(peer))

    def _schedule_links(self) -> None:
        """Links are measured some seconds after they came up, and told of."""
        if not self._looks_at_links:
            self._looks_at_links = True
            self.world.after(self.rng.uniform(4.0, 6.0), self._tell_of_links)

    def _tell_of_links(self) -> None:
        self._looks_at_links = False
        if not self.runs:
            return
        rows = [
            SeenLink(key=anti_entropy.key_of(peer), rtt=self._rtt(self.world.nodes[peer]))
            for peer in self.links
            if peer in self.world.nodes
        ]
        rows.sort(key=lambda row: (row.rtt or 0, row.key))
        if self.seen != tuple(rows[:16]):
            self.seen = tuple(rows[:16])
            self.changed()

    def _rtt(self, other: Node) -> int:
        """In tenths of a millisecond."""
        return 10 if self.site == other.site else 100 + 10 * abs(self.site - other.site)

    # -- anti-entropy -----------------------------------------------------------------------------

    def sync(self) -> None:
        if not self.runs:
            return
        self.world.after(SYNC_EVERY * self.rng.uniform(0.9, 1.1), self.sync)
        peers = [
            peer
            for peer in sorted(self.links)
            if peer not in self.table.entries or self.table.entries[peer].status == "alive"
        ]
        other = self.world.nodes.get(self.rng.choice(peers)) if peers else None
        if other is not None and self.world.connected(self.peer, other.peer):
            self.sync_with(other)

    def sync_with(self, other: Node) -> None:
        if other not in self._to_sync:
            self._to_sync.append(other)
            self._next_sync()

    def _next_sync(self) -> None:
        if self._syncs < SYNCS_AT_ONCE and self._to_sync:
            self._syncs += 1
            self._sync_now(self._to_sync.popleft())

    def _sync_ended(self) -> None:
        self._syncs -= 1
        self._next_sync()

    def _sync_now(self, other: Node) -> None:
        world = self.world
        digest = anti_entropy.digest(self.table)
        world.sent["anti-entropy"] += len(digest) + REQUEST

        def answer() -> None:
            if not (self.runs and other.runs):
                return
            theirs = anti_entropy.parse_digest(digest)
            diff = anti_entropy.compare(other.table, theirs, world.now)
            back = anti_entropy.wanted(self.table, diff.want, world.now)
            for record in (*diff.send, *back):
                world.sent["anti-entropy"] += len(record.envelope) + RECORD
            world.after(0.05, lambda: self.runs and self._take_records(diff.send))
            world.after(0.1, lambda: other.runs and other._take_records(back))

        world.after(0.05, answer)
        world.after(0.15, self._sync_ended)

    def _take_records(self, records: Iterable[anti_entropy.Record]) -> None:
        for record in records:
            opened = self.world.mint.open(record.envelope)
            self.hear(AdvertHeard(opened.signed, record.age), opened)
