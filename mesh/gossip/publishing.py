"""When this node speaks: full adverts on change and every 10 s, load reports in between.

Load goes out at most every 0.5 s and only when it changed. A node with work in hand repeats it
every 2 s; an idle one is silent between its adverts. Which of the two holds is announced as the
*beat* of each message, so that its peers know what silence means.

Every node hears every message, so in a large mesh all speak less often: beyond :data:`FULL_PACE`
nodes the intervals grow with their number. Who is lost is noticed by those who have a link to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from mesh.gossip.advert import HoldingLoad

ADVERT_EVERY = 10.0  # s
ADVERT_GAP = 0.25  # s between adverts when much changes at once
LOAD_GAP = 0.5  # s between load reports
BUSY_BEAT = 2.0  # s
FULL_PACE = 100  # nodes
MOST_STRETCH = 6.0  # a beat is at most a minute


def rounded(load: HoldingLoad) -> HoldingLoad:
    """``load`` with free KV cut to its two leading bits.

    KV shrinks with every token of every session. Routing needs to know whether there is room, and a
    report for each token would keep the whole mesh busy.
    """
    if load.free_kv is None:
        return load
    shift = max(0, load.free_kv.bit_length() - 2)
    return load.model_copy(update={"free_kv": load.free_kv >> shift << shift})


class Publishing:
    """Decides; the service signs and sends. ``now`` is monotonic and does not go back."""

    def __init__(self) -> None:
        self._advert_due = -math.inf  # the first one is due at once
        self._advert_sent = -math.inf
        self._load_sent = -math.inf
        # What all have heard; None while some have heard something else.
        self._sent_load: dict[int, HoldingLoad] | None = {}
        self._load: dict[int, HoldingLoad] = {}
        self._stretch = 1.0

    def mesh_size(self, nodes: int) -> None:
        """How many nodes this one knows."""
        self._stretch = min(MOST_STRETCH, max(1.0, nodes / FULL_PACE))

    @property
    def _busy(self) -> bool:
        return any(load.active or load.waiting for load in self._load.values())

    @property
    def beat(self) -> float:
        """What to promise in a message that is sent now."""
        return (BUSY_BEAT if self._busy else ADVERT_EVERY) * self._stretch

    @property
    def load(self) -> tuple[HoldingLoad, ...]:
        """What to say of the load in a message that is sent now."""
        return tuple(self._load.values())

    def advert_changed(self, now: float) -> None:
        self._advert_due = min(self._advert_due, max(now, self._advert_sent + ADVERT_GAP))

    def load_changed(self, load: Mapping[int, HoldingLoad]) -> None:
        """The present load of all holdings, by id."""
        self._load = {id_: rounded(item) for id_, item in load.items()}

    @property
    def deadline(self) -> float:
        """When something is due."""
        return min(self._advert_due, self._load_due)

    @property
    def _load_due(self) -> float:
        # An advert carries the load too.
        last = max(self._load_sent, self._advert_sent)
        if self._load != self._sent_load:
            return last + LOAD_GAP * self._stretch
        return last + self.beat if self._busy else math.inf

    def due(self, now: float) -> Literal["advert", "load"] | None:
        if now >= self._advert_due:
            return "advert"
        return "load" if now >= self._load_due else None

    def sent_advert(self, now: float, jitter: float) -> None:
        """``jitter`` in [0, 1) keeps nodes that started together from speaking together."""
        self._advert_sent = now
        self._advert_due = now + ADVERT_EVERY * self._stretch * (1.0 - 0.1 * jitter)
        self._sent_load = dict(self._load)

    def told_one(self) -> None:
        """One peer has the load of now. All get it when it is due, or what it is by then: even if
        that is what they have."""
        self._sent_load = None

    def sent_load(self, now: float) -> None:
        self._load_sent = now
        self._sent_load = dict(self._load)
