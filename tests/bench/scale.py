"""A mesh of any size in virtual time: what it costs to know each other and to arrange itself.

The pure parts run as they are: membership, anti-entropy, when to publish, claims and placement,
choice of a route. What is simulated is the network (delay, loss, partitions), processes that come
and go, and loading. Gossip is modelled as GossipSub delivers it: a node gets a message once and
passes it on to the rest of its mesh of eight; a message that is lost on all its ways to a node
comes with anti-entropy or not at all. The loss of a peer is noticed by all within three seconds,
as by links, or by the doubt that those with links spread.

    python3 dev.py bench scale [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Certificate, Role
from inference.errors import GenerationError
from mesh.gossip import anti_entropy
from mesh.gossip.advert import (
    Advert,
    Device,
    Holding,
    MeasuredSpeed,
    SeenLink,
    SignedAdvert,
    Wanted,
)
from mesh.gossip.membership import (
    AdvertHeard,
    Entry,
    LinkDown,
    Mine,
    Probe,
    ProofOfLife,
    Table,
    Tick,
    apply,
)
from mesh.gossip.publishing import Publishing
from mesh.gossip.view import View, build_view
from mesh.gossip.wire import WIRE, encode
from mesh.routing import InFlight, RequestFacts, choose
from mesh.routing.placement.claims import arrange, complete_chains, next_sequence
from mesh.routing.placement.from_view import claims_in, facts_in, newest_wants
from mesh.routing.placement.plan import Plan
from mesh.routing.placement.steps import Drain, Held, Keep, Load, next_steps

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MB = 1 << 20
MODEL, DIGEST, LAYERS = "demo", "ab" * 32, 12
CHAIN_BYTES = 750  # certificate chain and signature of an envelope
DEGREE = 8  # of the gossip mesh
GOSSIP_OVERHEAD = 150  # bytes of a gossip message around its data, ids and announcements included
SYNC_EVERY = 10.0
SETTLE = 1.0  # s without news before a node plans anew
LONGEST = 3.0  # s of news after which it plans anyway
LOADING = 2.0  # s
WANTED = Wanted(
    name=MODEL,
    digest=DIGEST,
    version=1,
    publisher="N0000",
    layers=LAYERS,
    layer_bytes=10 * MB,
    embedding_bytes=15 * MB,
    head_bytes=15 * MB,
    shared_bytes=15 * MB,
    kv_bytes=512,
    hidden=1024,
    context_length=4096,
    replicas=3,
    context=1024,
    sessions=1,
)


class World:
    """Virtual time, a queue of what happens, and the nodes that run."""

    def __init__(self, seed: int, loss: float) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.groups: dict[str, int] | None = None  # while partitioned
        self.adverts: dict[bytes, SignedAdvert] = {}
        self.plans: dict[object, Plan] = {}
        self.sent: dict[str, int] = {"gossip": 0, "anti-entropy": 0}
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.at(self.now + seconds, what)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def run_until(self, holds: Callable[[], bool], limit: float, step: float = 0.5) -> float:
        """Seconds until it holds; raises when it does not within ``limit``."""
        start = self.now
        while not holds():
            if self.now - start > limit:
                raise AssertionError(f"not after {limit:g} s")
            self.run(step)
        return self.now - start

    def connected(self, a: str, b: str) -> bool:
        return self.groups is None or self.groups.get(a) == self.groups.get(b)

    def spread(self, author: Node, signed: SignedAdvert) -> None:
        """Everyone gets it within some hops, but for those whom loss keeps it from."""
        size = len(signed.envelope) + CHAIN_BYTES + GOSSIP_OVERHEAD
        others = [n for n in self.nodes.values() if n is not author]
        reached = [n for n in others if self.connected(author.peer, n.peer)]
        copies = max(1, min(DEGREE, len(reached)) - 1)
        self.sent["gossip"] += size * copies * (len(reached) + 1)
        # A message has several ways to a node; on each of its two last hops it may be lost.
        missed = (1.0 - (1.0 - self.loss) ** 2) ** min(DEGREE, max(1, len(others)))
        reached = [n for n in reached if self.rng.random() >= missed]
        self.rng.shuffle(reached)
        parts = 3
        for part in range(parts):
            group = reached[part::parts]
            self.after(0.03 + 0.06 * part, lambda group=group: _hear(group, signed))

    def start(self, number: int, boot: int = 1) -> Node:
        node = Node(self, f"N{number:04}", boot)
        known = list(self.nodes.values())
        self.nodes[node.peer] = node
        if known:
            node.sync_with(self.rng.choice(known))
        return node

    def kill(self, peer: str) -> None:
        """The process ends. Peers with a link notice within three seconds and tell the others."""
        del self.nodes[peer]
        for node in list(self.nodes.values()):
            if self.connected(node.peer, peer):
                self.after(
                    self.rng.uniform(0.5, 3.0),
                    lambda node=node: (
                        node.runs and peer not in self.nodes and node.take(LinkDown(peer))
                    ),
                )

    def split(self, groups: dict[str, int]) -> None:
        self.groups = groups
        for a, b in itertools.permutations(list(self.nodes.values()), 2):
            if not self.connected(a.peer, b.peer):
                self.after(3.0, lambda a=a, b=b: a.runs and a.take(LinkDown(b.peer)))

    # -- what holds of the whole ------------------------------------------------------------------

    def agrees(self) -> bool:
        """Every node knows exactly the nodes that run."""
        names = set(self.nodes)
        return all(node.known == names for node in self.nodes.values())

    def is_arranged(self) -> bool:
        """All nodes have the same layout, it is what they hold, and it is loaded."""
        if not self.agrees():
            return False
        plan: object = None
        for node in self.nodes.values():
            # Those who have just heard something have not planned with it yet.
            if node.due is not None or any(not h.ready or h.draining for h, _ in node.held):
                return False
            mine = frozenset((s.peer, s.first, s.last) for m in node.plan.models for s in m.stages)
            if plan is None:
                plan = mine
            if plan != mine:
                return False
        held = frozenset(
            (node.peer, h.first, h.last) for node in self.nodes.values() for h, _ in node.held
        )
        return held == plan

    def chains(self) -> int:
        """Complete chains that are loaded now, of nodes that can reach each other."""
        node = next(iter(self.nodes.values()))
        claims = [c for c in claims_in(node.view) if c.ready and c.peer in self.nodes]
        return len(complete_chains(claims, LAYERS))


def _hear(nodes: Iterable[Node], signed: SignedAdvert) -> None:
    for node in nodes:
        if node.runs:
            node.hear(signed)


class Node:
    """The pure parts of one node, driven as its service drives them."""

    def __init__(self, world: World, peer: str, boot: int) -> None:
        self.world, self.peer, self.boot = world, peer, boot
        self.rng = random.Random(f"{peer} {boot}")
        self.table = Table(peer, boot)
        self.publishing = Publishing()
        self.sequence = 0
        self.certificate = Certificate(
            peer, "sim", peer, frozenset({Role.SERVE}), 1, EPOCH, EPOCH, KEY, b"", ()
        )
        layers = self.rng.choice([2, 4, 5, 6, 8])
        self.memory = (16 + 15 + 11 * layers) * MB
        self.decode = self.rng.choice([0.001, 0.002, 0.004])
        self.links = tuple(
            SeenLink(key=anti_entropy.key_of(f"N{self.rng.randrange(40):04}"), rtt=20)
            for _ in range(8)
        )
        self.wants: tuple[Wanted, ...] = (WANTED,) if peer == "N0000" else ()
        self.held: list[tuple[Held, int]] = []
        self.plan = Plan(())
        self.relevant: dict[str, int] = {}  # what matters of each advert for placement
        self.due: float | None = None  # when to plan, as long as nothing is heard
        self.due_latest = 0.0
        self.next_id = itertools.count()
        self.scheduled = -1.0
        self.tick_at = -1.0
        self.signed = self.advertise()
        world.after(self.rng.random(), self.publish)
        world.after(self.rng.random() * SYNC_EVERY, self.sync)

    @property
    def runs(self) -> bool:
        return self.world.nodes.get(self.peer) is self

    @property
    def known(self) -> set[str]:
        return {p for p, e in self.table.entries.items() if e.status != "gone"}

    @property
    def view(self) -> View:
        return build_view(self.table, {}, self.world.now)

    # -- gossip -----------------------------------------------------------------------------------

    def advertise(self) -> SignedAdvert:
        self.sequence += 1
        self.publishing.mesh_size(len(self.table.entries))
        advert = Advert(
            boot=self.boot,
            sequence=self.sequence,
            beat=self.publishing.beat,
            software="0.1.0",
            addresses=("/ip4/192.0.2.77/udp/4001/quic-v1/p2p/" + "1" * 52,),
            devices=(Device(name="CPU", full_name="Some CPU", offered=self.memory),),
            holdings=tuple(_holding(held, sequence) for held, sequence in self.held),
            wants=self.wants,
            speeds=(
                MeasuredSpeed(
                    digest=DIGEST, device="CPU", prefill=self.decode / 10, decode=self.decode
                ),
            ),
            links=self.links,
        )
        body = encode(advert.model_dump(context=WIRE))
        envelope = f"{self.peer}/{self.boot}/{self.sequence}".encode().ljust(len(body), b".")
        self.signed = SignedAdvert(advert, self.certificate, envelope)
        self.world.adverts[envelope] = self.signed
        self.table, _ = apply(self.table, Mine(self.signed), self.world.now)
        self.look_at(self.peer)
        return self.signed

    def publish(self) -> None:
        if not self.runs:
            return
        if self.publishing.due(self.world.now) == "advert":
            signed = self.advertise()
            self.publishing.sent_advert(self.world.now, self.rng.random())
            self.world.spread(self, signed)
        self.schedule()

    def schedule(self) -> None:
        when = self.publishing.deadline
        if self.scheduled != when:
            self.scheduled = when
            self.world.at(max(when, self.world.now), self.publish)

    def changed(self) -> None:
        """What this node says of itself has changed."""
        self.publishing.advert_changed(self.world.now)
        self.schedule()

    def hear(self, signed: SignedAdvert, age: float = 0.0) -> None:
        self.take(AdvertHeard(signed, age))
        self.look_at(signed.peer)

    def take(self, event: Any) -> None:
        self.table, effects = apply(self.table, event, self.world.now)
        for effect in effects:
            if isinstance(effect, Probe):
                self.probe(effect.peer)
            elif hasattr(effect, "now"):
                self.look_at(effect.peer)
        deadline = self.table.deadline
        if deadline < float("inf") and not (self.world.now < self.tick_at <= deadline):
            self.tick_at = deadline
            self.world.at(max(deadline, self.world.now), self.tick)

    def tick(self) -> None:
        if self.runs and self.table.deadline <= self.world.now:
            self.tick_at = -1.0
            self.take(Tick())

    def probe(self, peer: str) -> None:
        target = self.world.nodes.get(peer)
        if target is not None and self.world.connected(self.peer, peer):
            self.world.after(0.1, lambda: self.runs and self.take(ProofOfLife(peer, target.boot)))

    def sync(self) -> None:
        if not self.runs:
            return
        self.world.after(SYNC_EVERY * self.rng.uniform(0.9, 1.1), self.sync)
        others = [p for p in self.world.nodes if p != self.peer]
        if others:
            other = self.rng.choice(others)
            if self.world.connected(self.peer, other):
                self.sync_with(self.world.nodes[other])

    def sync_with(self, other: Node) -> None:
        world = self.world
        digest = anti_entropy.digest(self.table)
        theirs = anti_entropy.parse_digest(digest)
        world.sent["anti-entropy"] += len(digest) + 200

        def answer() -> None:
            if not (self.runs and other.runs):
                return
            diff = anti_entropy.compare(other.table, theirs, world.now)
            back = anti_entropy.wanted(self.table, diff.want, world.now)
            for record in (*diff.send, *back):
                world.sent["anti-entropy"] += len(record.envelope) + CHAIN_BYTES + 20
            world.after(0.05, lambda: self.runs and self.take_records(diff.send))
            world.after(0.1, lambda: other.runs and other.take_records(back))

        world.after(0.05, answer)

    def take_records(self, records: Iterable[anti_entropy.Record]) -> None:
        for record in records:
            self.hear(self.world.adverts[record.envelope], record.age)

    # -- placement --------------------------------------------------------------------------------

    def look_at(self, peer: str) -> None:
        """Whether what is known of ``peer`` now matters for the layout."""
        entry: Entry | None = self.table.entries.get(peer)
        matters = 0
        if entry is not None and entry.status != "gone":
            advert = entry.signed.advert
            matters = hash((advert.state, advert.devices, advert.holdings, advert.wants,
                            advert.speeds, advert.links))  # fmt: skip
        if self.relevant.get(peer, 0) != matters:
            self.relevant[peer] = matters
            now = self.world.now
            if self.due is None:
                self.due_latest = now + LONGEST
                self.world.after(SETTLE, self.maybe_plan)
            self.due = min(now + SETTLE, self.due_latest)

    def maybe_plan(self) -> None:
        if not self.runs or self.due is None:
            return
        if self.due > self.world.now + 1e-9:
            self.world.at(self.due, self.maybe_plan)
            return
        self.due = None
        view = self.view
        key = frozenset((p, m) for p, m in self.relevant.items() if m)
        if key not in self.world.plans:
            facts = facts_in(view)
            self.world.plans[key] = arrange(
                facts.wants, facts.machines, facts.network, facts.claims
            )
        self.plan = self.world.plans[key]
        claims = claims_in(view)
        steps = next_steps(self.peer, self.memory, self.plan, claims, [h for h, _ in self.held])
        for step in steps:
            match step:
                case Load(want, first, last):
                    held = Held(
                        next(self.next_id), want.model.digest, first, last,
                        want.stage_bytes(first, last), False,
                    )  # fmt: skip
                    self.held.append((held, next_sequence(claims, want.model.digest)))
                    self.world.after(LOADING, lambda held=held: self.loaded(held.id))
                case Drain(number):
                    self._update(number, draining=True, ready=False)
                    self.world.after(LOADING, lambda number=number: self.unloaded(number))
                case Keep(number):
                    self._update(number, draining=False, ready=True)
        # Who takes part repeats what is wanted.
        keeps = {h.digest for h, _ in self.held}
        wants = tuple(w for w in newest_wants(view) if w.digest in keeps or w in self.wants)
        if steps or wants != self.wants:
            self.wants = wants
            self.changed()

    def _update(self, number: int, **changes: bool) -> None:
        self.held = [(replace(h, **changes) if h.id == number else h, s) for h, s in self.held]

    def loaded(self, number: int) -> None:
        if self.runs and any(h.id == number and not h.draining for h, _ in self.held):
            self._update(number, ready=True)
            self.changed()

    def unloaded(self, number: int) -> None:
        before = len(self.held)
        self.held = [(h, s) for h, s in self.held if not (h.id == number and h.draining)]
        if self.runs and len(self.held) != before:
            self.changed()


def _holding(held: Held, sequence: int) -> Holding:
    return Holding(
        id=held.id,
        model=MODEL,
        digest=held.digest,
        kind="replica" if (held.first, held.last) == (0, LAYERS) else "stage",
        first=held.first,
        last=held.last,
        layers=LAYERS,
        context_length=4096,
        device="CPU",
        ready=held.ready and not held.draining,
        slots=8,
        queue=64,
        prefill_seconds=0.001,
        decode_seconds=0.01,
        claim=sequence,
    )


# -- scenarios ------------------------------------------------------------------------------------


def routes(world: World, entries: int = 20, each: int = 10) -> int:
    """Requests from some entry nodes all find a way; returns how many first nodes share them."""
    rng = random.Random(1)
    first: set[str] = set()
    for node in rng.sample(list(world.nodes.values()), min(entries, len(world.nodes))):
        in_flight = InFlight()
        view = node.view
        for _ in range(each):
            route = choose(view, RequestFacts(MODEL, 100, 100), rng=rng, in_flight=in_flight)
            in_flight.started(route, world.now)
            if any(hop.peer not in world.nodes for hop in route.hops):
                raise AssertionError("a request was sent to a node that is gone")
            first.add(route.peer)
    return len(first)


def cold_start(count: int, seed: int = 1, loss: float = 0.1) -> tuple[World, float, float]:
    """All nodes start within two seconds. Seconds until they know each other, and until the wanted
    model is served as planned."""
    world = World(seed, loss)
    for number in range(count):
        world.after(2.0 * number / count, lambda number=number: world.start(number))
    world.run(2.0)
    known = world.run_until(world.agrees, 120.0)
    arranged = known + world.run_until(world.is_arranged, 120.0)
    return world, known, arranged


def rate(world: World, seconds: float) -> dict[str, float]:
    """Bytes that a node sends per second when nothing happens, by kind."""
    world.sent = dict.fromkeys(world.sent, 0)
    world.run(seconds)
    return {kind: sent / len(world.nodes) / seconds for kind, sent in world.sent.items()}


def churn(world: World, turns: int, first: int) -> float:
    """Some nodes are killed and others join; seconds until all is in place again."""
    for turn in range(turns):
        holders = [p for p, n in world.nodes.items() if n.held and p != "N0000"]
        world.kill(world.rng.choice(holders or list(world.nodes)))
        world.start(first + turn)
        world.run(1.0)
    world.run(4.0)
    return world.run_until(world.is_arranged, 180.0)


def partition(world: World) -> tuple[int, float]:
    """Cut the mesh in two halves for a minute; chains that both had then, and seconds to heal."""
    world.split({peer: i % 2 for i, peer in enumerate(sorted(world.nodes))})
    world.run(60.0)
    sides = 0
    for side in (0, 1):
        inside = [n for p, n in world.nodes.items() if world.groups and world.groups[p] == side]
        claims = [c for c in claims_in(inside[0].view) if c.ready]
        sides += len(complete_chains(claims, LAYERS))
    world.groups = None
    world.run(5.0)
    return sides, world.run_until(world.is_arranged, 180.0)


def measure(count: int, report: Callable[[str], None]) -> dict[str, float]:
    began = time.perf_counter()
    world, known, arranged = cold_start(count)
    chains = world.chains()
    shared = routes(world)
    quiet = rate(world, 30.0)
    again = churn(world, 5 if count >= 10 else 1, count)
    sides, healed = partition(world)
    routes(world)
    report(
        f"{count:5} nodes: know each other after {known:.1f} s, arranged after {arranged:.1f} s; "
        f"at rest {quiet['gossip'] / 1e3:.2f} + {quiet['anti-entropy'] / 1e3:.2f} kB/s per node "
        f"(gossip + anti-entropy); {again:.1f} s after churn; {sides} chains in two halves, "
        f"{chains} before and {world.chains()} after healing, which took {healed:.1f} s; requests "
        f"of 20 entry nodes start at {shared} nodes  [{time.perf_counter() - began:.0f} s]"
    )
    return {
        "known": known,
        "arranged": arranged,
        "rate": sum(quiet.values()),
        "churn": again,
        "healed": healed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 and 100 nodes only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = (10, 100) if options.quick else (10, 100, 1000)
    found = {size: measure(size, print) for size in sizes}
    figures: list[dict[str, Any]] = []
    names = {
        "known": ("time until all nodes know each other", "s"),
        "arranged": ("time until a wanted model is served as planned", "s"),
        "rate": ("sent per node at rest", "bytes/s"),
        "churn": ("time to arrange anew after churn", "s"),
        "healed": ("time to one layout after a partition", "s"),
    }
    for size, values in found.items():
        reference = found[sizes[0]]
        for key, (name, unit) in names.items():
            figures.append(
                {
                    "figure": f"{name}, {size} nodes",
                    "unit": unit,
                    "ours": values[key],
                    "reference": f"{sizes[0]} nodes",
                    "reference_value": reference[key],
                    "ratio": reference[key] / values[key] if values[key] else 1.0,
                    "target": None,
                    "runs": 1,
                }
            )
    for small, large in itertools.pairwise(sizes):
        growth = found[large]["rate"] / found[small]["rate"]
        print(f"{small} -> {large} nodes: {growth:.1f} times the bytes per node per second")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except GenerationError as error:
        sys.exit(f"a request found no way: {error}")
