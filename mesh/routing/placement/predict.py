"""What a chain would do: seconds per token, time to the first token, tokens per second.

The model of time is that of the relay. A step of one session goes through all stages in turn and
the token goes back to the first one. A prompt goes through in chunks: the slowest stage sets the
pace, the others add one chunk each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.identity import PeerId
from mesh.routing.placement.facts import Machine, Network, Want

PROMPT = 512  # tokens of the request that layouts are compared by
OUTPUT = 256
CHUNK = 64  # tokens of a prompt that go through a chain together
STEP = 0.0003  # s that a step of a stage takes beyond what was measured: its batch, sampling
HOP = 0.001  # s for a frame besides the network: from one stage's thread to the other's
VALUE_BYTES = 4  # activations cross as f32


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Layers ``[first, last)`` on a machine. ``bytes`` is the memory that they take there."""

    peer: PeerId
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one session alone. ``stages`` and ``hops`` are the seconds of each in a step; the hop of
    rank *i* leads to the next one, the last back to the first (none for a chain of one).

    ``cost`` is the seconds of a request with PROMPT tokens in and OUTPUT tokens out.
    """

    stages: tuple[float, ...]
    hops: tuple[float, ...]
    first_token: float
    cost: float

    @property
    def step(self) -> float:
        return sum(self.stages) + sum(self.hops)

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.step


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A chain, or a whole replica when it has one stage."""

    stages: tuple[StagePlan, ...]
    prediction: Prediction

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(stage.peer for stage in self.stages)

    @property
    def order(self) -> tuple[int, float, tuple[PeerId, ...]]:
        """Fewest stages first, then the fastest; PeerIds decide between equals."""
        return len(self.stages), self.prediction.cost, self.peers


def hop_seconds(network: Network, want: Want, one: PeerId, other: PeerId, tokens: int) -> float:
    """For the activations of ``tokens`` from one machine to another; 0 tokens: a token id."""
    connection = network.between(one, other)
    size = tokens * want.model.hidden * VALUE_BYTES
    return connection.delay + size / connection.bandwidth + HOP


def predict(
    want: Want,
    stages: Sequence[tuple[Machine, int, int]],
    network: Network,
    *,
    prompt: int = PROMPT,
    output: int = OUTPUT,
) -> Prediction:
    """``stages``: (machine, first, last) in order of layers."""
    model = want.model
    steps: list[float] = []
    chunks: list[float] = []
    count = max(1, math.ceil(prompt / CHUNK))
    for machine, first, last in stages:
        speed = machine.speed(model)
        head = model.head_layers * speed.decode if last == model.layers else 0.0
        steps.append((last - first) * speed.decode + head + STEP)
        chunks.append(prompt / count * (last - first) * speed.prefill + STEP)
    hops: list[float] = []
    carried = 0.0
    if len(stages) > 1:
        peers = [machine.peer for machine, _, _ in stages]
        for index, peer in enumerate(peers):
            last_one = index == len(peers) - 1
            following = peers[(index + 1) % len(peers)]
            hops.append(hop_seconds(network, want, peer, following, 0 if last_one else 1))
            carried += hop_seconds(
                network, want, peer, following, 0 if last_one else round(prompt / count)
            )
    tail = stages[-1][0].speed(model)
    first_token = (
        sum(chunks) + (count - 1) * max(chunks) + carried + model.head_layers * tail.decode
    )
    step = sum(steps) + sum(hops)
    return Prediction(tuple(steps), tuple(hops), first_token, first_token + output * step)
