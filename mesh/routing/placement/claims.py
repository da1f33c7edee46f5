"""From claims to the layout that the mesh should have next. Pure: the same on every node.

A claim is a holding that a node announces with a number, its *claim sequence*: greater than that of
every claim for the model that the node had seen. There is no leader. Each node computes
:func:`arrange` from its view and takes up what the result gives it; while views differ, two nodes
may claim what only one of them is needed for. Then, in every view that knows both, the claim that
is loaded wins over one that is not, and the one with the lower (sequence, PeerId) over the other.

What works stays: chains that are claimed are kept, a gap is mended in place, and all is laid out
anew only when that is better by :data:`MARGIN`, nobody is loading, and there is memory for the new
layout beside the chains that work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh.identity import PeerId
from mesh.routing.placement.chains import ChainFinder
from mesh.routing.placement.facts import Machine, Network, Want
from mesh.routing.placement.plan import (
    ModelPlan,
    Plan,
    Room,
    in_order,
    make_plan,
    plan_model,
    with_spares,
)
from mesh.routing.placement.predict import ChainPlan, StagePlan
from mesh.routing.placement.search import AUTO_CHAINS, find_chains

MAX_SEQUENCE = (1 << 32) - 1
MARGIN = 0.25  # a new layout must be better by this share of the seconds of a request


@dataclass(frozen=True, slots=True)
class Claim:
    """Layers ``[first, last)`` of a model that ``peer`` holds or is loading.

    ``sequence`` is None for what its user has typed: that stays whatever the plan. A claim that is
    not ``ready`` keeps its node from being given other layers, but answers no request yet.
    """

    peer: PeerId
    digest: str
    first: int
    last: int
    sequence: int | None
    ready: bool

    @property
    def rank(self) -> tuple[bool, int, PeerId]:
        """Less wins."""
        return not self.ready, self.sequence or 0, self.peer


def next_sequence(claims: Iterable[Claim], digest: str) -> int:
    """For a claim that is made now: greater than all, unless somebody has said the greatest."""
    seen = (claim.sequence or 0 for claim in claims if claim.digest == digest)
    return min(max(seen, default=0) + 1, MAX_SEQUENCE)


def arrange(
    wants: Sequence[Want],
    machines: Sequence[Machine],
    network: Network,
    claims: Sequence[Claim],
    *,
    margin: float = MARGIN,
) -> Plan:
    """The layout to have next, given what is claimed. Claims of others than ``machines`` are void.

    In any order the same arguments give the same layout; and once it is claimed and loaded, it
    gives itself again. Of several wants of the same weights the first by name counts.
    """
    counted: dict[str, Want] = {}
    for want in in_order(wants):
        counted.setdefault(want.model.digest, want)
    plan = _arrange(list(counted.values()), machines, network, claims, margin)
    planned = {model.want: model for model in plan.models}
    return Plan(
        tuple(
            planned[want] if want in planned else _same_as(counted[want.model.digest], want)
            for want in in_order(wants)
        )
    )


def _same_as(other: Want, want: Want) -> ModelPlan:
    note = f"has the weights of {other.model.name}, which is wanted too: only that is laid out"
    return ModelPlan(want, (), notes=(note,))


def _arrange(
    wants: Sequence[Want],
    machines: Sequence[Machine],
    network: Network,
    claims: Sequence[Claim],
    margin: float,
) -> Plan:
    by_peer = {machine.peer: machine for machine in machines}
    standing = _standing(claims, wants, by_peer)
    avoid = {
        want.model.digest: frozenset(
            c.peer for c in standing if c.digest == want.model.digest and c.sequence is None
        )
        for want in wants
    }
    kept = _kept(wants, machines, network, standing, avoid)
    claimed = {
        want.model.digest: [c for c in standing if c.digest == want.model.digest] for want in wants
    }
    settled = [_is_settled(keep, claimed[keep.want.model.digest]) for keep in kept.models]
    if not any(settled):
        return kept
    typed = {w.model.digest: _typed(w, standing, machines, network) for w in wants}
    fresh = make_plan(wants, machines, network, typed, avoid)
    models = []
    for keep, new, is_settled in zip(kept.models, fresh.models, settled, strict=True):
        mine = claimed[keep.want.model.digest]
        if is_settled and _is_better(new, keep, margin) and _can_change(keep, new, mine, by_peer):
            models.append(new)
        else:
            models.append(keep)
    return _consistent(models, machines, kept, avoid)


def _typed(
    want: Want, standing: Sequence[Claim], machines: Sequence[Machine], network: Network
) -> ModelPlan:
    """The chains that users have put together themselves."""
    typed = [c for c in standing if c.digest == want.model.digest and c.sequence is None]
    chains, _ = _chains(typed, want.model.layers)
    return ModelPlan(want, tuple(_as_chain(want, chain, machines, network) for chain in chains))


def _consistent(
    models: Sequence[ModelPlan],
    machines: Sequence[Machine],
    kept: Plan,
    typed: Mapping[str, frozenset[PeerId]],
) -> Plan:
    """``models``, unless together they take more memory than there is."""
    if all(new is old for new, old in zip(models, kept.models, strict=True)):
        return kept
    taken: dict[PeerId, int] = {}
    for model in models:
        for stage in model.stages:
            if stage.peer not in typed[model.want.model.digest]:
                taken[stage.peer] = taken.get(stage.peer, 0) + stage.bytes
    fits = all(taken.get(machine.peer, 0) <= machine.memory for machine in machines)
    return Plan(tuple(models)) if fits else kept


def _standing(
    claims: Sequence[Claim], wants: Sequence[Want], by_peer: Mapping[PeerId, Machine]
) -> list[Claim]:
    """Claims that count: of wanted models, by machines that are there, one per machine and model
    (the winning one), within the machine's memory."""
    shapes = {want.model.digest: want for want in wants}
    found: list[Claim] = []
    seen: set[tuple[PeerId, str]] = set()
    taken: dict[PeerId, int] = {}
    for claim in sorted(claims, key=lambda c: (*c.rank, c.digest, c.first, c.last)):
        want = shapes.get(claim.digest)
        if want is None or claim.peer not in by_peer or (claim.peer, claim.digest) in seen:
            continue
        if not 0 <= claim.first < claim.last <= want.model.layers:
            continue
        if by_peer[claim.peer].alone and (claim.first, claim.last) != (0, want.model.layers):
            continue
        holder = by_peer[claim.peer]
        size = 0 if claim.sequence is None else holder.bytes_of(want, claim.first, claim.last)
        if taken.get(claim.peer, 0) + size > holder.memory:
            continue
        taken[claim.peer] = taken.get(claim.peer, 0) + size
        seen.add((claim.peer, claim.digest))
        found.append(claim)
    return found


def complete_chains(claims: Sequence[Claim], layers: int) -> list[tuple[Claim, ...]]:
    """Complete chains that can be made of ``claims`` without using one of them twice."""
    return _chains(claims, layers)[0]


def _chains(claims: Sequence[Claim], layers: int) -> tuple[list[tuple[Claim, ...]], list[Claim]]:
    """Disjoint complete chains out of ``claims``, winners first, and what is left over."""
    left = sorted(claims, key=lambda c: c.rank)
    chains: list[tuple[Claim, ...]] = []
    while (path := _path(left, layers)) is not None:
        chains.append(path)
        left = [claim for claim in left if claim not in path]
    return chains, left


def _path(claims: Sequence[Claim], layers: int) -> tuple[Claim, ...] | None:
    """The best complete chain: of claims that are loaded, then of few, then of early ones."""
    order = {claim: position for position, claim in enumerate(claims)}

    def weight(path: tuple[Claim, ...]) -> tuple[int, int, list[int]]:
        waiting = sum(1 for claim in path if not claim.ready)
        return waiting, len(path), sorted((order[c] for c in path), reverse=True)

    best: dict[int, tuple[Claim, ...]] = {0: ()}
    for claim in sorted(claims, key=lambda c: (c.first, order[c])):
        before = best.get(claim.first)
        if before is None or any(claim.peer == other.peer for other in before):
            continue
        path = (*before, claim)
        known = best.get(claim.last)
        if known is None or weight(path) < weight(known):
            best[claim.last] = path
    return best.get(layers)


# -- keeping what is there ------------------------------------------------------------------------


def _kept(
    wants: Sequence[Want],
    machines: Sequence[Machine],
    network: Network,
    standing: Sequence[Claim],
    avoid: Mapping[str, frozenset[PeerId]],
) -> Plan:
    """Chains as claimed, gaps mended, and what is still missing added on free machines."""
    room = Room(machines)
    fragments: dict[str, list[Claim]] = {}
    plans: dict[str, ModelPlan] = {}
    wants = in_order(wants)
    for want in wants:
        claims = [c for c in standing if c.digest == want.model.digest]
        chains, left = _chains(claims, want.model.layers)
        kept = _within_limits(want, chains)
        plan = ModelPlan(want, tuple(_as_chain(want, chain, machines, network) for chain in kept))
        for chain in kept:
            for claim in chain:
                if claim.sequence is not None:
                    room.take(_as_stage(want, claim, room))
        plans[want.model.digest] = plan
        surplus = [c for chain in chains if chain not in kept for c in chain]
        fragments[want.model.digest] = [*left, *surplus]
    for want in wants:
        digest = want.model.digest
        plan = plans[digest]
        if _wanted(want, plan):
            plan = _mended(plan, fragments[digest], room, network, avoid[digest])
        plans[digest] = plan_model(want, room, network, before=plan, avoid=avoid[digest])
    for want in wants:
        digest = want.model.digest
        plan = _kept_spares(plans[digest], fragments[digest], room)
        plans[digest] = with_spares(plan, room, avoid[digest])
    return Plan(tuple(plans[want.model.digest] for want in wants))


def _wanted(want: Want, plan: ModelPlan) -> bool:
    """Whether the plan has fewer chains than are wanted."""
    return len(plan.chains) < (AUTO_CHAINS if want.replicas is None else want.replicas)


def _within_limits(want: Want, chains: Sequence[tuple[Claim, ...]]) -> list[tuple[Claim, ...]]:
    kept: list[tuple[Claim, ...]] = []
    nodes = 0
    for chain in chains:
        typed = all(claim.sequence is None for claim in chain)
        enough = len(kept) >= (AUTO_CHAINS if want.replicas is None else want.replicas)
        wide = want.max_nodes is not None and nodes + len(chain) > want.max_nodes
        if typed or not (enough or wide):
            kept.append(chain)
            nodes += len(chain)
    return kept


def _as_stage(want: Want, claim: Claim, room: Room) -> StagePlan:
    size = room[claim.peer].bytes_of(want, claim.first, claim.last)
    return StagePlan(claim.peer, claim.first, claim.last, size)


def _as_chain(
    want: Want, chain: Sequence[Claim], machines: Sequence[Machine], network: Network
) -> ChainPlan:
    by_peer = {machine.peer: machine for machine in machines}
    finder = ChainFinder(want, [by_peer[claim.peer] for claim in chain], network)
    return finder.plan([(by_peer[claim.peer], claim.first, claim.last) for claim in chain])


def _mended(
    plan: ModelPlan,
    fragments: Sequence[Claim],
    room: Room,
    network: Network,
    avoid: frozenset[PeerId],
) -> ModelPlan:
    """One more chain out of what is left of broken ones, with single machines in the gaps."""
    want = plan.want
    fragments = [
        c
        for c in fragments
        if c.sequence is None or _as_stage(want, c, room).bytes <= room[c.peer].memory
    ]
    if not fragments:
        return plan
    held = _best_cover(fragments, want.model.layers)
    gaps = _gaps(held, want.model.layers)
    used = {stage.peer for stage in plan.stages} | {claim.peer for claim in held}
    if want.max_nodes is not None and len(used) + len(gaps) > want.max_nodes:
        return plan
    free = [m for m in room.machines(without=frozenset(used) | avoid) if not m.alone]
    filled: list[StagePlan] = []
    for first, last in gaps:
        able = [m for m in free if m.memory >= m.bytes_of(want, first, last)]
        if not able:
            return plan
        model = want.model
        # A machine with a fragment of its own gives that up: others are taken before it.
        holders = {claim.peer for claim in fragments}
        chosen = min(able, key=lambda m: (m.peer in holders, m.speed(model).decode, m.peer))
        free.remove(chosen)
        filled.append(StagePlan(chosen.peer, first, last, chosen.bytes_of(want, first, last)))
    stages = sorted(
        [*(_as_stage(want, claim, room) for claim in held), *filled], key=lambda s: s.first
    )
    finder = ChainFinder(want, [room[stage.peer] for stage in stages], network)
    chain = finder.plan([(room[s.peer], s.first, s.last) for s in stages])
    apart = frozenset(stage.peer for stage in plan.stages) | avoid
    left = None if want.max_nodes is None else want.max_nodes - len(plan.stages)
    alone = replace(want, replicas=1, max_nodes=left)
    for fresh in find_chains(alone, room.machines(without=apart), network).chains:
        if len(fresh.stages) < len(stages) or fresh.prediction.cost * (1 + MARGIN) < (
            chain.prediction.cost
        ):
            return plan  # it is not worth mending
    for stage in stages:
        if not any(c.peer == stage.peer and c.sequence is None for c in held):
            room.take(stage)
    return replace(plan, chains=(*plan.chains, chain))


def _best_cover(fragments: Sequence[Claim], layers: int) -> list[Claim]:
    """Fragments that do not overlap and leave the fewest layers, then the fewest gaps, open."""
    best: tuple[tuple[int, int, list[tuple[bool, int, PeerId]]], list[Claim]] | None = None
    ordered = sorted(fragments, key=lambda c: (c.first, c.last, c.rank))

    # By end of what is covered so far: (layers covered, fragments).
    paths: list[tuple[int, tuple[Claim, ...]]] = [(0, ())]
    for claim in ordered:
        fitting = [
            (covered, path)
            for covered, path in paths
            if (not path or path[-1].last <= claim.first)
            and all(claim.peer != other.peer for other in path)
        ]
        if fitting:
            covered, path = max(fitting, key=lambda entry: (entry[0], -len(entry[1])))
            paths.append((covered + claim.last - claim.first, (*path, claim)))
    for covered, path in paths:
        gaps = len(_gaps(path, layers))
        key = layers - covered, gaps, sorted(claim.rank for claim in path)
        if best is None or key < best[0]:
            best = key, list(path)
    return best[1] if best is not None else []


def _gaps(held: Sequence[Claim], layers: int) -> list[tuple[int, int]]:
    found = []
    due = 0
    for claim in held:
        if claim.first > due:
            found.append((due, claim.first))
        due = claim.last
    if due < layers:
        found.append((due, layers))
    return found


def _kept_spares(plan: ModelPlan, fragments: Sequence[Claim], room: Room) -> ModelPlan:
    """Copies of the plan's stages that are held already stay where they are."""
    want = plan.want
    if want.replicas is not None:
        return plan
    ranges = {(s.first, s.last) for chain in plan.chains for s in chain.stages}
    used = {stage.peer for stage in plan.stages}
    spares = list(plan.spares)
    for claim in sorted(fragments, key=lambda c: c.rank):
        full = want.max_nodes is not None and len(used) >= want.max_nodes
        if (
            claim.sequence is None
            or (claim.first, claim.last) not in ranges
            or claim.peer in used
            or full
        ):
            continue
        stage = _as_stage(want, claim, room)
        if stage.bytes > room[claim.peer].memory:
            continue
        room.take(stage)
        used.add(claim.peer)
        spares.append(stage)
    return replace(plan, spares=tuple(spares))


# -- laying out anew ------------------------------------------------------------------------------


def _is_settled(keep: ModelPlan, claims: Sequence[Claim]) -> bool:
    """Whether nobody is loading anything for this layout, or all of it is still free to choose.

    Measurements come in while nodes load. If that could move the layout, it would never be loaded.
    """
    if not claims:
        return True
    ready = {(c.peer, c.first, c.last) for c in claims if c.ready}
    return all((s.peer, s.first, s.last) in ready for c in keep.chains for s in c.stages)


def _is_better(new: ModelPlan, keep: ModelPlan, margin: float) -> bool:
    if len(new.chains) != len(keep.chains):
        return len(new.chains) > len(keep.chains)
    return new.cost * (1.0 + margin) < keep.cost


def _can_change(
    keep: ModelPlan, new: ModelPlan, claims: Sequence[Claim], by_peer: Mapping[PeerId, Machine]
) -> bool:
    """Whether ``keep`` can become ``new`` without a stage of its chains being let go before.

    It can when nothing works yet, or when every machine has memory for its part of those chains and
    for what it is to hold; spares and what is left over may give way. A stage that is let go makes
    ``keep`` unsettled: it would be kept again, the stage be wanted again, and so on for ever.
    """
    want = keep.want
    working, _ = _chains([c for c in claims if c.ready], want.model.layers)
    if not working:
        return True
    target = {(s.peer, s.first, s.last) for s in new.stages}
    held: dict[PeerId, int] = {}
    for chain in keep.chains:
        for stage in chain.stages:
            if (stage.peer, stage.first, stage.last) not in target:
                held[stage.peer] = held.get(stage.peer, 0) + stage.bytes
    typed = {claim.peer for claim in claims if claim.sequence is None}
    return all(
        held.get(stage.peer, 0) + stage.bytes <= by_peer[stage.peer].memory
        for stage in new.stages
        if stage.peer not in typed
    )
