"""How long to wait before the next attempt. Pure: randomness is an argument."""

from __future__ import annotations

from random import Random


class Backoff:
    """Doubles from ``first`` to ``longest`` seconds; each wait is spread by a quarter either way,
    so that nodes that lost the same peer do not all dial in the same moment."""

    def __init__(self, rng: Random, *, first: float = 0.25, longest: float = 60.0) -> None:
        self._rng = rng
        self._first = first
        self._longest = longest
        self._next = first

    def failed(self) -> float:
        """Seconds to wait now."""
        wait, self._next = self._next, min(self._next * 2, self._longest)
        return wait * self._rng.uniform(0.75, 1.25)

    def refused(self) -> float:
        """Seconds to wait after a refusal that will not go away by itself soon."""
        self._next = self._longest
        return self.failed()

    def succeeded(self) -> None:
        self._next = self._first
