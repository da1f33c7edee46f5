"""Choose where a request runs: the cheapest of this node, other replicas and chains. Pure.

Entry nodes see the same stale load. If each took the single cheapest place, all would take the same
one. So places whose costs differ by less than the error of the prediction are *near-equals*, and of
those two are drawn at random and the cheaper one wins (the power of two choices); each entry node
also counts what it has sent itself (:class:`~mesh.routing.in_flight.InFlight`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from inference.errors import GenerationError
from mesh.gossip.advert import Holding
from mesh.gossip.view import NodeView, Place, View
from mesh.identity import PeerId
from mesh.routing.cost import (
    Speeds,
    capacity,
    chain_cost,
    expected_output,
    holding_cost,
    hop_delay,
    link_delay,
)
from mesh.routing.in_flight import InFlight
from mesh.routing.route import (
    Chain,
    Considered,
    Cost,
    Hop,
    Local,
    PassedOver,
    Replica,
    RequestFacts,
    Route,
)

NEAR = 0.1  # predictions are not better than this share
NEAR_SECONDS = 0.003
MAX_CONSIDERED = 8
# Of each range of layers, so many of the cheapest holders are looked at. It bounds the time that a
# choice takes in a mesh of hundreds of stages.
MAX_PATHS = 8
LOADING = "still loading"
LOADING_RETRY = 5.0  # s
MAX_RETRY = 60.0  # s that a client may be told to wait


@dataclass(frozen=True, slots=True)
class _Offer:
    """A place that could take the request, and how many sessions it seems to have."""

    place: Place
    busy: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    offers: tuple[_Offer, ...]
    cost: Cost

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(offer.place.node.peer for offer in self.offers)

    @property
    def is_chain(self) -> bool:
        return self.offers[0].place.holding.kind == "stage"


def choose(view: View, facts: RequestFacts, *, rng: random.Random, in_flight: InFlight) -> Route:
    """The route for one request. The same arguments and state of ``rng`` give the same route.

    Raises :class:`~inference.errors.GenerationError`: ``model_not_found`` when nobody has the
    model, ``node_lost`` when those who have it are excluded or suspect, ``overloaded`` (with
    ``retry_after``) when all their queues are full or the model is still loading.
    """
    held, passed_over = _holders(view, facts)
    ready: dict[str, list[_Offer]] = {}
    full: list[_Offer] = []
    for place in held:
        here = place.node.peer == view.me
        offer = _Offer(place, in_flight.busy(place, here=here))
        if offer.busy >= capacity(place.holding):
            full.append(offer)
            passed_over.append(PassedOver(place.node.peer, "its queue is full"))
        else:
            ready.setdefault(place.holding.digest, []).append(offer)
    candidates: list[_Candidate] = []
    for digest in sorted(ready):
        offers = ready[digest]
        speeds = Speeds.known_from(offer.place for offer in offers)
        stages = [o for o in offers if o.place.holding.kind == "stage"]
        candidates += [
            _replica(view, facts, offer, speeds)
            for offer in offers
            if offer.place.holding.kind == "replica"
        ]
        candidates += _chains(view, facts, stages, speeds, rng)
    if not candidates:
        raise _refusal(facts, full, bool(ready), passed_over)
    return _route(view, facts, candidates, passed_over, rng)


def _holders(view: View, facts: RequestFacts) -> tuple[list[Place], list[PassedOver]]:
    """Who has the model ready and may be used, and who has it and may not."""
    places: list[Place] = []
    passed_over: list[PassedOver] = []
    for peer, node in sorted(view.nodes.items()):
        for holding in node.holdings:
            if holding.model != facts.model or facts.digest not in (None, holding.digest):
                continue
            why = _objection(node, holding, facts)
            if why is None:
                places.append(Place(node, holding))
            else:
                passed_over.append(PassedOver(peer, why))
    return places, passed_over


def _objection(node: NodeView, holding: Holding, facts: RequestFacts) -> str | None:
    if node.peer in facts.exclude:
        return "lost or refused by this request"
    if node.status != "alive":
        return f"{node.status}: {node.reason}"
    if node.peer in facts.rejected:
        return "rejected by the admission test"
    if node.peer in facts.unfit and holding.kind == "stage":
        return "quarantined: no place in chains"
    if node.advert.state != "up":
        return node.advert.state
    return None if holding.ready else LOADING


def _replica(view: View, facts: RequestFacts, offer: _Offer, speeds: Speeds) -> _Candidate:
    node = offer.place.node
    cost = holding_cost(offer.place, offer.busy, facts, speeds)
    link = link_delay(node, here=node.peer == view.me)
    return _Candidate((offer,), Cost(cost.wait, cost.prefill, cost.decode, link))


def _chains(
    view: View, facts: RequestFacts, stages: Sequence[_Offer], speeds: Speeds, rng: random.Random
) -> list[_Candidate]:
    """The cheapest complete chain from each holder of the first layers.

    Stages are the vertices of an acyclic graph (each begins where the one before it ends), so one
    pass in order of their first layer finds the cheapest path. A small random factor on each stage
    does here what drawing two does among whole candidates: it parts entry nodes that see the same.
    """
    ordered = sorted(stages, key=lambda o: (o.place.holding.first, o.place.node.peer))
    costs = {id(o): holding_cost(o.place, o.busy, facts, speeds) for o in ordered}
    weights = {id(o): costs[id(o)].total * (1.0 + NEAR * rng.random()) for o in ordered}
    tokens = 1 + expected_output(facts)
    candidates: list[_Candidate] = []
    beginnings = [offer for offer in ordered if offer.place.holding.first == 0]
    for start in heapq.nsmallest(MAX_PATHS, beginnings, key=lambda o: weights[id(o)]):
        # By layer boundary: (weight, stages) of the paths that end there.
        paths: dict[int, list[tuple[float, tuple[_Offer, ...]]]] = {
            start.place.holding.last: [(weights[id(start)], (start,))]
        }
        for offer in ordered:
            holding = offer.place.holding
            before = paths.get(holding.first)
            if not before:
                continue
            weight, path = min(
                (
                    (w + tokens * hop_delay(p[-1].place.node, offer.place.node, view.me), p)
                    for w, p in before
                ),
                key=lambda found: found[0],
            )
            found = (weight + weights[id(offer)], (*path, offer))
            ending = paths.setdefault(holding.last, [])
            ending.append(found)
            ending.sort(key=lambda f: f[0])
            del ending[MAX_PATHS:]
        complete = paths.get(start.place.holding.layers, [])
        if complete:
            home = start.place.node
            _, best = min(
                complete,
                key=lambda f: f[0] + tokens * hop_delay(f[1][-1].place.node, home, view.me),
            )
            priced = [(offer.place, costs[id(offer)]) for offer in best]
            candidates.append(_Candidate(best, chain_cost(priced, facts, view.me)))
    return candidates


def _route(
    view: View,
    facts: RequestFacts,
    candidates: Sequence[_Candidate],
    passed_over: Sequence[PassedOver],
    rng: random.Random,
) -> Route:
    ranked = sorted(candidates, key=lambda c: (c.cost.total, c.peers))
    best = ranked[0].cost.total
    near = [c for c in ranked if c.cost.total <= max(best * (1.0 + NEAR), best + NEAR_SECONDS)]
    if not ranked[0].is_chain:
        near = [c for c in near if not c.is_chain]
    own = next((c for c in near if not c.is_chain and c.peers[0] == view.me), None)
    if own is not None:
        chosen, reason = own, "this node's own replica is as cheap as any"
    elif len(near) > 1:
        chosen = min(rng.sample(near, 2), key=lambda c: c.cost.total)
        reason = f"cheaper of two drawn from {len(near)} near-equals"
    else:
        chosen = near[0]
        reason = "the only way" if len(ranked) == 1 else f"cheapest of {len(ranked)}"
    kind = Chain if chosen.is_chain else Local if chosen.peers[0] == view.me else Replica
    return kind(
        model=facts.model,
        digest=chosen.offers[0].place.holding.digest,
        hops=tuple(_hop(offer) for offer in chosen.offers),
        cost=chosen.cost,
        reason=reason,
        considered=tuple(Considered(c.peers, c.cost) for c in ranked[:MAX_CONSIDERED]),
        passed_over=tuple(passed_over),
    )


def _hop(offer: _Offer) -> Hop:
    node, holding = offer.place.node, offer.place.holding
    return Hop(
        peer=node.peer,
        name=node.name,
        holding=holding.id,
        first=holding.first,
        last=holding.last,
        device=holding.device,
        busy=offer.busy,
    )


def _refusal(
    facts: RequestFacts,
    full: Sequence[_Offer],
    incomplete: bool,
    passed_over: Sequence[PassedOver],
) -> GenerationError:
    if full:
        speeds = Speeds.known_from(offer.place for offer in full)
        soonest = min(_until_room(offer, facts, speeds) for offer in full)
        return GenerationError(
            "overloaded",
            f"every node that serves {facts.model!r} has a full queue",
            retry_after=min(max(1.0, soonest), MAX_RETRY),
        )
    if not passed_over and not incomplete:
        return GenerationError("model_not_found", f"no node serves the model {facts.model!r}")
    if any(p.why == LOADING for p in passed_over):
        return GenerationError(
            "overloaded", f"{facts.model!r} is still loading", retry_after=LOADING_RETRY
        )
    if incomplete and not passed_over:
        return GenerationError(
            "model_not_found",
            f"no node serves the model {facts.model!r} whole, and the layers "
            "that nodes have ready do not make a complete chain",
        )
    why = "; ".join(sorted({p.why for p in passed_over}))
    return GenerationError("node_lost", f"no node is left that could run {facts.model!r}: {why}")


def _until_room(offer: _Offer, facts: RequestFacts, speeds: Speeds) -> float:
    """Seconds until one of those who wait there gets a slot, roughly."""
    wait = holding_cost(offer.place, offer.busy, facts, speeds).wait
    return wait / max(1, offer.busy - offer.place.holding.slots + 1)
