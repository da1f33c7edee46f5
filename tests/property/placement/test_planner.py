"""The planner against what must hold of every plan, and against trying everything."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.routing.placement.chains import capacity
from mesh.routing.placement.facts import (
    WORKSPACE,
    Connection,
    Machine,
    ModelShape,
    Network,
    Speed,
    Want,
)
from mesh.routing.placement.plan import make_plan
from mesh.routing.placement.predict import predict
from mesh.routing.placement.ranges import Seat, split
from mesh.routing.placement.search import find_chains

MB = 1 << 20


def shape(layers=6, **changes):
    fields = {
        "name": "m",
        "digest": "ab" * 32,
        "layers": layers,
        "layer_bytes": 10 * MB,
        "embedding_bytes": 15 * MB,
        "head_bytes": 15 * MB,
        "shared_bytes": 15 * MB,
        "kv_bytes": 512,
        "hidden": 1024,
        "context_length": 4096,
        **changes,
    }
    return ModelShape(**fields)


def machine(peer, layers, *, decode=0.001, prefill=0.0001, want=None, busy=0.0, stored=()):
    """A machine with room for about so many layers of :func:`shape` besides one of its ends."""
    want = want or Want(shape(), context=1024, sessions=1)
    model = want.model
    layer = model.layer_bytes + model.kv_bytes * want.context * want.sessions
    memory = WORKSPACE + max(model.head_bytes, model.embedding_bytes) + layers * layer
    speeds = {model.digest: Speed(prefill, decode)}
    return Machine(peer, memory, speeds, busy=busy, stored=frozenset(stored))


def network(machines, delay=0.001):
    pairs = itertools.combinations([m.peer for m in machines], 2)
    return Network({pair: Connection(delay, 100e6) for pair in pairs})


@st.composite
def meshes(draw, least=1, most=4, layers=6):
    """(want, machines, network)"""
    head = draw(st.sampled_from([1, 15, 40])) * MB
    shared = min(head, draw(st.sampled_from([0, 15])) * MB)
    model = shape(layers, head_bytes=head, shared_bytes=shared)
    want = Want(model, replicas=1, context=1024, sessions=draw(st.integers(1, 3)))
    machines = [
        replace(
            machine(
                f"P{number}",
                draw(st.integers(0, layers + 2)),
                decode=draw(st.sampled_from([0.0005, 0.001, 0.002, 0.01])),
                prefill=draw(st.sampled_from([0.00002, 0.0001, 0.0004])),
                want=want,
                busy=draw(st.sampled_from([0.0, 0.0, 0.5])),
            ),
            fixed=draw(st.sampled_from([False, False, False, True])),
        )
        for number in range(draw(st.integers(least, most)))
    ]
    pairs = itertools.combinations([m.peer for m in machines], 2)
    delays = {
        pair: Connection(draw(st.sampled_from([0.0002, 0.002, 0.02])), 50e6)
        for pair in pairs
        if draw(st.integers(0, 5))
    }
    return want, machines, Network(delays)


def all_chains(want, machines, net, size):
    """The cost of every possible chain of ``size`` machines, with the machines."""
    layers = want.model.layers
    for group in itertools.permutations(machines, size):
        rooms = [capacity(want, m, first=i == 0, last=i == size - 1) for i, m in enumerate(group)]
        for cuts in itertools.combinations(range(1, layers), size - 1):
            bounds = [0, *cuts, layers]
            if any(b - a > room for a, b, room in zip(bounds, bounds[1:], rooms, strict=False)):
                continue
            stages = list(zip(group, bounds, bounds[1:], strict=False))
            yield predict(want, stages, net), frozenset(m.peer for m in group)


def best_by_hand(want, machines, net, size):
    """The least cost of a chain of ``size`` machines, or None."""
    found = all_chains(want, machines, net, size)
    return min((prediction.cost for prediction, _ in found), default=None)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4
    ),
    st.integers(1, 12),
    st.integers(0, 20),
)
def test_the_split_of_layers_is_the_best_one(spec, layers, weight):
    seats = [Seat(float(cost), float(pace), room) for cost, pace, room in spec]
    possible = [
        sum(s.cost * n for s, n in zip(seats, counts, strict=True))
        + weight * max(s.pace * n for s, n in zip(seats, counts, strict=True))
        for counts in itertools.product(*(range(1, s.capacity + 1) for s in seats))
        if sum(counts) == layers
    ]
    found = split(seats, layers, float(weight))
    if not possible:
        assert found is None
        return
    value, counts = found
    assert sum(counts) == layers
    assert all(1 <= n <= s.capacity for s, n in zip(seats, counts, strict=True))
    assert value == pytest.approx(min(possible))


def check(plan, machines):
    """What holds of any plan."""
    taken = dict.fromkeys((m.peer for m in machines), 0)
    by_peer = {m.peer: m for m in machines}
    for model in plan.models:
        want = model.want
        for chain in model.chains:
            bounds = [(s.first, s.last) for s in chain.stages]
            assert bounds[0][0] == 0 and bounds[-1][1] == want.model.layers
            assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
            assert all(first < last for first, last in bounds)
            assert len(set(chain.peers)) == len(chain.peers)
        holders = [stage.peer for stage in model.stages]
        assert len(set(holders)) == len(holders), "a node holds two stages of one model"
        ranges = {(s.first, s.last) for chain in model.chains for s in chain.stages}
        for stage in model.stages:
            assert stage.bytes == by_peer[stage.peer].bytes_of(want, stage.first, stage.last)
            taken[stage.peer] += stage.bytes
        assert all((s.first, s.last) in ranges for s in model.spares)
        if want.replicas is not None:
            assert len(model.chains) <= want.replicas
        if want.max_nodes is not None:
            assert len(holders) <= want.max_nodes
        if not model.chains:
            assert model.notes or want.replicas == 0
    for m in machines:
        assert taken[m.peer] <= m.memory or taken[m.peer] == 0


@given(meshes(most=6), st.sampled_from([None, 1, 2, 3]), st.sampled_from([None, 2, 4]))
@settings(max_examples=150, deadline=None)
def test_plans_cover_every_layer_once_and_fit(mesh, replicas, most):
    want, machines, net = mesh
    want = replace(want, replicas=replicas, max_nodes=most)
    check(make_plan([want], machines, net), machines)


@given(meshes(most=6, layers=5), meshes(most=1, layers=4), st.sampled_from([None, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_models_share_machines_without_taking_each_others_memory(mesh, other, replicas):
    want, machines, net = mesh
    second = replace(
        other[0], model=replace(other[0].model, name="n", digest="cd" * 32), replicas=replicas
    )
    plan = make_plan([second, want], machines, net)
    check(plan, machines)
    assert [model.want.model.name for model in plan.models] == ["m", "n"]


@given(meshes(most=6), st.randoms(use_true_random=False), st.sampled_from([None, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_the_same_view_gives_the_same_plan_in_any_order(mesh, rng, replicas):
    want, machines, net = mesh
    want = replace(want, replicas=replicas)
    shuffled = machines[:]
    rng.shuffle(shuffled)
    assert make_plan([want], machines, net) == make_plan([want], shuffled, net)


@given(meshes(most=4))
@settings(max_examples=120, deadline=None)
def test_one_chain_has_the_fewest_stages_and_of_those_the_least_cost(mesh):
    want, machines, net = mesh
    found = find_chains(want, machines, net)
    for size in range(1, len(machines) + 1):
        best = best_by_hand(want, machines, net, size)
        if best is not None:
            assert len(found.chains[0].stages) == size
            assert found.chains[0].prediction.cost == pytest.approx(best)
            return
    assert not found.chains


def packings(sets):
    """All ways to take disjoint ones of (peers, cost)."""
    if not sets:
        yield ()
        return
    (peers, cost), rest = sets[0], sets[1:]
    yield from packings(rest)
    for more in packings([entry for entry in rest if not entry[0] & peers]):
        yield ((peers, cost), *more)


@given(meshes(least=2, most=5, layers=4))
@settings(max_examples=60, deadline=None)
def test_several_chains_are_the_most_then_the_fewest_stages_then_the_fastest(mesh):
    want, machines, net = mesh
    want = replace(want, replicas=None)
    best: dict[frozenset[str], float] = {}
    slowest_allowed = min(
        (p.cost for p, peers in all_chains(want, machines, net, 1)), default=float("inf")
    )
    step_allowed = min(
        ((p.cost, p.step) for p, peers in all_chains(want, machines, net, 1)),
        default=(0.0, float("inf")),
    )[1]
    minimal: list[frozenset[str]] = []
    for size in range(1, len(machines) + 1):
        fresh = {}
        for prediction, peers in all_chains(want, machines, net, size):
            if any(smaller < peers for smaller in minimal):
                continue
            known = fresh.get(peers)
            if known is None or prediction.cost < known.cost:
                fresh[peers] = prediction
        minimal += list(fresh)
        for peers, prediction in fresh.items():
            if size == 1 or (
                prediction.cost <= slowest_allowed and prediction.step <= step_allowed
            ):
                best[peers] = prediction.cost
    expected = min(
        (-len(p), sum(len(peers) for peers, _ in p), sum(cost for _, cost in p))
        for p in packings(sorted(best.items(), key=lambda e: sorted(e[0])))
    )
    found = find_chains(want, machines, net)
    assert found.order[:2] == expected[:2]
    assert found.order[2] == pytest.approx(expected[2])


def test_a_chain_that_is_slower_than_one_machine_is_not_made_and_the_plan_says_so():
    want = Want(shape(), context=1024, sessions=1)
    machines = [
        machine("A", 8, decode=0.001),
        machine("B", 4, decode=0.003),
        machine("C", 4, decode=0.003),
    ]
    model = make_plan([want], machines, network(machines)).models[0]
    assert [chain.peers for chain in model.chains] == [("A",)]
    assert "A alone is faster" in model.notes[0]
    fast = [machines[0], machine("B", 4, decode=0.0001), machine("C", 4, decode=0.0001)]
    model = make_plan([want], fast, network(fast, delay=0.0)).models[0]
    assert {chain.peers for chain in model.chains} >= {("A",)} and len(model.chains) == 2


def test_two_short_chains_are_made_rather_than_a_long_one():
    want = Want(shape(), context=1024, sessions=1)
    machines = [machine(f"P{i}", 3) for i in range(4)]
    model = make_plan([want], machines, network(machines)).models[0]
    assert [len(chain.stages) for chain in model.chains] == [2, 2]


def test_roomy_machines_are_not_put_together_when_that_costs_a_chain():
    want = Want(shape(), context=1024, sessions=1)
    machines = [
        machine("A", 5, decode=0.0005), machine("B", 5, decode=0.0005),
        machine("C", 2), machine("D", 2),
    ]  # fmt: skip
    model = make_plan([want], machines, network(machines)).models[0]
    assert len(model.chains) == 2


def test_a_machine_that_is_left_over_holds_the_stage_with_the_fewest_copies():
    want = Want(shape(), context=1024, sessions=1)
    machines = [machine(f"P{i}", 3) for i in range(3)]
    model = make_plan([want], machines, network(machines)).models[0]
    assert len(model.chains) == 1 and len(model.spares) == 1
    one = make_plan([replace(want, replicas=1)], machines, network(machines)).models[0]
    assert not one.spares


def test_layers_need_not_divide_and_the_head_takes_its_share():
    model = shape(layers=7, head_bytes=30 * MB, shared_bytes=0)
    want = Want(model, replicas=1, context=1024, sessions=1)
    machines = [machine("A", 9, want=want), machine("B", 9, want=want)]
    small = [replace(m, memory=m.memory - 40 * MB) for m in machines]  # neither holds all
    chain = make_plan([want], small, network(small)).models[0].chains[0]
    counts = [s.last - s.first for s in chain.stages]
    assert sorted(counts) == [2, 5] or sorted(counts) == [3, 4]
    capacities = [
        capacity(want, small[0], first=True, last=False),
        capacity(want, small[0], first=False, last=True),
    ]
    assert capacities[0] > capacities[1]


def test_a_device_of_fixed_shapes_needs_the_weights_twice():
    """It has one compiled model for prompts and one for single rows."""
    want = Want(shape(), replicas=1, context=1024, sessions=1)
    model = want.model
    kv = model.kv_bytes * want.context
    once = model.weights(0, 6) + 6 * kv + WORKSPACE
    usual, npu = Machine("A", once), Machine("A", once, fixed=True)
    assert usual.bytes_of(want, 0, 6) == once
    # Each model also gives the KV of a session back, in memory of its own.
    assert npu.bytes_of(want, 0, 6) == once + model.weights(0, 6) + 2 * 6 * kv
    assert capacity(want, usual, first=True, last=True) == 6
    assert capacity(want, npu, first=True, last=True) < 3
    for first, last in itertools.combinations(range(7), 2):
        ends = {"first": first == 0, "last": last == 6}
        exact = replace(npu, memory=npu.bytes_of(want, first, last))
        assert capacity(want, exact, **ends) == last - first
        assert capacity(want, replace(exact, memory=exact.memory - 1), **ends) < last - first
    assert make_plan([want], [usual], network([usual])).models[0].chains
    assert not make_plan([want], [npu], network([npu])).models[0].chains


def test_what_does_not_fit_is_said_with_numbers():
    want = Want(shape(), context=1024, sessions=1)
    machines = [machine("A", 1), machine("B", 1)]
    model = make_plan([want], machines, network(machines)).models[0]
    assert not model.chains
    assert "does not fit" in model.notes[0] and "MB" in model.notes[0]


def test_machines_far_away_are_avoided():
    want = Want(shape(), replicas=1, context=1024, sessions=1)
    machines = [machine(p, 4) for p in "ABCD"]
    net = Network(
        {
            ("A", "B"): Connection(0.05, 1e8),
            ("A", "C"): Connection(0.05, 1e8),
            ("A", "D"): Connection(0.05, 1e8),
            ("B", "C"): Connection(0.03, 1e8),
            ("B", "D"): Connection(0.001, 1e8),
            ("C", "D"): Connection(0.03, 1e8),
        }
    )
    chain = make_plan([want], machines, net).models[0].chains[0]
    assert set(chain.peers) == {"B", "D"}


def random_mesh(rng, count, layers=12):
    want = Want(shape(layers), replicas=1, context=1024, sessions=1)
    machines = [
        machine(
            f"P{i:04}",
            rng.randint(1, layers // 2),
            decode=rng.choice([0.0005, 0.001, 0.002, 0.004]),
            prefill=rng.choice([0.00005, 0.0001, 0.0002]),
            want=want,
        )
        for i in range(count)
    ]
    sites = [rng.randrange(3) for _ in machines]
    delays = {}
    for i, j in itertools.combinations(range(count), 2):
        near = sites[i] == sites[j]
        delay = rng.uniform(0.0002, 0.002) if near else rng.uniform(0.005, 0.03)
        delays[machines[i].peer, machines[j].peer] = Connection(delay, 1e8 if near else 1e7)
    return want, machines, Network(delays)


@pytest.mark.slow
def test_the_heuristic_is_within_a_tenth_of_the_best():
    """One chain and several, on meshes that are small enough to try everything."""
    worst = 1.0
    for seed in range(30):
        rng = random.Random(seed)
        want, machines, net = random_mesh(rng, rng.choice([6, 8, 9, 10]))
        for replicas in (1, None):
            wanted = replace(want, replicas=replicas)
            exact = find_chains(wanted, machines, net, exact=10)
            quick = find_chains(wanted, machines, net, exact=0)
            assert quick.order[:2] == exact.order[:2]
            if exact.chains:
                worst = max(worst, quick.order[2] / exact.order[2])
    print(f"heuristic: at most {worst - 1:.1%} more seconds than the best layout")
    assert worst <= 1.1


def test_a_large_mesh_is_planned_in_moderate_time():
    rng = random.Random(1)
    want = Want(shape(12), replicas=2, context=1024, sessions=1)
    machines = [
        machine(f"P{i:04}", rng.randint(1, 8), decode=rng.choice([0.0005, 0.002]), want=want)
        for i in range(400)
    ]
    plan = make_plan([want], machines, Network({}))
    check(plan, machines)
    assert len(plan.models[0].chains) == 2
    assert all(len(chain.stages) == 2 for chain in plan.models[0].chains)


def test_prediction_counts_head_hops_and_chunks():
    model = shape(layers=2, head_bytes=20 * MB, shared_bytes=0)
    want = Want(model, context=1024, sessions=1)
    a = machine("A", 4, decode=0.01, prefill=0.001, want=want)
    b = machine("B", 4, decode=0.02, prefill=0.002, want=want)
    whole = predict(want, [(a, 0, 2)], Network({}), prompt=64)
    assert whole.step == pytest.approx(2 * 0.01 + 2 * 0.01, abs=0.002)
    chain = predict(
        want, [(a, 0, 1), (b, 1, 2)], Network({("A", "B"): Connection(0.05, 1e9)}), prompt=64
    )
    assert chain.step == pytest.approx(0.01 + 0.02 + 2 * 0.02 + 2 * 0.05, abs=0.006)
    longer = predict(
        want, [(a, 0, 1), (b, 1, 2)], Network({("A", "B"): Connection(0.05, 1e9)}), prompt=640
    )
    # Nine more chunks at the pace of the slower stage.
    assert longer.first_token - chain.first_token == pytest.approx(9 * 64 * 0.002, rel=0.02)


def test_a_machine_that_has_measured_nothing_is_estimated_by_its_rates():
    want = Want(shape(), context=1024, sessions=1)
    slow = Machine("A", 1 << 30, decode_rate=1e9)
    assert slow.speed(want.model).decode == pytest.approx(want.model.layer_bytes / 1e9)
    assert replace(slow, busy=0.5).speed(want.model).decode == pytest.approx(
        2 * want.model.layer_bytes / 1e9
    )
