"""A slow node is routed around, and used again when it recovers."""

from __future__ import annotations

import random

import pytest

from mesh.explain import Explanations, describe
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


def test_a_slow_stage_is_left_out_of_chains_until_it_is_forgiven(make_view):
    view = make_view(
        "ME",
        A=[{"last": 15, "decode": 0.01}],
        B=[{"first": 15, "decode": 0.01}],
        C=[{"first": 15, "decode": 0.012}],
    )
    slowness, explanations = Slowness(), Explanations()

    def ask(number, now, seconds):
        """One response, for which each stage computes so long per token."""
        facts = RequestFacts("m", 10, 100, slow=slowness.factors(now))
        route = choose(view, facts, rng=random.Random(number), in_flight=InFlight())
        response = f"r{number}"
        explanations.chosen(response, view, facts, route)
        explanations.completed(response, {"prefill": 0.1, "decode": 2.0}, 100)
        stages = tuple((h.peer, h.first, h.last, 100 * seconds[h.peer]) for h in route.hops)
        for peer, predicted, actual in explanations.work(response, stages):
            slowness.observed(peer, predicted, actual, now)
        return [hop.peer for hop in route.hops]

    fine = {"A": 0.01, "B": 0.01, "C": 0.012}
    assert ask(0, 0.0, fine) == ["A", "B"]
    ask(1, 1.0, {**fine, "B": 0.1})
    assert all(ask(n, float(n), fine) == ["A", "C"] for n in range(2, 30))
    assert ask(30, HALF_LIFE * 6, fine) == ["A", "B"]


def test_a_chain_that_was_lost_on_the_way_says_nothing_of_speed(make_view):
    view = make_view("ME", A=[{"last": 15}], B=[{"first": 15}])
    facts = RequestFacts("m", 10, 100)
    route = choose(view, facts, rng=random.Random(1), in_flight=InFlight())
    explanations = Explanations()
    for _ in range(2):
        explanations.chosen("r", view, facts, route)
    explanations.completed("r", {"prefill": 0.1, "decode": 2.0}, 100)
    assert explanations.work("r", (("A", 0, 15, 50.0), ("B", 15, 30, 50.0))) == []
    assert explanations.work("unknown", ()) == []


def test_an_explanation_has_predicted_and_actual_of_stages_and_hops(make_view):
    view = make_view(
        "ME", A={"holdings": [{"last": 15}], "rtt": 0.02}, B={"holdings": [{"first": 15}]}
    )
    facts = RequestFacts("m", 10, 100)
    route = choose(view, facts, rng=random.Random(1), in_flight=InFlight())
    explanations = Explanations()
    explanations.chosen("r", view, facts, route)
    assert describe(view, explanations.find("r"), {})["routes"][0]["stages"][0]["actual_ms"] is None
    explanations.completed("r", {"queue": 1.0, "prefill": 1.0, "decode": 4.0, "total": 6.0}, 100)
    told = describe(view, explanations.find("r"), {"A": (("A", 0, 15, 1.0), ("B", 15, 30, 2.0))})
    (chosen,) = told["routes"]
    assert [stage["actual_ms"] for stage in chosen["stages"]] == [1000.0, 2000.0]
    assert chosen["between_stages_actual_ms"] == 2000.0
    assert sum(s["onward_actual_ms"] for s in chosen["stages"]) * 100 == pytest.approx(2000.0)
    assert all(stage["onward_predicted_ms"] > 0 for stage in chosen["stages"])
    assert chosen["reason"] and chosen["considered"][0]["nodes"] == ["a", "b"]
