"""Where requests go: best means best, and nobody stampedes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca.certificate import Role
from inference.errors import GenerationError
from mesh.routing import Chain, InFlight, Local, Replica, RequestFacts, choose

FACTS = RequestFacts(model="m", prompt_tokens=200, max_tokens=128)


def route(view, facts=FACTS, seed=0, in_flight=None):
    return choose(view, facts, rng=random.Random(seed), in_flight=in_flight or InFlight())


def burst(make_view, peers, count, entries=("E1", "E2", "E3"), seed=0):
    """``count`` requests from entry nodes that all see the same load, which stays as it is."""
    rng = random.Random(seed)
    views = {e: make_view(e, **peers) for e in entries}
    in_flight = {e: InFlight() for e in entries}
    went = Counter()
    for i in range(count):
        entry = entries[i % len(entries)]
        chosen = choose(views[entry], FACTS, rng=rng, in_flight=in_flight[entry])
        in_flight[entry].started(chosen, 101.0)
        went[chosen.peer] += 1
    return went


@settings(max_examples=30, deadline=None)
@given(replicas=st.integers(2, 4), seed=st.integers(0, 1 << 32), slots=st.integers(1, 32))
def test_200_requests_from_three_entry_nodes_do_not_stampede(make_view, replicas, seed, slots):
    peers = {f"R{i}": [{"slots": slots}] for i in range(replicas)}
    went = burst(make_view, peers, 200, seed=seed)
    fair = 200 / replicas
    assert len(went) == replicas
    assert max(went.values()) <= fair * 1.3
    assert min(went.values()) >= fair * 0.7


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 32), delays=st.lists(st.floats(0.0005, 0.02), min_size=4, max_size=4)
)
def test_small_differences_in_distance_do_not_stampede_either(make_view, seed, delays):
    peers = {f"R{i}": {"holdings": [{}], "rtt": rtt} for i, rtt in enumerate(delays)}
    went = burst(make_view, peers, 200, seed=seed)
    assert max(went.values()) <= 50 * 1.5


@settings(max_examples=50, deadline=None)
@given(active=st.integers(1, 40), seed=st.integers(0, 1 << 32), tokens=st.integers(16, 2000))
def test_of_a_busy_and_an_idle_replica_the_idle_one(make_view, active, seed, tokens):
    view = make_view("E", BUSY=[{"active": active}], IDLE=[{}])
    facts = RequestFacts(model="m", prompt_tokens=tokens, max_tokens=64)
    assert route(view, facts, seed).peer == "IDLE"


@settings(max_examples=30, deadline=None)
@given(ratio=st.sampled_from([1.5, 2.0, 3.0, 4.0]), seed=st.integers(0, 1 << 32))
def test_a_fast_and_a_slow_replica_share_in_proportion_to_their_speed(make_view, ratio, seed):
    peers = {
        "FAST": [{"slots": 4, "decode": 0.02, "prefill": 0.002}],
        "SLOW": [{"slots": 4, "decode": 0.02 * ratio, "prefill": 0.002 * ratio}],
    }
    went = burst(make_view, peers, 200, seed=seed)
    assert ratio * 0.8 <= went["FAST"] / went["SLOW"] <= ratio * 1.35


def test_one_request_at_a_time_goes_to_the_fast_one(make_view):
    view = make_view("E", FAST=[{"decode": 0.02}], SLOW=[{"decode": 0.06}])
    assert {route(view, seed=s).peer for s in range(20)} == {"FAST"}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_the_same_question_gets_the_same_answer(make_view, seed, data):
    loads = data.draw(st.lists(st.integers(0, 5), min_size=3, max_size=6))
    peers = {f"R{i}": [{"active": a}] for i, a in enumerate(loads)}
    peers["S1"] = [{"first": 0, "last": 10}]
    peers["S2"] = [{"first": 10, "last": 30}]
    peers["S3"] = [{"first": 10, "last": 30}]
    view = make_view("E", **peers)
    assert route(view, seed=seed) == route(view, seed=seed)


def test_the_entry_nodes_own_replica_is_taken_when_as_good_as_any(make_view):
    view = make_view("E", E=[{}], R=[{}])
    assert all(isinstance(route(view, seed=s), Local) for s in range(20))
    busy = make_view("E", E=[{"active": 3}], R=[{}])
    assert isinstance(route(busy), Replica)


def test_in_flight_requests_count_until_a_report_can_have_counted_them(make_view):
    view = make_view("E", A=[{}], B=[{}])  # loads received at 100.0
    in_flight = InFlight()
    first = route(view)
    ticket = in_flight.started(first, 100.5)
    assert route(view, in_flight=in_flight).peer != first.peer
    ticket.ended(101.0)
    chosen = {route(view, seed=s, in_flight=in_flight).peer for s in range(20)}
    assert chosen == {"A", "B"}


def test_a_request_that_the_report_counts_is_not_counted_twice(make_view):
    place = make_view("E", A=[{"active": 1}]).models[0].replicas[0]  # at 100.0
    in_flight = InFlight()
    ticket = in_flight.started(route(make_view("E", A=[{}])), 99.0)
    assert in_flight.busy(place) == 1
    ticket.ended(100.5)  # counted in the report, and over since
    assert in_flight.busy(place) == 0


@pytest.mark.parametrize(
    ("before", "sent", "reported", "busy"),
    [
        # When, and what the report of 100.0 says. It was made before the request came, or after.
        (0, (99.95,), 0, 1),
        (0, (99.95,), 1, 1),
        (1, (99.95,), 1, 2),
        (1, (99.95,), 2, 2),
        # Between the two, or after both; others have come and gone, too.
        (2, (99.92, 99.95), 3, 4),
        (2, (99.92, 99.95), 4, 4),
        (2, (99.92, 99.95), 7, 7),
        (2, (99.92, 99.95), 0, 2),
        # One was certainly in it, one certainly not.
        (0, (99.0, 99.95), 1, 2),
        (0, (99.95, 100.01), 1, 2),
    ],
)
def test_a_report_counts_what_was_sent_just_before_as_far_as_it_shows_more(
    make_view, before, sent, reported, busy
):
    in_flight = InFlight()
    for more, at in enumerate(sent):
        in_flight.started(route(make_view("E", A=[{"active": before + more}])), at)
    place = make_view("E", A=[{"active": reported}]).models[0].replicas[0]
    assert in_flight.busy(place) == busy
    # This node's own load is not late.
    assert in_flight.busy(place, here=True) == max(
        reported + sum(at > 100.0 for at in sent), len(sent)
    )


def test_what_ended_after_the_report_that_just_counted_it(make_view):
    in_flight = InFlight()
    ticket = in_flight.started(route(make_view("E", A=[{"active": 2}])), 99.95)
    place = make_view("E", A=[{"active": 3}]).models[0].replicas[0]
    assert in_flight.busy(place) == 3
    ticket.ended(100.5)
    assert in_flight.busy(place) == 2


def test_what_is_over_is_forgotten(make_view):
    chosen = route(make_view("E", A=[{}]))
    in_flight = InFlight()
    for i in range(1000):
        in_flight.started(chosen, float(i)).ended(i + 0.5)
    assert sum(len(sent) for sent in in_flight._sent.values()) < 50


@pytest.mark.parametrize(
    "unfit",
    [
        {"holdings": [{}], "suspect": True},
        {"holdings": [{}], "state": "draining"},
        {"holdings": [{}], "roles": (Role.USE,)},
        {"holdings": [{"ready": False}]},
        {"holdings": [{"digest": "cd" * 32, "model": "other"}]},
    ],
)
def test_who_may_not_be_used_is_not_used(make_view, unfit):
    view = make_view("E", BAD=unfit, SLOW=[{"decode": 0.5, "active": 8}])
    assert {route(view, seed=s).peer for s in range(10)} == {"SLOW"}
    with pytest.raises(GenerationError):
        route(make_view("E", BAD=unfit))


def test_excluded_peers_are_not_used_and_the_reason_says_so(make_view):
    view = make_view("E", A=[{}], B=[{"active": 5}])
    facts = RequestFacts(model="m", prompt_tokens=10, exclude=frozenset({"A"}))
    chosen = route(view, facts)
    assert chosen.peer == "B"
    assert chosen.passed_over[0].peer == "A"
    with pytest.raises(GenerationError) as caught:
        route(make_view("E", A=[{}]), facts)
    assert caught.value.code == "node_lost"


def test_an_unlinked_peer_costs_a_dial(make_view):
    view = make_view("E", FAR={"holdings": [{}], "rtt": None}, NEAR=[{}])
    facts = RequestFacts(model="m", prompt_tokens=10, max_tokens=8)
    assert {route(view, facts, s).peer for s in range(20)} == {"NEAR"}


def test_nobody_has_the_model(make_view):
    with pytest.raises(GenerationError) as caught:
        route(make_view("E", A=[{"model": "other"}]))
    assert caught.value.code == "model_not_found"


def test_full_queues_are_refused_before_work_starts(make_view):
    full = {"slots": 2, "queue": 3, "active": 2, "waiting": 3}
    with pytest.raises(GenerationError) as caught:
        route(make_view("E", A=[full], B=[full]))
    assert caught.value.code == "overloaded"
    assert 1.0 <= caught.value.retry_after <= 60.0
    assert route(make_view("E", A=[full], B=[{**full, "waiting": 2}])).peer == "B"


def test_a_model_that_still_loads_says_so(make_view):
    with pytest.raises(GenerationError, match="loading") as caught:
        route(make_view("E", A=[{"ready": False}]))
    assert caught.value.code == "overloaded"


def test_a_pinned_digest_is_kept(make_view):
    view = make_view("E", A=[{}], B=[{"digest": "cd" * 32, "active": 9}])
    facts = RequestFacts(model="m", prompt_tokens=10, digest="cd" * 32)
    assert route(view, facts).peer == "B"


def test_no_room_in_the_kv_cache_is_a_wait(make_view):
    view = make_view(
        "E", TIGHT=[{"active": 1, "free_kv": 10}], ROOMY=[{"active": 2, "free_kv": 9999}]
    )
    assert route(view).peer == "ROOMY"


def test_a_cached_prefix_attracts(make_view):
    view = make_view("E", A=[{"active": 1}], B=[{}])
    facts = RequestFacts(model="m", prompt_tokens=4000, max_tokens=16, cached={"A": 3900})
    assert route(view, facts).peer == "A"


def halves(decode=0.01, prefill=0.001, **more):
    return [
        {"first": 0, "last": 15, "decode": decode, "prefill": prefill, **more},
        {"first": 15, "last": 30, "decode": decode, "prefill": prefill, **more},
    ]


def test_a_chain_is_put_together_from_ready_stages(make_view):
    one, two = halves()
    chosen = route(make_view("E", A=[one], B=[two]))
    assert isinstance(chosen, Chain)
    assert [(h.peer, h.first, h.last) for h in chosen.hops] == [("A", 0, 15), ("B", 15, 30)]


@pytest.mark.parametrize("missing", [{"A": None}, {"B": None}])
def test_half_a_chain_is_no_chain(make_view, missing):
    one, two = halves()
    peers = {"A": [one], "B": [two]}
    del peers[next(iter(missing))]
    with pytest.raises(GenerationError) as caught:
        route(make_view("E", **peers))
    assert caught.value.code == "model_not_found"
    assert "complete chain" in caught.value.message


def test_ranges_that_only_overlap_do_not_make_a_chain(make_view):
    with pytest.raises(GenerationError):
        route(make_view("E", A=[{"first": 0, "last": 16}], B=[{"first": 15, "last": 30}]))


def test_a_replica_is_preferred_unless_the_chain_is_cheaper(make_view):
    one, two = halves(decode=0.0098)
    assert isinstance(route(make_view("E", A=[one], B=[two], R=[{}])), Replica)
    one, two = halves(decode=0.002)
    assert isinstance(route(make_view("E", A=[one], B=[two], R=[{}])), Chain)
    assert isinstance(
        route(make_view("E", A=[one], B=[two], R=[{"active": 0, "decode": 0.003}])), Replica
    )


def test_slow_links_make_a_chain_dear(make_view):
    one, two = halves(decode=0.008)
    far = {"A": {"holdings": [one], "rtt": 0.05}, "B": {"holdings": [two], "rtt": 0.05}}
    assert isinstance(route(make_view("E", **far, R=[{"active": 2}])), Replica)


def test_the_idle_holder_of_a_range_joins_the_chain(make_view):
    one, two = halves()
    view = make_view("E", A=[one], BUSY=[{**two, "active": 4}], IDLE=[two])
    assert all(route(view, seed=s).hops[1].peer == "IDLE" for s in range(20))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_chains_share_the_load_of_their_stages(make_view, seed):
    one, two = halves()
    view_peers = {"A1": [one], "A2": [one], "B1": [two], "B2": [two], "B3": [two]}
    entries = ("E1", "E2", "E3")
    rng = random.Random(seed)
    views = {e: make_view(e, **view_peers) for e in entries}
    in_flight = {e: InFlight() for e in entries}
    went = Counter()
    for i in range(180):
        entry = entries[i % 3]
        chosen = choose(views[entry], FACTS, rng=rng, in_flight=in_flight[entry])
        in_flight[entry].started(chosen, 101.0)
        went.update(hop.peer for hop in chosen.hops)
    assert all(70 <= went[p] <= 110 for p in ("A1", "A2"))
    assert all(45 <= went[p] <= 75 for p in ("B1", "B2", "B3"))


def test_many_entry_nodes_with_one_request_each_part_ways(make_view):
    one, two = halves()
    chains = make_view("E", A=[one], B1=[two], B2=[two], B3=[two])
    replicas = make_view("E", B1=[{}], B2=[{}], B3=[{}])
    for view in (chains, replicas):
        went = Counter(route(view, seed=s).hops[-1].peer for s in range(90))
        assert min(went[p] for p in ("B1", "B2", "B3")) >= 15


_STAGES = st.lists(
    st.tuples(st.integers(0, 29), st.integers(1, 30)).filter(lambda r: r[0] < r[1]),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100, deadline=None)
@given(ranges=_STAGES, seed=st.integers(0, 1 << 32))
def test_a_chain_covers_every_layer_once_and_is_found_when_there_is_one(make_view, ranges, seed):
    view = make_view(
        "E",
        **{f"S{i}": [{"first": a, "last": b, "kind": "stage"}] for i, (a, b) in enumerate(ranges)},
    )

    def reachable(layer):
        return layer == 30 or any(reachable(b) for a, b in ranges if a == layer)

    try:
        chosen = route(view, seed=seed)
    except GenerationError:
        assert not reachable(0)
        assert not view.can_use("m")
        return
    assert view.can_use("m")
    ends = [0, *(h.last for h in chosen.hops)]
    assert [h.first for h in chosen.hops] == ends[:-1]
    assert ends[-1] == 30


def test_explanations_name_the_alternatives(make_view):
    one, two = halves()
    view = make_view("E", A=[one], B=[two], R=[{}], S={"holdings": [{}], "suspect": True})
    chosen = route(view)
    assert {c.peers for c in chosen.considered} == {("R",), ("A", "B")}
    assert chosen.passed_over[0].why.startswith("suspect")
    assert chosen.reason
    assert chosen.cost.total == pytest.approx(
        chosen.cost.wait + chosen.cost.prefill + chosen.cost.decode + chosen.cost.link
    )
