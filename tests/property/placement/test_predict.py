"""What a prediction is made of: each part where it belongs, and counted once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.routing.placement.facts import Connection, Machine, ModelShape, Network, Speed, Want
from mesh.routing.placement.predict import CHUNK, HOP, STEP, VALUE_BYTES, predict

MODEL = ModelShape("m", "ab" * 32, 12, 1000, 500, 2000, 0, 16, 1024, 4096)  # head: two layers
WANT = Want(MODEL)


def chain(cuts, delay=0.0, bandwidth=1e12, decode=0.001, prefill=0.0001):
    """Stages at layers ``cuts`` on machines that are all alike."""
    peers = [f"P{number}" for number in range(len(cuts) - 1)]
    network = Network(dict.fromkeys(itertools.combinations(peers, 2), Connection(delay, bandwidth)))
    machines = [Machine(peer, 1 << 30, {MODEL.digest: Speed(prefill, decode)}) for peer in peers]
    ranges = itertools.pairwise(cuts)
    return [(m, *layers) for m, layers in zip(machines, ranges, strict=True)], network


def test_one_stage_has_its_layers_its_head_and_no_hop():
    stages, network = chain((0, 12))
    found = predict(WANT, stages, network, prompt=CHUNK, output=10)
    assert found.hops == ()
    assert found.step == pytest.approx(14 * 0.001 + STEP)
    assert found.first_token == pytest.approx(CHUNK * 12 * 0.0001 + STEP + 2 * 0.001)
    assert found.cost == pytest.approx(found.first_token + 10 * found.step)


@given(st.sampled_from([(0, 6, 12), (0, 4, 8, 12), (0, 1, 5, 9, 12)]), st.floats(0.0, 0.2))
def test_a_step_goes_once_around_the_ring(cuts, delay):
    """A link's delay is one way; the way back to the first stage counts like the others."""
    stages, network = chain(cuts, delay)
    near = predict(WANT, *chain(cuts))
    found = predict(WANT, stages, network)
    hops = len(cuts) - 1
    assert len(found.hops) == hops
    assert found.step - near.step == pytest.approx(hops * delay)
    assert near.step == pytest.approx(14 * 0.001 + hops * (STEP + HOP), rel=1e-3)
    assert found.tokens_per_second == pytest.approx(1 / found.step)


def test_activations_take_the_bandwidth_and_the_token_on_its_way_back_does_not():
    bandwidth = 1e6
    found = predict(WANT, *chain((0, 6, 12), bandwidth=bandwidth))
    row = MODEL.hidden * VALUE_BYTES / bandwidth
    assert found.hops == (pytest.approx(HOP + row), pytest.approx(HOP))


def test_chunks_of_a_prompt_overlap_and_the_slowest_stage_sets_the_pace():
    cuts = (0, 9, 12)
    one = predict(WANT, *chain(cuts), prompt=CHUNK)
    many = predict(WANT, *chain(cuts), prompt=10 * CHUNK)
    pace = 9 * CHUNK * 0.0001 + STEP
    assert many.first_token - one.first_token == pytest.approx(9 * pace)


def test_a_faster_network_or_machine_never_makes_it_slower():
    for cuts in ((0, 12), (0, 6, 12), (0, 4, 8, 12)):
        usual = predict(WANT, *chain(cuts, 0.01))
        for better in (
            chain(cuts, 0.001),
            chain(cuts, 0.01, decode=0.0005),
            chain(cuts, 0.01, prefill=0.00001),
        ):
            assert predict(WANT, *better).cost <= usual.cost
