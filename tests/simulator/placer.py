"""Placement at one node: when it plans, and the steps that it takes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh.gossip.advert import Holding, Wanted
from mesh.identity import PeerId
from mesh.placing import LONGEST, SETTLE
from mesh.routing.placement.claims import Claim, arrange, next_sequence
from mesh.routing.placement.from_view import facts_in, newest_wants
from mesh.routing.placement.plan import Plan
from mesh.routing.placement.steps import Drain, Held, Keep, Load, next_steps

if TYPE_CHECKING:
    from simulator.node import Node

MODEL, DIGEST, LAYERS, CHAINS = "demo", "ab" * 32, 12, 3
WANTED_BY = 0  # the number of the node whose user wants the model
LOADING = 2.0  # s
MB = 1 << 20
LAYER_BYTES = 10 * MB


def wanted(publisher: PeerId) -> Wanted:
    return Wanted(
        name=MODEL,
        digest=DIGEST,
        version=1,
        publisher=publisher,
        layers=LAYERS,
        layer_bytes=LAYER_BYTES,
        embedding_bytes=15 * MB,
        head_bytes=15 * MB,
        shared_bytes=15 * MB,
        kv_bytes=512,
        hidden=1024,
        context_length=4096,
        replicas=CHAINS,
        context=1024,
        sessions=1,
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """What every node with one and the same view finds in it."""

    plan: Plan
    claims: tuple[Claim, ...]
    wants: tuple[Wanted, ...]


class Placer:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.held: list[tuple[Held, int]] = []  # and the sequence of the claim
        self.plan = Plan(())
        self.due: float | None = None  # when to plan, as long as nothing is heard
        self._latest = 0.0
        self._next_id = itertools.count()

    def news(self) -> None:
        """Something that matters has changed in the view."""
        now = self._node.world.now
        if self.due is None:
            self._latest = now + LONGEST
            self._node.world.after(SETTLE, self._plan_when_due)
        self.due = min(now + SETTLE, self._latest)

    def _plan_when_due(self) -> None:
        world = self._node.world
        if not self._node.runs or self.due is None:
            return
        if self.due > world.now + 1e-9:
            world.at(self.due, self._plan_when_due)
            return
        self.due = None
        found = self._planned()
        self.plan = found.plan
        self._act(found)

    def _planned(self) -> Planned:
        world, key = self._node.world, self._node.view_key
        if key not in world.plans:
            view = self._node.view
            facts = facts_in(view)
            plan = arrange(facts.wants, facts.machines, facts.network, facts.claims)
            world.plans[key] = Planned(plan, facts.claims, newest_wants(view))
        return world.plans[key]

    def _act(self, found: Planned) -> None:
        node = self._node
        held = [one for one, _ in self.held]
        steps = next_steps(node.peer, node.memory, found.plan, found.claims, held)
        for step in steps:
            match step:
                case Load(_, first, last, size):
                    fresh = Held(next(self._next_id), DIGEST, first, last, size, False)
                    self.held.append((fresh, next_sequence(found.claims, DIGEST)))
                    node.world.after(LOADING, lambda number=fresh.id: self._loaded(number))
                case Drain(number):
                    self._update(number, draining=True, ready=False)
                    node.world.after(LOADING, lambda number=number: self._unloaded(number))
                case Keep(number):
                    self._update(number, draining=False, ready=True)
        # Who takes part repeats what is wanted.
        keeps = {one.digest for one, _ in self.held}
        wants = tuple(w for w in found.wants if w.digest in keeps or w in node.wants)
        if steps or wants != node.wants:
            node.wants = wants
            node.changed()

    def _update(self, number: int, **changes: bool) -> None:
        self.held = [(replace(h, **changes) if h.id == number else h, s) for h, s in self.held]

    def _loaded(self, number: int) -> None:
        if self._node.runs and any(h.id == number and not h.draining for h, _ in self.held):
            self._update(number, ready=True)
            self._node.loaded()

    def _unloaded(self, number: int) -> None:
        before = len(self.held)
        self.held = [(h, s) for h, s in self.held if not (h.id == number and h.draining)]
        if self._node.runs and len(self.held) != before:
            self._node.changed()

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(
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
            for held, sequence in self.held
        )
