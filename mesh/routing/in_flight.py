"""What this node has sent since a peer last said how busy it is.

Load reports are late by half a second and more. Without a correction, an entry node that gets many
requests at once would send all of them to the peer that was idle a moment ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.gossip.view import Place
from mesh.identity import PeerId
from mesh.routing.route import Route

# A report says what was true when it was made, a little before it was received. Of requests that
# were sent within this time before that, it counts as many as it shows sessions more than there
# were.
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
        # Each with how many sessions the holding had, as far as was known, when it was sent.
        self._sent: dict[tuple[PeerId, int], list[tuple[_Sent, int]]] = {}

    def started(self, route: Route, now: float) -> Ticket:
        """Count a request on every holding of its route until the ticket's ``ended`` is called."""
        kept = {
            key: [(one, before) for one, before in sent if _matters(one, now)]
            for key, sent in self._sent.items()
        }
        self._sent = {key: sent for key, sent in kept.items() if sent}
        one = _Sent(now)
        for hop in route.hops:
            self._sent.setdefault((hop.peer, hop.holding), []).append((one, hop.busy))
        return Ticket(one)

    def busy(self, place: Place, *, here: bool = False) -> int:
        """Sessions running or waiting there: as reported, corrected by what we know better.

        ``here``: the place is on this node, which knows its own load without delay.
        """
        load = place.node.load_of(place.holding)
        reported, reported_at = load.active + load.waiting, place.node.load_at
        counted_until = reported_at - (0.0 if here else REPORT_DELAY)
        open_now = change = 0
        shown: int | None = None  # how many of the uncertain ones the report still has to show
        for one, before in self._sent.get((place.node.peer, place.holding.id), ()):
            if one.ended is not None and one.ended <= reported_at:
                continue
            counted = one.at <= counted_until
            if counted_until < one.at <= reported_at:
                shown = reported - before if shown is None else shown
                counted = shown > 0
                shown -= counted
            if one.ended is None:
                open_now += 1
                change += not counted
            else:
                change -= counted
        # It is at least as busy as we keep it ourselves.
        return max(reported + change, open_now)


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
