"""How many layers each machine of a chain takes. Pure arithmetic, exact.

For given machines and ends of a chain its cost is a sum of what each layer costs where it is, plus
a share that only the slowest stage pays (prompts overlap across stages). With a bound on the
slowest stage the best split is simple: fill the cheapest machines first. So all bounds that matter
are walked through, from none downwards: each move takes one layer from the slowest stage to the
cheapest one that stays below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# More than any model has layers; a want that claims to have more must not keep a node busy.
_MOVES = 1024


@dataclass(frozen=True, slots=True)
class Seat:
    """One machine's place in a chain: what a layer costs there, what it adds to the stage's pace,
    and how many layers fit."""

    cost: float
    pace: float
    capacity: int


def split(
    seats: Sequence[Seat], layers: int, slowest_weight: float
) -> tuple[float, tuple[int, ...]] | None:
    """Layers for each seat, at least one, with the least
    ``sum(cost * n) + slowest_weight * max(pace * n)``; None when they do not fit.

    Returns that value and the numbers in order of ``seats``.
    """
    if len(seats) > layers or sum(seat.capacity for seat in seats) < layers:
        return None
    if min(seat.capacity for seat in seats) < 1:
        return None
    cheapest = sorted(range(len(seats)), key=lambda i: (seats[i].cost, seats[i].pace, i))
    counts = [1] * len(seats)
    left = layers - len(seats)
    for i in cheapest:
        take = min(left, seats[i].capacity - 1)
        counts[i] += take
        left -= take
    total = sum(seat.cost * n for seat, n in zip(seats, counts, strict=True))
    best: tuple[float, tuple[int, ...]] = math.inf, ()
    for _ in range(_MOVES):
        paces = [seat.pace * n for seat, n in zip(seats, counts, strict=True)]
        slowest = max(paces)
        value = total + slowest_weight * slowest
        # Equal cost: the more even split comes later in the walk and is the better one.
        if value <= best[0]:
            best = value, tuple(counts)
        source = max(range(len(seats)), key=lambda i: (paces[i], seats[i].cost, i))
        target = next(
            (
                i
                for i in cheapest
                if counts[i] < seats[i].capacity and paces[i] + seats[i].pace < slowest
            ),
            None,
        )
        if counts[source] == 1 or target is None:
            break
        counts[source] -= 1
        counts[target] += 1
        total += seats[target].cost - seats[source].cost
    return best
