"""Tens of nodes in virtual time, messages lost and delayed: every view becomes the same.

The pure parts run as they are (membership, anti-entropy, when to publish); what is simulated is the
network: one queue of deliveries in order of time. Requests are on reliable links and arrive late at
worst; gossip gets lost.
"""

from __future__ import annotations

import heapq
import itertools
import random
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Certificate, Role
from mesh.gossip import anti_entropy, exchange
from mesh.gossip.advert import Advert, SignedAdvert
from mesh.gossip.events import AdvertHeard, LinkDown, Mine, Probe, ProofOfLife, Tick
from mesh.gossip.membership import Table, apply
from mesh.gossip.publishing import Publishing

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
SYNC_EVERY = 10.0


class Node:
    def __init__(self, world, peer, boot):
        self.world, self.peer, self.boot = world, peer, boot
        self.rng = random.Random(f"{peer} {boot}")
        self.table = Table(peer, boot)
        self.publishing = Publishing()
        self.sequence = 0
        self.certificate = Certificate(
            peer, "acme", peer, frozenset({Role.SERVE}), 1, EPOCH, EPOCH, KEY, b"", ()
        )
        self.signed = self.advertise()
        world.at(world.now + self.rng.random(), self.publish)
        world.at(world.now + self.rng.random() * SYNC_EVERY, self.sync)

    @property
    def up(self):
        return self.world.nodes.get(self.peer) is self

    def advertise(self, state="up"):
        self.sequence += 1
        advert = Advert(
            boot=self.boot, sequence=self.sequence, beat=self.publishing.beat, state=state
        )
        # The simulation finds the advert of an envelope again in a table of its own.
        envelope = f"{self.peer} {self.boot} {self.sequence}".encode()
        self.signed = SignedAdvert(advert, self.certificate, envelope)
        self.world.adverts[envelope] = self.signed
        self.table, _ = apply(self.table, Mine(self.signed), self.world.now)
        return self.signed

    def publish(self):
        signed = self.advertise()
        self.publishing.sent_advert(self.world.now, self.rng.random())
        self.world.gossip(self, signed)
        self.world.at(self.publishing.deadline, lambda: self.up and self.publish())

    def hear(self, signed, age=0.0):
        self.apply(AdvertHeard(signed, age))

    def apply(self, event):
        self.table, effects = apply(self.table, event, self.world.now)
        for effect in effects:
            if isinstance(effect, Probe):
                self.probe(effect.peer)
        if self.table.deadline < float("inf"):
            self.world.at(max(self.table.deadline, self.world.now), self.tick)

    def tick(self):
        if self.up and self.table.deadline <= self.world.now:
            self.apply(Tick())

    def probe(self, peer):
        target = self.world.nodes.get(peer)
        if target is not None and self.world.connected(self, target):
            self.world.later(lambda: self.apply(ProofOfLife(peer, target.boot)))

    def sync(self):
        if not self.up:
            return
        self.world.at(self.world.now + SYNC_EVERY, self.sync)
        others = [n for n in self.world.nodes.values() if self.world.connected(self, n)]
        others.remove(self)
        if others:
            self.sync_with(self.rng.choice(sorted(others, key=lambda n: n.peer)))

    def sync_with(self, other):
        world = self.world
        theirs = anti_entropy.parse_digest(anti_entropy.digest(self.table))
        world.transferred += len(theirs) * 20

        def answer():
            diff = anti_entropy.compare(other.table, theirs, world.now)
            world.later(lambda: self.take(diff.send))
            world.later(lambda: other.take(anti_entropy.wanted(self.table, diff.want, world.now)))

        world.later(answer)

    def take(self, records):
        sent = exchange.decode_transfer(exchange.encode_transfer(records, ()))
        for record in sent.records:
            self.world.transferred += 1000
            self.hear(self.world.adverts[record.envelope], record.age)


class World:
    def __init__(self, seed, loss):
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.nodes, self.adverts = {}, {}
        self.groups = None  # while partitioned: group by peer
        self.queue, self.order = [], itertools.count()
        self.transferred = 0

    def at(self, when, what):
        heapq.heappush(self.queue, (when, next(self.order), what))

    def later(self, what, lossy=False):
        if not (lossy and self.rng.random() < self.loss):
            self.at(self.now + self.rng.uniform(0.005, 0.2), what)

    def connected(self, a, b):
        return self.groups is None or self.groups.get(a.peer) == self.groups.get(b.peer)

    def gossip(self, author, signed):
        for node in list(self.nodes.values()):
            if node is not author and self.connected(author, node):
                self.later(lambda node=node: node.up and node.hear(signed), lossy=True)

    def run(self, seconds):
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.now = until

    def start(self, peer, boot=1):
        self.nodes[peer] = Node(self, peer, boot)
        return self.nodes[peer]

    def kill(self, peer):
        """The process ends; the others' transports notice within three seconds."""
        del self.nodes[peer]
        for node in list(self.nodes.values()):
            self.at(
                self.now + self.rng.uniform(0.5, 3.0),
                lambda node=node: node.up and peer not in self.nodes and node.apply(LinkDown(peer)),
            )

    def split(self, groups):
        self.groups = groups
        for a, b in itertools.permutations(self.nodes.values(), 2):
            if not self.connected(a, b):
                self.at(self.now + 3.0, lambda a=a, b=b: a.apply(LinkDown(b.peer)))

    def seen_by(self, node):
        # With losses there is always some peer that is being asked for a proof of life.
        return {p for p, e in node.table.entries.items() if e.status != "gone"}

    def assert_agreement(self):
        for node in self.nodes.values():
            assert self.seen_by(node) == set(self.nodes), node.peer
            boots = {p: node.table.entries[p].boot for p in self.nodes}
            assert boots == {p: n.boot for p, n in self.nodes.items()}


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.6])
def test_a_mesh_with_losses_agrees_on_who_is_there(loss):
    world = World(seed=1, loss=loss)
    for i in range(30):
        world.start(f"N{i:02}")
    world.run(60.0)
    world.assert_agreement()


def test_a_newcomer_has_the_whole_view_after_one_round_trip():
    world = World(seed=2, loss=0.0)
    for i in range(40):
        world.start(f"N{i:02}")
    world.run(60.0)
    newcomer = world.start("NEW")
    newcomer.sync_with(world.nodes["N00"])
    world.run(0.4)  # a round trip of the simulated network takes at most that
    assert world.seen_by(newcomer) == set(world.nodes)


def test_killed_nodes_are_gone_everywhere_and_no_ghost_returns():
    world = World(seed=3, loss=0.2)
    for i in range(30):
        world.start(f"N{i:02}")
    world.run(40.0)
    for i in range(5):
        world.kill(f"N{i:02}")
    world.run(7.0)  # 3 s until the transport notices, 3 s for the probes, and the messages
    world.assert_agreement()
    for _ in range(40):
        world.run(3.0)
        gone = {f"N{i:02}" for i in range(5)}
        for node in world.nodes.values():
            assert not gone & world.seen_by(node)


def test_leaving_and_rejoining_within_two_seconds_leaves_one_entry_that_is_used():
    world = World(seed=4, loss=0.2)
    for i in range(20):
        world.start(f"N{i:02}")
    world.run(40.0)
    leaver = world.nodes["N07"]
    world.gossip(leaver, leaver.advertise("left"))
    world.kill("N07")
    world.run(1.5)
    again = world.start("N07", boot=2)
    again.sync_with(world.nodes["N00"])
    world.run(5.0)
    seen = [n for n in world.nodes.values() if n.table.entries["N07"].boot == 2]
    assert len(seen) >= 15  # the others get it from anti-entropy
    world.run(25.0)
    world.assert_agreement()


def test_a_partition_heals():
    world = World(seed=5, loss=0.2)
    for i in range(24):
        world.start(f"N{i:02}")
    world.run(40.0)
    world.split({f"N{i:02}": i % 2 for i in range(24)})
    world.run(60.0)
    for node in world.nodes.values():
        assert len(world.seen_by(node)) == 12
    world.groups = None
    world.run(60.0)
    world.assert_agreement()


def test_what_anti_entropy_costs_grows_with_the_mesh_and_not_with_its_square():
    per_node = {}
    for count in (10, 40):
        world = World(seed=6, loss=0.1)
        for i in range(count):
            world.start(f"N{i:02}")
        world.run(60.0)
        world.transferred = 0
        world.run(100.0)
        per_node[count] = world.transferred / count / 100
    print(f"anti-entropy, bytes per node per second: {per_node}")
    assert per_node[40] < per_node[10] * 6
