"""Over how many steps the sessions that generate are spread: as many as pay, by measurement. Pure.

With several steps under way every stage of a chain can compute at the same time, but each step has
fewer sessions, and a step costs a stage nearly as much for four sessions as for one. Which weighs
more depends on the machines: stages that share processors gain nothing from computing at once. So
the choices are tried, each for a few steps, and the one that gave most tokens per second stays.
Now and then another is tried again, because neighbours and clocks change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SETTLE = 2  # steps for each that is under way, before a choice is measured: the ring fills
WINDOW = 16  # steps that are measured
KEEP = 24  # windows with the best choice between two trials of another


@dataclass(slots=True)
class _Band:
    """What is known about one number of sessions, roughly."""

    rates: dict[int, float] = field(default_factory=dict)  # tokens per second by choice
    chosen: int = 0
    kept: int = 0  # windows since another choice was tried
    trials: int = 0


class Overlap:
    """Choices for one chain. Numbers of sessions up to the next power of two are alike."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band] = {}
        self._measured: tuple[int, int] = (0, 0)  # band and choice
        self._steps = 0
        self._tokens = 0
        self._since = 0.0

    def choose(self, sessions: int, most: int) -> int:
        """Steps to have under way for ``sessions`` that generate, of 1 to ``most``."""
        band = self._bands.setdefault(sessions.bit_length(), _Band())
        if not band.chosen:
            band.chosen = most
        return min(band.chosen, most)

    def disturbed(self) -> None:
        """Something else than generating has taken time: begin to measure anew."""
        self._measured = (0, 0)

    def stepped(self, sessions: int, most: int, tokens: int, now: float) -> None:
        """A step has come back at ``now``, in seconds, with ``tokens`` of them."""
        choice = self.choose(sessions, most)
        measured = sessions.bit_length(), choice
        if measured != self._measured:
            self._measured = measured
            self._steps = -SETTLE * choice
        self._steps += 1
        if self._steps <= 0:
            self._since, self._tokens = now, 0
            return
        self._tokens += tokens
        if self._steps >= WINDOW and now > self._since:
            self._decide(self._bands[measured[0]], choice, most, self._tokens / (now - self._since))
            self._steps, self._tokens, self._since = 0, 0, now

    def _decide(self, band: _Band, choice: int, most: int, rate: float) -> None:
        band.rates[choice] = rate
        choices = range(most, 0, -1)
        untried = next((each for each in choices if each not in band.rates), None)
        best = max((each for each in choices if each in band.rates), key=band.rates.__getitem__)
        band.kept = band.kept + 1 if choice == best else 0
        if untried is not None:
            band.chosen = untried
        elif most > 1 and band.kept >= KEEP:
            others = [each for each in choices if each != best]
            band.chosen = others[band.trials % len(others)]
            band.trials += 1
            band.kept = 0
        else:
            band.chosen = best
