"""When to ping a peer, and when to give it up. Pure: times are arguments, in seconds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

# The first round trips go while both sides have the link's opening to do, and what made it come up:
# they can take a hundred times as long as later ones. The least of these counts. So it is when one
# takes much longer than those before: the path stood still for a while, or is another one now.
SETTLING = 3
SURPRISE = 4  # times what is usual
NOTHING = 0.02  # s that are no surprise in any case


@dataclass(frozen=True)
class LivenessPolicy:
    """Intervals in seconds."""

    idle_ping: float = 25.0  # keeps NAT mappings, which the meanest routers drop after 30 s
    busy_ping: float = 1.0  # while an answer is awaited, or one-way messages come and go
    busy_silence: float = 10.0  # a peer silent for so long while busy is gone


class Liveness:
    """Pings of one link. ``busy`` says that calls are under way."""

    def __init__(self, policy: LivenessPolicy) -> None:
        self.rtt: float | None = None
        self._policy = policy
        self._tokens = itertools.count(1)
        self._quick = SETTLING  # pings that are still to go soon one after the other
        self._unsettled = SETTLING  # answers after which the least of them counts
        self._least = math.inf
        self._outstanding: dict[int, float] = {}
        self._last_ping = -math.inf
        self._busy_since: float | None = None
        self._carried_at = -math.inf

    def carried(self, now: float) -> bool:
        """A one-way message was sent or came: nobody awaits an answer, but how far the peer is
        matters now. True when that was not so before, so that a ping may be due."""
        begins = not self._carries(now)
        self._carried_at = now
        return begins

    def _carries(self, now: float) -> bool:
        return now - self._carried_at <= self._policy.busy_ping

    def _interval(self, now: float, busy: bool) -> float:
        often = busy or self._carries(now) or self._quick > 0
        return self._policy.busy_ping if often else self._policy.idle_ping

    def ping_due(self, now: float, *, busy: bool) -> int | None:
        """The token to send in a ping now, or None."""
        if not busy:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        if now < self._last_ping + self._interval(now, busy):
            return None
        self._last_ping = now
        token = next(self._tokens)
        self._quick = max(0, self._quick - 1)
        if len(self._outstanding) >= 16:
            self._outstanding.clear()
        self._outstanding[token] = now
        return token

    def answered(self, token: int, now: float) -> float | None:
        """A pong came. The seconds that it took; None for one that nobody waits for, or that says
        nothing of how far the peer is."""
        sent = self._outstanding.pop(token, None)
        if sent is None:
            return None
        sample = now - sent
        if self._unsettled:
            self._unsettled -= 1
            self._least = min(self._least, sample)
            if self.rtt is None or self._least < self.rtt or not self._unsettled:
                self.rtt = self._least
        elif _surprises(sample, self.rtt):
            self._quick = self._unsettled = SETTLING
            self._least = math.inf
        elif self.rtt is not None:
            self.rtt += (sample - self.rtt) / 8
        return None if _surprises(sample, self.rtt) else sample

    def is_dead(self, now: float, *, last_heard: float, busy: bool) -> bool:
        """Only a busy link is given up here: an idle one is the connection's to judge."""
        if not busy or self._busy_since is None:
            return False
        return now - max(last_heard, self._busy_since) >= self._policy.busy_silence

    def next_look(self, now: float, *, last_heard: float, busy: bool) -> float:
        """Seconds until :meth:`ping_due` or :meth:`is_dead` can have something to say."""
        wait = self._last_ping + self._interval(now, busy) - now
        if busy and self._busy_since is not None:
            dead_at = max(last_heard, self._busy_since) + self._policy.busy_silence
            wait = min(wait, dead_at - now)
        return max(wait, 0.0)


def _surprises(sample: float, usual: float | None) -> bool:
    return usual is not None and sample > SURPRISE * usual + NOTHING
