"""Noticing that a chain has gone silent. Pure: times are arguments, in seconds.

A broken link is told by the transport. A peer that hangs, or whose host is gone without a word, is
found by asking: when nothing has come back for ``QUIET`` seconds although rows are under way, every
stage is asked whether it is there, and has ``PATIENCE`` to answer. A stage answers while it
computes, so a slow one is never taken for a dead one; a pause of a second passes unnoticed.
"""

from __future__ import annotations

QUIET = 0.45
PATIENCE = 1.05
# All stages answer, none has rows of the chain, and still nothing comes: a frame has been lost. Not
# sooner, because a slow link may be carrying it.
STUCK = 15.0


class Watch:
    """The silence of one chain."""

    def __init__(self, now: float) -> None:
        self._heard = now  # last sign of progress
        self._asked = now
        self._idle_since: float | None = None

    def heard(self, now: float) -> None:
        """Something has come back from the chain."""
        self._heard = now
        self._idle_since = None

    def ask_in(self, now: float) -> float:
        """Seconds until the stages are to be asked, 0 or less: now."""
        return max(self._heard, self._asked) + QUIET - now

    def answered(self, asked_at: float, now: float, *, busy: bool) -> bool:
        """All stages have answered what was asked at ``asked_at``. True: the chain is stuck."""
        self._asked = now
        if busy or self._heard >= asked_at:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = asked_at
        return now - self._idle_since >= STUCK
