"""The layout of all wanted models over the mesh, from scratch. Pure.

Each model gets one chain before any gets a second one. Memory that one model takes on a machine is
not there for the next. Machines that are left over and cannot make a chain of their own hold a
second copy of a stage: when a stage is lost, its place is taken at once, and load can go round a
machine that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mesh.identity import PeerId
from mesh.routing.placement.facts import Machine, Network, Want
from mesh.routing.placement.predict import ChainPlan, StagePlan
from mesh.routing.placement.search import AUTO_CHAINS, find_chains

NONE: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Where one model goes. ``notes`` say, for people, why it is not more or something else."""

    want: Want
    chains: tuple[ChainPlan, ...]
    spares: tuple[StagePlan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return (*(stage for chain in self.chains for stage in chain.stages), *self.spares)

    def of(self, peer: PeerId) -> StagePlan | None:
        """What ``peer`` holds of this model."""
        return next((stage for stage in self.stages if stage.peer == peer), None)

    @property
    def cost(self) -> float:
        return sum(chain.prediction.cost for chain in self.chains)


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the whole mesh, one entry per wanted model in order of names."""

    models: tuple[ModelPlan, ...]

    def of(self, peer: PeerId) -> tuple[tuple[Want, StagePlan], ...]:
        """What ``peer`` holds."""
        found = ((model.want, model.of(peer)) for model in self.models)
        return tuple((want, stage) for want, stage in found if stage is not None)

    def model(self, digest: str) -> ModelPlan | None:
        return next((m for m in self.models if m.want.model.digest == digest), None)


def in_order(wants: Sequence[Want]) -> list[Want]:
    """The order in which wants are served everywhere."""
    return sorted(wants, key=lambda want: (want.model.name, want.model.digest))


def make_plan(
    wants: Sequence[Want],
    machines: Sequence[Machine],
    network: Network,
    given: Mapping[str, ModelPlan] = MappingProxyType({}),
    avoid: Mapping[str, frozenset[PeerId]] = MappingProxyType({}),
) -> Plan:
    """The same arguments, in any order, give the same plan. Each digest is wanted once.

    ``given``, by digest: chains that are there whatever the plan, in memory that is not counted.
    ``avoid``: machines that are to hold nothing (more) of a model.
    """
    room = Room(machines)
    wants = in_order(wants)
    plans: dict[str, ModelPlan] = {}
    # One chain each, then the rest; a single model is planned in one go, which is exact.
    rounds = (1, None) if len(wants) > 1 else (None,)
    for most in rounds:
        for want in wants:
            digest = want.model.digest
            before = plans.get(digest, given.get(digest, ModelPlan(want, ())))
            if most is None or not before.chains:
                plans[digest] = plan_model(
                    want, room, network, before=before, avoid=avoid.get(digest, NONE), most=most
                )
            else:
                plans[digest] = before
    for want in wants:
        digest = want.model.digest
        plans[digest] = with_spares(plans[digest], room, avoid.get(digest, NONE))
    return Plan(tuple(plans[want.model.digest] for want in wants))


class Room:
    """Machines with the memory that is left on them while a layout is made."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = {m.peer: m for m in sorted(machines, key=lambda m: m.peer)}
        self._placed: dict[PeerId, int] = {}

    def machines(self, without: frozenset[PeerId] = frozenset()) -> list[Machine]:
        """As they are with what was taken: less memory, and less time where other models run."""
        return [
            replace(machine, busy=1.0 - (1.0 - machine.busy) / (1 + self._placed[peer]))
            if peer in self._placed
            else machine
            for peer, machine in self._machines.items()
            if peer not in without
        ]

    def __getitem__(self, peer: PeerId) -> Machine:
        return self._machines[peer]

    def take(self, stage: StagePlan) -> None:
        machine = self._machines[stage.peer]
        self._machines[stage.peer] = replace(machine, memory=machine.memory - stage.bytes)
        self._placed[stage.peer] = self._placed.get(stage.peer, 0) + 1


def plan_model(
    want: Want,
    room: Room,
    network: Network,
    *,
    before: ModelPlan,
    avoid: frozenset[PeerId] = NONE,
    most: int | None = None,
) -> ModelPlan:
    """``before`` with at most ``most`` further chains; what they need is taken of ``room``.

    Machines that already hold some of the model are left alone, and those to ``avoid``.
    """
    used = frozenset(stage.peer for stage in before.stages)
    replicas = AUTO_CHAINS if want.replicas is None else want.replicas
    replicas -= len(before.chains)
    if most is not None:
        replicas = min(most, replicas)
    if replicas <= 0:
        return before
    nodes = None if want.max_nodes is None else max(0, want.max_nodes - len(used))
    machines = room.machines(without=used | avoid)
    alone = min(
        (chain for chain in before.chains if len(chain.stages) == 1),
        key=lambda chain: chain.order,
        default=None,
    )
    found = find_chains(
        replace(want, replicas=replicas, max_nodes=nodes), machines, network, alone=alone
    )
    for chain in found.chains:
        for stage in chain.stages:
            room.take(stage)
    chains = (*before.chains, *found.chains)
    notes = list(before.notes)
    if most is None or not chains:
        if found.faster_alone is not None:
            notes.append(
                f"no chain over the other machines: {found.faster_alone.peers[0]} alone is faster"
            )
        elif not chains:
            notes.append(_what_is_missing(want, machines))
        elif want.replicas is not None and len(found.chains) < replicas:
            notes.append(
                f"{len(chains)} of {want.replicas} replicas fit: the machines that are left "
                "cannot hold every layer once more"
            )
    return ModelPlan(want, chains, before.spares, tuple(dict.fromkeys(notes)))


def _what_is_missing(want: Want, machines: Sequence[Machine]) -> str:
    need = want.stage_bytes(0, want.model.layers)
    have = sum(machine.memory for machine in machines)
    bound = "" if want.max_nodes is None else f" on at most {want.max_nodes} of them"
    return (
        f"does not fit: {megabytes(need)} are needed with KV for {want.sessions} sessions of "
        f"{want.context} tokens, and more for each further stage; {len(machines)} machines offer "
        f"{megabytes(have)}{bound}"
    )


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def with_spares(plan: ModelPlan, room: Room, avoid: frozenset[PeerId] = NONE) -> ModelPlan:
    """``plan`` with copies of its stages on machines that hold nothing of the model yet.

    Only where the number of replicas is left to the mesh, and only of chains with several stages.
    """
    want = plan.want
    ranges = [
        (stage.first, stage.last)
        for chain in plan.chains
        if len(chain.stages) > 1
        for stage in chain.stages
    ]
    if want.replicas is not None or not ranges:
        return plan
    used = {stage.peer for stage in plan.stages}
    copies: dict[tuple[int, int], int] = {}
    for stage in plan.stages:
        copies[stage.first, stage.last] = copies.get((stage.first, stage.last), 0) + 1
    spares = list(plan.spares)
    left = None if want.max_nodes is None else want.max_nodes - len(used)
    for machine in room.machines():
        if machine.peer in used | avoid or machine.alone or left == 0:
            continue
        fitting = [
            (copies[first, last], -(last - first), first, last)
            for first, last in ranges
            if copies[first, last] < AUTO_CHAINS
            and machine.bytes_of(want, first, last) <= machine.memory
        ]
        if not fitting:
            continue
        _, _, first, last = min(fitting)
        spare = StagePlan(machine.peer, first, last, machine.bytes_of(want, first, last))
        room.take(spare)
        spares.append(spare)
        copies[first, last] += 1
        left = None if left is None else left - 1
    return replace(plan, spares=tuple(spares))
