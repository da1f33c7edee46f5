"""Saying in time that a certificate ends. Pure."""

from __future__ import annotations

DAY = 86_400.0
MARKS = (7 * DAY, DAY, DAY / 24, 0.0)  # seconds before the end at which it is said


class EndNotices:
    """``ends`` is when the certificate does, in Unix seconds."""

    def __init__(self, ends: float) -> None:
        self._ends = ends
        self._passed = 0  # marks that have been spoken of

    def due(self, now: float) -> float | None:
        """Seconds left (less than 0 after the end) when it is time to say so, else None.

        Each mark is spoken of once; of several that have passed since, together.
        """
        left = self._ends - now
        passed = sum(left <= mark for mark in MARKS)
        if passed <= self._passed:
            return None
        self._passed = passed
        return left
