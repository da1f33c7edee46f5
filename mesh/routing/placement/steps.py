"""What one node does next to get from what it holds to what the layout gives it. Pure.

A stage that the layout does not give to the node any more goes on answering until the new layout
can: it is let go when that is loaded, or when its memory is needed and it is part of nothing that
works. Letting go begins with *draining*: no new session, the running ones finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.routing.placement.claims import Claim, complete_chains
from mesh.routing.placement.facts import Want
from mesh.routing.placement.plan import Plan


@dataclass(frozen=True, slots=True)
class Held:
    """A stage that this node holds by a claim. ``bytes``: the memory it takes."""

    id: int
    digest: str
    first: int
    last: int
    bytes: int
    ready: bool
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Claim and load layers ``[first, last)``, which take ``bytes``."""

    want: Want
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new session for this holding and unload it when the last one has ended."""

    id: int


@dataclass(frozen=True, slots=True)
class Keep:
    """A draining holding is wanted again."""

    id: int


Step = Load | Drain | Keep


def next_steps(
    me: PeerId, memory: int, plan: Plan, claims: Sequence[Claim], held: Sequence[Held]
) -> tuple[Step, ...]:
    """``claims`` are those of the whole mesh, this node's own included."""
    target = {(w.model.digest, s.first, s.last): (w, s.bytes) for w, s in plan.of(me)}
    steps: list[Step] = []
    stale: list[Held] = []
    for one in held:
        if target.pop((one.digest, one.first, one.last), None) is None:
            stale.append(one)
        elif one.draining:
            steps.append(Keep(one.id))
    free = memory - sum(one.bytes for one in held)
    short = False
    for (_, first, last), (want, size) in sorted(target.items(), key=lambda item: item[0]):
        if size <= free:
            free -= size
            steps.append(Load(want, first, last, size))
        else:
            short = True
    for one in stale:
        if not one.draining and (
            _is_replaced(plan, one.digest, claims)
            or (short and not _is_needed(me, one, claims, plan))
        ):
            steps.append(Drain(one.id))
    return tuple(steps)


def _is_replaced(plan: Plan, digest: str, claims: Sequence[Claim]) -> bool:
    """Whether the layout of this model works without what it leaves out, or wants nothing of it."""
    model = plan.model(digest)
    if model is None:
        return True
    ready = {(c.peer, c.first, c.last) for c in claims if c.digest == digest and c.ready}
    return bool(model.chains) and all(
        (s.peer, s.first, s.last) in ready for chain in model.chains for s in chain.stages
    )


def _is_needed(me: PeerId, one: Held, claims: Sequence[Claim], plan: Plan) -> bool:
    """Whether without it there would be no working chain of its model left."""
    model = plan.model(one.digest)
    if model is None or not one.ready:
        return False
    others = [
        claim
        for claim in claims
        if claim.digest == one.digest
        and claim.ready
        and (claim.peer, claim.first, claim.last) != (me, one.first, one.last)
    ]
    mine = Claim(me, one.digest, one.first, one.last, 0, True)
    layers = model.want.model.layers
    return bool(complete_chains([*others, mine], layers)) and not complete_chains(others, layers)
