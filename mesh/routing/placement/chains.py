"""The best chain over given machines: who is first and last, in which order, with which layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

from mesh.identity import PeerId
from mesh.routing.placement.facts import WORKSPACE, Machine, Network, Want
from mesh.routing.placement.predict import (
    CHUNK,
    OUTPUT,
    PROMPT,
    ChainPlan,
    StagePlan,
    hop_seconds,
    predict,
)
from mesh.routing.placement.ranges import Seat, split

_CHUNKS = math.ceil(PROMPT / CHUNK)


def capacity(want: Want, machine: Machine, *, first: bool, last: bool) -> int:
    """How many layers fit on ``machine`` as a stage that is the first or the last one, or both."""
    model, copies = want.model, want.copies(machine.fixed)
    ends = model.embedding_bytes if first else 0
    ends += model.head_bytes if last else 0
    ends -= model.shared_bytes if first and last else 0
    left = machine.memory - WORKSPACE - copies * ends
    layer = copies * model.layer_bytes + want.layer_kv(machine.fixed)
    return max(0, min(model.layers, left // layer))


class ChainFinder:
    """Chains for one want over one set of machines, with what is computed once for all of them."""

    def __init__(self, want: Want, machines: Sequence[Machine], network: Network) -> None:
        self.want = want
        self.machines = tuple(sorted(machines, key=lambda m: m.peer))
        self.network = network
        self.by_peer = {machine.peer: machine for machine in self.machines}
        self._seats: dict[tuple[PeerId, bool, bool], Seat] = {}
        self._tail = {
            m.peer: (1 + OUTPUT) * want.model.head_layers * m.speed(want.model).decode
            for m in self.machines
        }
        self._rings: dict[tuple[PeerId, PeerId, bool], float] = {}
        self._best: dict[frozenset[PeerId], ChainPlan | None] = {}

    def seat(self, machine: Machine, *, first: bool, last: bool) -> Seat:
        key = machine.peer, first, last
        found = self._seats.get(key)
        if found is None:
            speed = machine.speed(self.want.model)
            pace = PROMPT / _CHUNKS * speed.prefill
            fits = capacity(self.want, machine, first=first, last=last)
            if machine.alone and not (first and last):
                fits = 0
            found = self._seats[key] = Seat(pace + OUTPUT * speed.decode, pace, fits)
        return found

    def whole(self, machine: Machine) -> ChainPlan | None:
        """The whole model on one machine, if it fits."""
        layers = self.want.model.layers
        if self.seat(machine, first=True, last=True).capacity < layers:
            return None
        return self.plan([(machine, 0, layers)])

    def room(self, machine: Machine) -> int:
        """The most layers that the machine can take, in the middle of a chain."""
        return self.seat(machine, first=False, last=False).capacity

    def best(self, machines: Sequence[Machine]) -> ChainPlan | None:
        """The cheapest chain in which each of the machines has at least one layer."""
        group = frozenset(machine.peer for machine in machines)
        if group not in self._best:
            ordered = sorted(machines, key=lambda machine: machine.peer)
            self._best[group] = (
                self.whole(ordered[0]) if len(ordered) == 1 else self._search(ordered)
            )
        return self._best[group]

    def _search(self, machines: Sequence[Machine]) -> ChainPlan | None:
        found: tuple[float, tuple[PeerId, ...], list[tuple[Machine, int]]] | None = None
        for seated in self._ends(machines):
            value, counts, ordered = seated
            if found is not None and value >= found[0]:
                continue
            for cost, order in self._orders(ordered):
                key = value + cost, tuple(ordered[i].peer for i in order)
                if found is None or key < found[:2]:
                    found = (*key, [(ordered[i], counts[i]) for i in order])
        if found is None:
            return None
        stages = []
        start = 0
        for machine, count in found[2]:
            stages.append((machine, start, start + count))
            start += count
        return self.plan(stages)

    def _ends(
        self, machines: Sequence[Machine]
    ) -> Iterator[tuple[float, tuple[int, ...], list[Machine]]]:
        """For each choice of the first and the last machine: the cost without the network, layers,
        and the machines, those two at the ends."""
        for head, tail in permutations(machines, 2):
            ordered = [head, *(m for m in machines if m not in (head, tail)), tail]
            seats = [
                self.seat(machine, first=machine is head, last=machine is tail)
                for machine in ordered
            ]
            best = split(seats, self.want.model.layers, _CHUNKS - 1)
            if best is not None:
                yield best[0] + self._tail[tail.peer], best[1], ordered

    def _orders(self, ordered: Sequence[Machine]) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Network cost of each order with the ends as they are, as indices of ``ordered``."""
        last = len(ordered) - 1
        for middle in permutations(range(1, last)):
            order = (0, *middle, last)
            cost = sum(
                self._hop(ordered[a].peer, ordered[b].peer, token=False) for a, b in pairwise(order)
            )
            yield cost + self._hop(ordered[last].peer, ordered[0].peer, token=True), order

    def _hop(self, one: PeerId, other: PeerId, *, token: bool) -> float:
        key = one, other, token
        cost = self._rings.get(key)
        if cost is None:
            chunk, row = (0, 0) if token else (round(PROMPT / _CHUNKS), 1)
            cost = self._rings[key] = hop_seconds(
                self.network, self.want, one, other, chunk
            ) + OUTPUT * hop_seconds(self.network, self.want, one, other, row)
        return cost

    def distance(self, one: PeerId, other: PeerId) -> float:
        """What a hop between the two costs a request."""
        return self._hop(one, other, token=False)

    def plan(self, stages: Sequence[tuple[Machine, int, int]]) -> ChainPlan:
        return ChainPlan(
            tuple(
                StagePlan(machine.peer, first, last, machine.bytes_of(self.want, first, last))
                for machine, first, last in stages
            ),
            predict(self.want, stages, self.network),
        )
