"""What a view says of models, chains and capacity."""

from __future__ import annotations

import random
from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st

from ca.certificate import Role
from mesh.gossip.view import count_chains


def test_models_by_digest_with_who_has_them(make_view):
    view = make_view(
        "E",
        A=[{}],
        B=[{"digest": "cd" * 32}, {"model": "n", "ready": False}],
        C=[{"first": 0, "last": 10}, {"first": 10, "last": 30, "ready": False}],
        D=[{"first": 10, "last": 30}],
    )
    assert [(m.name, m.digest[:2], len(m.replicas), m.chains, m.loading) for m in view.models] == [
        ("m", "ab", 1, 1, 1),
        ("m", "cd", 1, 0, 0),
        ("n", "ab", 0, 0, 1),
    ]
    assert view.can_use("m")
    assert not view.can_use("n")
    assert not view.can_use("nothing")


def test_capacity_counts_only_with_the_role_and_while_up_and_alive(make_view):
    view = make_view(
        "E",
        USER={"holdings": [{"active": 3}], "roles": (Role.USE,)},
        DRAINING={"holdings": [{}], "state": "draining"},
        SUSPECT={"holdings": [{}], "suspect": True},
    )
    assert view.models == ()
    assert view.nodes["USER"].holdings == ()
    assert view.nodes["USER"].load == {}
    assert {n.peer for n in view.alive} == {"USER", "DRAINING"}


RANGES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda r: r[0] < r[1]), max_size=8
)


@settings(max_examples=200, deadline=None)
@given(ranges=RANGES)
def test_as_many_chains_as_can_stand_side_by_side(make_view, ranges):
    """Against a search of everything."""
    peers = {
        f"S{i}": [{"first": a * 5, "last": b * 5, "kind": "stage"}]
        for i, (a, b) in enumerate(ranges)
    }
    view = make_view("E", **peers)

    @lru_cache(None)
    def most(left):
        best = 0
        for chain in chains(left, 0):
            best = max(best, 1 + most(tuple(i for i in left if i not in chain)))
        return best

    def chains(left, layer):
        if layer == 6:
            yield frozenset()
            return
        for i in left:
            if ranges[i][0] == layer:
                for rest in chains(left, ranges[i][1]):
                    yield frozenset({i}) | rest

    expected = most(tuple(range(len(ranges))))
    stages = view.models[0].stages if view.models else ()
    assert count_chains(stages, 30) == expected
    assert (view.models[0].chains if view.models else 0) == expected


def test_a_stage_that_stands_in_the_way_of_two_chains_is_given_up(make_view):
    """Kept, 0-5-20-30 leaves no way for another; 0-5-25-30 and 0-10-20-30 are two."""
    ranges = [(0, 5), (5, 20), (20, 30), (0, 10), (10, 20), (5, 25), (25, 30)]
    for seed in range(60):
        order = random.Random(seed).sample(ranges, len(ranges))
        peers = {f"S{i}": [{"first": a, "last": b}] for i, (a, b) in enumerate(order)}
        assert make_view("E", **peers).models[0].chains == 2
