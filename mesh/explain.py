"""Why a response went the way it went, what that was to take, and what it took.

The entry node keeps the last routes that it chose. What each stage of a chain has computed only the
head of the chain knows; it is asked when somebody wants to see it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mesh.gossip.view import Place, View
from mesh.identity import PeerId
from mesh.routing.cost import (
    Speeds,
    expected_output,
    holding_cost,
    hop_delay,
    link_delay,
)
from mesh.routing.route import Chain, Hop, RequestFacts, Route

MAX_KEPT = 256  # responses that are remembered
MAX_STAGES = 4096
EXPLAIN_KIND = "mesh.explain"

StageSeconds = tuple[tuple[str, int, int, float], ...]  # peer, first, last, seconds


@dataclass(frozen=True, slots=True)
class HopGuess:
    """Predicted seconds of one stage, prefill and per token, and of the way to the next one."""

    hop: Hop
    prefill: float
    step: float
    onward: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One route that was taken for a response; there is another after each loss."""

    route: Route
    hops: tuple[HopGuess, ...]
    tokens: int  # output tokens that the prediction counted with


@dataclass(frozen=True, slots=True)
class Explanation:
    choices: tuple[Choice, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    produced: int = 0


class NoFigures(ValueError):
    """A head told nothing that makes sense."""


def parse_seconds(body: Any) -> StageSeconds:
    """What the head of a chain told. Raises :class:`NoFigures`."""
    if not isinstance(body, list) or len(body) > MAX_STAGES:
        raise NoFigures("not a list of stages")
    found = []
    for row in body:
        match row:
            case [str(peer), int(first), int(last), float(seconds)] if len(peer) <= 128:
                found.append((peer, first, last, seconds))
            case _:
                raise NoFigures("not a stage and its seconds")
    return tuple(found)


class Explanations:
    """The last :data:`MAX_KEPT` responses that entered the mesh here, and what chains that begin
    here have computed."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Explanation] = OrderedDict()
        self._runs: OrderedDict[str, Callable[[], StageSeconds]] = OrderedDict()

    def chosen(self, response: str, view: View, facts: RequestFacts, route: Route) -> None:
        before = self._kept.get(response, Explanation())
        # By measured speed: what is known of slow peers came from comparing with just that.
        plain = replace(facts, slow={})
        choice = Choice(route, _guess(view, plain, route), expected_output(facts))
        _keep(self._kept, response, replace(before, choices=(*before.choices, choice)[-8:]))

    def completed(self, response: str, timings: Mapping[str, float], produced: int) -> None:
        before = self._kept.get(response)
        if before is not None:
            self._kept[response] = replace(before, timings=dict(timings), produced=produced)

    def work(self, response: str, stages: StageSeconds) -> list[tuple[PeerId, float, float]]:
        """Who worked for a finished response, with predicted and actual seconds of work there.

        ``stages``: what the stages of its chain have computed. Empty where a loss on the way makes
        the comparison mean nothing.
        """
        kept = self._kept.get(response)
        if kept is None or not kept.timings or len(kept.choices) != 1:
            return []
        choice = kept.choices[0]
        if isinstance(choice.route, Chain):
            actual = {(peer, first, last): seconds for peer, first, last, seconds in stages}
        else:
            spent = kept.timings.get("prefill", 0.0) + kept.timings.get("decode", 0.0)
            actual = {(h.peer, h.first, h.last): spent for h in choice.route.hops}
        return [
            (guess.hop.peer, guess.prefill + guess.step * kept.produced, actual[key])
            for guess in choice.hops
            if (key := (guess.hop.peer, guess.hop.first, guess.hop.last)) in actual
        ]

    def heads(self, response: str, seconds: Callable[[], StageSeconds]) -> None:
        """A chain that begins here works for a response; ``seconds`` tells for how long so far."""
        _keep(self._runs, response, seconds)

    def stage_seconds(self, response: str) -> StageSeconds:
        """Empty when nothing is known."""
        run = self._runs.get(response)
        return run() if run is not None else ()

    def find(self, response: str) -> Explanation | None:
        """By the id in the response, or in the header ``X-Mesh-Request``."""
        return self._kept.get(plain_id(response))


def plain_id(response: str) -> str:
    return response.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _keep(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > MAX_KEPT:
        kept.popitem(last=False)


def _guess(view: View, facts: RequestFacts, route: Route) -> tuple[HopGuess, ...]:
    places = [_place(view, hop) for hop in route.hops]
    known = [place for place in places if place is not None]
    if len(known) != len(places):
        return ()
    speeds = Speeds.known_from(known)
    found = []
    for index, (hop, place) in enumerate(zip(route.hops, known, strict=True)):
        cost = holding_cost(place, hop.busy, facts, speeds)
        following = known[(index + 1) % len(known)]
        if isinstance(route, Chain):
            onward = hop_delay(place.node, following.node, view.me)
        else:
            onward = link_delay(place.node, here=place.node.peer == view.me)
        step = cost.decode / max(1, expected_output(facts))
        found.append(HopGuess(hop, cost.prefill, step, onward))
    return tuple(found)


def _place(view: View, hop: Hop) -> Place | None:
    node = view.nodes.get(hop.peer)
    holding = next((h for h in node.holdings if h.id == hop.holding), None) if node else None
    return Place(node, holding) if node is not None and holding is not None else None


def describe(
    view: View, explanation: Explanation, actual: Mapping[PeerId, StageSeconds]
) -> dict[str, Any]:
    """JSON. ``actual``, by head: what its chain's stages have computed."""
    return {
        "produced_tokens": explanation.produced,
        "timings_ms": {k: _ms(v) for k, v in explanation.timings.items()},
        "routes": [
            _choice(view, choice, actual.get(choice.route.peer, ()), explanation)
            for choice in explanation.choices
        ],
    }


def _choice(
    view: View, choice: Choice, actual: StageSeconds, explanation: Explanation
) -> dict[str, Any]:
    route = choice.route
    tokens = explanation.produced or choice.tokens
    spent = {(peer, first, last): seconds for peer, first, last, seconds in actual}
    onward = sum(guess.onward for guess in choice.hops)
    between = _between(explanation.timings, sum(spent.values())) if spent else None
    stages = [
        {
            "peer": guess.hop.peer,
            "name": guess.hop.name,
            "layers": [guess.hop.first, guess.hop.last],
            "device": guess.hop.device,
            "busy": guess.hop.busy,
            "predicted_ms": _ms(guess.prefill + guess.step * tokens),
            "predicted_per_token_ms": _ms(guess.step),
            "actual_ms": _ms(spent.get((guess.hop.peer, guess.hop.first, guess.hop.last))),
            "onward_predicted_ms": _ms(guess.onward),
            # Clocks of nodes differ, so only the ring as a whole can be timed: its hops are taken
            # to have shares in it as predicted.
            "onward_actual_ms": (
                _ms(between / tokens * guess.onward / onward) if between and onward else None
            ),
        }
        for guess in choice.hops
    ]
    return {
        "kind": type(route).__name__.lower(),
        "reason": route.reason,
        "predicted": {
            "wait_ms": _ms(route.cost.wait),
            "prefill_ms": _ms(route.cost.prefill),
            "decode_ms": _ms(route.cost.decode),
            "link_ms": _ms(route.cost.link),
            "tokens": choice.tokens,
        },
        "stages": stages,
        "between_stages_predicted_ms": _ms(onward * tokens) if len(stages) > 1 else None,
        "between_stages_actual_ms": _ms(between),
        "considered": [
            {
                "nodes": [_name(view, peer) for peer in other.peers],
                "total_ms": _ms(other.cost.total),
            }
            for other in route.considered
        ],
        "passed_over": [
            {"node": _name(view, other.peer), "why": other.why} for other in route.passed_over
        ],
    }


def _between(timings: Mapping[str, float], computed: float) -> float | None:
    """Seconds of a finished response that no stage computed and that it did not wait for a place:
    on the way between stages, and at their doors."""
    if "total" not in timings:
        return None
    return max(0.0, timings["total"] - timings.get("queue", 0.0) - computed)


def _name(view: View, peer: PeerId) -> str:
    node = view.nodes.get(peer)
    return node.name if node is not None else str(peer)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
