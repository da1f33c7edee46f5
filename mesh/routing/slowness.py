"""Peers that lately took much longer than their measured speed says. Pure.

A node measures its speed once, when it loads a model. If its machine is busy with something else
now, answers say so: this entry node then counts it as slower, and less so with every minute, so
that it is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mesh.identity import PeerId

HALF_LIFE = 60.0  # s in which half of the distrust is gone
NOISE = 2.0  # times the prediction: others' sessions that came later explain as much
MOST = 20.0
SMALLEST = 1.2  # factors below are not worth a detour


@dataclass(frozen=True, slots=True)
class _Seen:
    factor: float
    at: float

    def now(self, now: float) -> float:
        return 1.0 + (self.factor - 1.0) * math.exp2((self.at - now) / HALF_LIFE)


class Slowness:
    """What this entry node has seen. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[PeerId, _Seen] = {}

    def observed(self, peer: PeerId, predicted: float, actual: float, now: float) -> None:
        """An answer of ``peer`` alone took ``actual`` seconds of work instead of ``predicted``."""
        if predicted <= 0.0 or actual <= 0.0:
            return
        ratio = actual / predicted
        fresh = min(ratio, MOST) if ratio > NOISE else 1.0
        known = self._seen.get(peer)
        before = known.now(now) if known is not None else fresh
        self._seen[peer] = _Seen((before + fresh) / 2, now)

    def factors(self, now: float) -> Mapping[PeerId, float]:
        """By how much the predictions for peers are to be stretched."""
        self._seen = {p: seen for p, seen in self._seen.items() if seen.now(now) > SMALLEST}
        return {peer: seen.now(now) for peer, seen in self._seen.items()}
