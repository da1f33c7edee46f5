"""What this node has sent since a peer last said how busy it is.

Load reports are late by half a second and more. Without a correction, an entry node that gets many
requests at once would send all of them to the peer that was idle a moment ago.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mesh.gossip.view import NodeView, Place
from mesh.identity import PeerId
from mesh.routing.route import Route

# A report says what was true when it was made, a little before it was received; a request that was
# sent within this time before that is taken as not counted in it.
REPORT_DELAY = 0.1  # s
# How long a finished request is remembered: longer than a load report can be late.
REMEMBERED = 30.0  # s


@dataclass(slots=True)
class _Sent:
    at: float
    ended: float | None = None


class InFlight:
    """Requests under way from this node, by the holdings they use. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sent: dict[tuple[PeerId, int], list[_Sent]] = {}

    def started(self, route: Route, now: float) -> Ticket:
        """Count a request on every holding of its route until the ticket's ``ended`` is called."""
        sent = _Sent(now)
        for hop in route.hops:
            key = hop.peer, hop.holding
            kept = [s for s in self._sent.get(key, ()) if _matters(s, now)]
            self._sent[key] = [*kept, sent]
        return Ticket(sent)

    def forget(self, peer: PeerId) -> None:
        """Drop what was sent to a peer that is gone."""
        for key in [key for key in self._sent if key[0] == peer]:
            del self._sent[key]

    def busy(self, place: Place) -> int:
        """Sessions running or waiting there: as reported, corrected by what we know better."""
        load = place.node.load_of(place.holding)
        return max(0, load.active + load.waiting + self._correction(place.node, place.holding.id))

    def _correction(self, node: NodeView, holding: int) -> int:
        sent: Iterable[_Sent] = self._sent.get((node.peer, holding), ())
        load = node.load.get(holding)
        reported = load.active + load.waiting if load is not None else 0
        counted_until = node.load_at - REPORT_DELAY
        open_now = change = 0
        for one in sent:
            if one.ended is None:
                open_now += 1
                change += one.at > counted_until
            elif one.at <= counted_until and one.ended > node.load_at:
                change -= 1
        # It is at least as busy as we keep it ourselves.
        return max(change, open_now - reported)


class Ticket:
    """One request under way."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent

    def ended(self, now: float) -> None:
        """The request finished, failed or was cancelled. Calling again changes nothing."""
        if self._sent.ended is None:
            self._sent.ended = now


def _matters(sent: _Sent, now: float) -> bool:
    return sent.ended is None or now - sent.ended < REMEMBERED
