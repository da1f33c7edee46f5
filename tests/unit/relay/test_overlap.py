"""As many steps under way as give most tokens per second, whatever the machines are like."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mesh.relay.overlap import KEEP, WINDOW, Overlap

SESSIONS, MOST = 16, 4


def run(
    overlap: Overlap, rate: Callable[[int], float], steps: int, now: float = 0.0
) -> tuple[list[int], float]:
    """The choice before each step, on a chain that gives ``rate(choice)`` tokens per second."""
    chosen = []
    for _ in range(steps):
        choice = overlap.choose(SESSIONS, MOST)
        chosen.append(choice)
        tokens = SESSIONS // choice
        now += tokens / rate(choice)
        overlap.stepped(SESSIONS, MOST, tokens, now)
    return chosen, now


ENOUGH = 4 * (WINDOW + 8)  # steps to have tried all


@pytest.mark.parametrize("best", [1, 2, 3, 4])
def test_the_choice_that_gives_most_is_found_and_kept(best: int) -> None:
    overlap = Overlap()

    def rate(choice: int) -> float:
        return 200.0 - 30 * abs(choice - best)

    _, now = run(overlap, rate, ENOUGH)
    chosen, _ = run(overlap, rate, 40 * KEEP * WINDOW, now)
    assert chosen[0] == best
    assert chosen.count(best) > 0.9 * len(chosen)
    assert set(chosen) == {1, 2, 3, 4}  # now and then another one is tried


def test_it_follows_when_the_machines_change() -> None:
    overlap = Overlap()
    _, now = run(overlap, lambda choice: 100.0 * choice, ENOUGH)
    assert overlap.choose(SESSIONS, MOST) == 4
    _, now = run(overlap, lambda choice: 100.0 / choice, 4 * KEEP * (WINDOW + 8), now)
    chosen, _ = run(overlap, lambda choice: 100.0 / choice, 1000, now)
    assert chosen.count(1) > 900


def test_numbers_of_sessions_are_told_apart_and_bounds_hold() -> None:
    overlap = Overlap()
    run(overlap, lambda choice: 100.0 / choice, ENOUGH)
    assert overlap.choose(SESSIONS, MOST) == 1
    assert overlap.choose(40, 5) == 5  # nothing is known of so many
    assert overlap.choose(8, 2) == 2
    assert overlap.choose(40, 3) == 3


def test_what_is_disturbed_is_not_measured() -> None:
    overlap = Overlap()
    for step in range(500):
        overlap.stepped(SESSIONS, MOST, 4, float(step))
        if step % WINDOW == 0:
            overlap.disturbed()
    assert overlap.choose(SESSIONS, MOST) == MOST
