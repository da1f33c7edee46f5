"""A slow node is routed around, and used again when it recovers."""

from __future__ import annotations

import random

from mesh.routing import InFlight, RequestFacts, choose
from mesh.routing.slowness import HALF_LIFE, MOST, Slowness


def test_one_that_takes_much_longer_is_stretched_and_forgiven():
    slowness = Slowness()
    slowness.observed("A", 1.0, 8.0, 0.0)
    slowness.observed("B", 1.0, 1.8, 0.0)  # noise
    assert slowness.factors(0.0) == {"A": 8.0}
    assert 4.0 < slowness.factors(HALF_LIFE)["A"] < 5.0
    assert slowness.factors(HALF_LIFE * 10) == {}
    slowness.observed("A", 1.0, 1e9, 0.0)
    assert slowness.factors(0.0)["A"] <= MOST
    for second in range(4):
        slowness.observed("A", 1.0, 1.0, float(second))
    assert slowness.factors(4.0).get("A", 1.0) < 3.0


def test_nonsense_is_ignored():
    slowness = Slowness()
    slowness.observed("A", 0.0, 5.0, 0.0)
    slowness.observed("A", 1.0, -5.0, 0.0)
    assert slowness.factors(0.0) == {}


def test_routes_avoid_it_until_it_is_forgiven(make_view):
    view = make_view("ME", A=[{"decode": 0.01}], B=[{"decode": 0.02}])
    slowness = Slowness()

    def chosen(now):
        facts = RequestFacts("m", 100, 100, slow=slowness.factors(now))
        return choose(view, facts, rng=random.Random(1), in_flight=InFlight()).peer

    assert chosen(0.0) == "A"
    slowness.observed("A", 1.0, 10.0, 0.0)
    assert chosen(1.0) == "B"
    assert chosen(HALF_LIFE * 5) == "A"
