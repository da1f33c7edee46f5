"""What a request costs on a holding: seconds, from measured speeds and the load of the moment.

The model is crude on purpose, since it is fed by estimates: a batch of sessions shares a step, and
each further session makes the step longer by a fixed share; beyond its slots a holding is a queue
that empties at the rate of its throughput.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from mesh.gossip.advert import Holding
from mesh.gossip.anti_entropy import key_of
from mesh.gossip.view import NodeView, Place
from mesh.routing.placement.predict import CHUNK, HOP
from mesh.routing.route import Cost, RequestFacts

# Measured on CPUs: a decode step of n sessions takes about 1 + 0.15 (n - 1) times that of one.
# Prefill is bound by compute, so that the others' decode steps cost it more.
DECODE_CROWD = 0.15
PREFILL_CROWD = 0.3
# Clients ask for large max_tokens and mostly use little of it.
EXPECTED_OUTPUT = 256
# Per layer, when nobody has measured this model: a 1B model on a laptop's CPU, or so.
DEFAULT_PREFILL = 0.0001  # s per prompt token
DEFAULT_DECODE = 0.001  # s per step
FORWARD = 0.002  # s of CPU to hand a request to a peer
UNMEASURED_RTT = 0.005  # s, on an open link
DIAL = 0.25  # s to open a link, and a chance that it fails


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per layer for a model where a holding has not measured itself."""

    prefill: float
    decode: float

    @classmethod
    def known_from(cls, places: Iterable[Place]) -> Speeds:
        """The median of what others measured for the same model, else a guess."""
        prefill: list[float] = []
        decode: list[float] = []
        for holding in (p.holding for p in places):
            width = holding.last - holding.first
            if holding.prefill_seconds is not None:
                prefill.append(holding.prefill_seconds / width)
            if holding.decode_seconds is not None:
                decode.append(holding.decode_seconds / width)
        return cls(
            statistics.median(prefill) if prefill else DEFAULT_PREFILL,
            statistics.median(decode) if decode else DEFAULT_DECODE,
        )


def expected_output(facts: RequestFacts) -> int:
    """Tokens that the answer will probably have."""
    return EXPECTED_OUTPUT if facts.max_tokens is None else min(facts.max_tokens, EXPECTED_OUTPUT)


def capacity(holding: Holding) -> int:
    """Requests that it runs and lets wait; one more is refused."""
    return holding.slots + holding.queue


def holding_cost(place: Place, busy: int, facts: RequestFacts, speeds: Speeds) -> Cost:
    """Cost of the request on this holding alone, without any network (``link`` is 0).

    ``busy``: sessions that run or wait there before this one.
    """
    holding = place.holding
    width = holding.last - holding.first
    slow = facts.slow.get(place.node.peer, 1.0)
    prefill_seconds = slow * (holding.prefill_seconds or speeds.prefill * width)
    decode_seconds = slow * (holding.decode_seconds or speeds.decode * width)
    others = min(busy, holding.slots - 1)
    fresh = max(1, facts.prompt_tokens - facts.cached.get(place.node.peer, 0))
    prefill = fresh * prefill_seconds * (1.0 + PREFILL_CROWD * others)
    decode = expected_output(facts) * decode_seconds * (1.0 + DECODE_CROWD * others)
    # A request like this one, in a full house.
    full = holding.slots - 1
    stay = fresh * prefill_seconds * (1.0 + PREFILL_CROWD * full) + EXPECTED_OUTPUT * (
        decode_seconds * (1.0 + DECODE_CROWD * full)
    )
    ahead = max(0, busy - full)
    free_kv = place.node.load_of(holding).free_kv
    if not ahead and busy and free_kv is not None and free_kv < facts.prompt_tokens:
        ahead = 1  # it must wait until a session frees its KV blocks
    return Cost(stay * ahead / holding.slots, prefill, decode, 0.0)


def link_delay(node: NodeView, *, here: bool) -> float:
    """Seconds for a message to a node and its answer."""
    if here:
        return 0.0
    if node.link is None:
        return DIAL + FORWARD
    return FORWARD + (node.link.rtt if node.link.rtt is not None else UNMEASURED_RTT)


def hop_delay(one: NodeView, other: NodeView, here: str) -> float:
    """One-way seconds between two nodes: as they tell of their link, else the detour over us."""
    if one.peer == other.peer:
        return 0.0
    told = [rtt for rtt in (_told(one, other), _told(other, one)) if rtt is not None]
    if told:
        return HOP + max(told) / 2
    return sum(link_delay(n, here=n.peer == here) for n in (one, other)) / 2


def _told(author: NodeView, other: NodeView) -> float | None:
    """The round trip to another node that a node has measured and advertised, in seconds."""
    key = key_of(other.peer)
    row = next((row for row in author.advert.links if row.key == key), None)
    return None if row is None or row.rtt is None else row.rtt * 1e-4


def chain_cost(stages: list[tuple[Place, Cost]], facts: RequestFacts, here: str) -> Cost:
    """Cost of a chain from the costs of its stages.

    Prefill overlaps: the slowest stage sets the pace and the others add one chunk each. Decoding
    goes round the ring once per token. A session waits until the busiest stage takes it.
    """
    nodes = [place.node for place, _ in stages]
    ring = sum(hop_delay(a, b, here) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    chunks = math.ceil(max(1, facts.prompt_tokens) / CHUNK)
    slowest = max(cost.prefill for _, cost in stages)
    prefill = slowest + sum(cost.prefill / chunks for _, cost in stages) - slowest / chunks
    return Cost(
        wait=max(cost.wait for _, cost in stages),
        prefill=prefill,
        decode=sum(cost.decode for _, cost in stages),
        link=link_delay(nodes[0], here=nodes[0].peer == here) + ring * (1 + expected_output(facts)),
    )
