"""What this node has sent since a peer last said how busy it is.

Load reports are late by half a second and more. Without a correction, an entry node that gets many
requests at once would send all of them to the peer that was idle a moment ago.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh.gossip.view import Place
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
        kept = {key: [s for s in sent if _matters(s, now)] for key, sent in self._sent.items()}
        self._sent = {key: sent for key, sent in kept.items() if sent}
        sent = _Sent(now)
        for hop in route.hops:
            self._sent.setdefault((hop.peer, hop.holding), []).append(sent)
        return Ticket(sent)

    def busy(self, place: Place, *, here: bool = False) -> int:
        """Sessions running or waiting there: as reported, corrected by what we know better.

        ``here``: the place is on this node, which knows its own load without delay.
        """
        load = place.node.load_of(place.holding)
        reported = load.active + load.waiting
        counted_until = place.node.load_at - (0.0 if here else REPORT_DELAY)
        open_now = change = 0
        for one in self._sent.get((place.node.peer, place.holding.id), ()):
            if one.ended is None:
                open_now += 1
                change += one.at > counted_until
            elif one.at <= counted_until and one.ended > place.node.load_at:
                change -= 1
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
