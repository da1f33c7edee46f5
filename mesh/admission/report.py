"""What an advert tells of this node's links. Pure.

Adverts must not change with the noise of measurements: a value that was told stays until it is off
by a quarter. There is room for a few links only: those that were found wanting come first, then the
nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh.admission.measure import LinkSummary
from mesh.admission.policy import State
from mesh.gossip.advert import MAX_LINKS, SeenLink
from mesh.gossip.anti_entropy import key_of
from mesh.identity import PeerId

STATES: tuple[State, ...] = ("admitted", "quarantined", "rejected")
CHANGE = 0.25
LEAST_RTT = 5  # tenths of a millisecond: differences below that are nothing
_FAR = 1 << 24


def rows(
    seen: Mapping[PeerId, tuple[LinkSummary, State]], told: Sequence[SeenLink]
) -> tuple[SeenLink, ...]:
    """The links to tell of, given what was told before."""
    before = {row.key: row for row in told}
    found = [
        _row(peer, summary, state, before.get(key_of(peer)))
        for peer, (summary, state) in seen.items()
    ]
    found.sort(key=lambda row: (-row.state, _FAR if row.rtt is None else row.rtt, row.key))
    return tuple(found[:MAX_LINKS])


def is_news(peer: PeerId, summary: LinkSummary, state: State, told: Sequence[SeenLink]) -> bool:
    """Whether what was told of the link to ``peer`` is not so any more."""
    key = key_of(peer)
    old = next((row for row in told if row.key == key), None)
    return old is not None and _row(peer, summary, state, old) != old


def _row(peer: PeerId, summary: LinkSummary, state: State, told: SeenLink | None) -> SeenLink:
    old = told or SeenLink(key=key_of(peer))
    return SeenLink(
        key=old.key,
        rtt=_steady(summary.rtt, 1e4, old.rtt, LEAST_RTT),
        jitter=_steady(summary.jitter, 1e4, old.jitter, LEAST_RTT),
        loss=_steady(summary.loss, 1e3, old.loss, 5),
        upload=_steady(summary.upload, 1e-3, old.upload, 100),
        download=_steady(summary.download, 1e-3, old.download, 100),
        state=STATES.index(state),
    )


def _steady(value: float | None, scale: float, told: int | None, least: int) -> int | None:
    if value is None:
        return None
    fresh = round(value * scale)
    if told is not None and abs(fresh - told) <= max(least, CHANGE * told):
        return told
    return fresh
