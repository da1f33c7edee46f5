"""Sampling against a slow reference, and the rules that resuming and batching rest on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.generation import SamplingParams
from inference.sampling import Sampled, Sampler, SamplingError, filtered, sample, uniform


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    size = draw(st.integers(2, 1500))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    row = rng.normal(0, draw(st.sampled_from([0.1, 1.0, 5.0, 30.0])), size).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row)  # many ties
    return row


params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.001, 2.0)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    top_k=st.one_of(st.just(0), st.integers(1, 2000)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    logit_bias=st.dictionaries(st.integers(0, 1), st.floats(-100, 100), max_size=2),
    seed=st.integers(0, (1 << 63) - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


def one(row: np.ndarray[Any, Any], sampler: Sampler, position: int) -> Sampled:
    (drawn,) = sample(row[None], [sampler], [position])
    assert isinstance(drawn, Sampled)
    return drawn


@given(st.lists(st.tuples(params, st.integers(0, 1 << 20)), min_size=2, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_a_draw_does_not_depend_on_the_batch(
    asked: list[tuple[SamplingParams, int]], data: st.DataObject
) -> None:
    first = data.draw(rows())
    rng = np.random.default_rng(len(first))
    logits = np.stack([first, *(rng.permutation(first) for _ in asked[1:])])
    samplers = [Sampler(p, [0, 1]) for p, _ in asked]
    for sampler in samplers:
        sampler.count(1)
    positions = [position for _, position in asked]
    together = sample(logits, samplers, positions)
    alone = [one(row, s, n) for row, s, n in zip(logits, samplers, positions, strict=True)]
    assert together == alone
    order = list(range(len(asked)))[::-1]
    turned = sample(logits[order], [samplers[i] for i in order], [positions[i] for i in order])
    assert [turned[i] for i in order] == alone


@given(rows(), params, st.integers(0, 1 << 40))
@settings(max_examples=150, deadline=None)
def test_drawn_token_passes_every_filter(
    row: np.ndarray[Any, Any], asked: SamplingParams, position: int
) -> None:
    sampler = Sampler(asked, [0])
    before = row.copy()
    drawn = one(row, sampler, position)
    assert (row == before).all()  # the model's logits are not changed
    adjusted = sampler.adjust(row).astype(np.float64)
    if sampler.greedy:
        assert drawn.token_id == int(np.argmax(sampler.adjust(row)))
        return
    scaled = np.exp((adjusted - adjusted.max()) / asked.temperature)
    rank = int((scaled > scaled[drawn.token_id] * (1 + 1e-5)).sum())
    if asked.top_k:
        assert rank < asked.top_k
    if asked.min_p:
        assert scaled[drawn.token_id] >= asked.min_p * (1 - 1e-4)
    if asked.top_p < 1 and not asked.top_k:
        better = scaled[scaled > scaled[drawn.token_id] * (1 + 1e-5)].sum()
        assert better <= asked.top_p * scaled.sum() * (1 + 1e-4)


@given(rows(), st.floats(0.05, 1.0), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_filters_keep_what_the_definition_says(
    row: np.ndarray[Any, Any], top_p: float, top_k: int
) -> None:
    ids, weights = filtered(row, SamplingParams(top_k=top_k))
    threshold = np.sort(np.exp(row - row.max()))[::-1][min(top_k, len(row)) - 1]
    assert (ids == np.flatnonzero(np.exp(row - row.max()) >= threshold)).all()
    ids, weights = filtered(row, SamplingParams(top_p=top_p))
    everything = np.exp((row - row.max()).astype(np.float64))
    total = everything.sum()
    assert weights.sum(dtype=np.float64) >= top_p * total * (1 - 1e-5)
    smaller = everything[ids][everything[ids] > everything[ids].min() * (1 + 1e-6)]
    assert smaller.sum() <= top_p * total * (1 + 1e-5)  # no smaller set would do


@given(st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 40))
def test_uniform_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0 <= u < 1
    assert u == uniform(seed, position)
    assert u != uniform(seed, position + 1)
    assert u != uniform((seed + 1) % (1 << 63), position)


def test_frequencies_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(SamplingParams(seed=7))
    counts = np.bincount([one(row, sampler, n).token_id for n in range(8000)], minlength=4)
    assert np.abs(counts / 8000 - [0.5, 0.25, 0.125, 0.125]).max() < 0.02


def test_runs_of_a_large_vocabulary_are_drawn_from_evenly() -> None:
    row = np.zeros(5000, np.float32)
    sampler = Sampler(SamplingParams(seed=3))
    drawn = np.array([one(row, sampler, n).token_id for n in range(4000)])
    assert np.abs(np.histogram(drawn, 10, (0, 5000))[0] - 400).max() < 100


@given(rows(), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_logprobs_are_those_of_the_model(row: np.ndarray[Any, Any], count: int) -> None:
    asked = SamplingParams(temperature=0.7, logit_bias={0: 5.0}, logprobs=count)
    drawn = one(row, Sampler(asked), 0)
    exact = row.astype(np.float64)
    exact -= exact.max()
    exact -= math.log(np.exp(exact).sum())
    assert drawn.logprob is not None
    assert math.isclose(drawn.logprob, exact[drawn.token_id], abs_tol=1e-3)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert [token for token, _ in drawn.top] == expected
    assert all(math.isclose(p, exact[i], abs_tol=1e-3) for i, p in drawn.top)


def test_penalties_follow_their_formulas() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), prompt=[0])
    sampler.count(1)
    assert sampler.adjust(row).tolist() == [1.0, -4.0, 1.0, 0.5]
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=[0])
    for _ in range(2):
        sampler.count(2)
    assert sampler.adjust(row).tolist() == [2.0, -2.0, 0.0, 0.5]
    assert Sampler(SamplingParams(logit_bias={3: 1.5})).adjust(row).tolist() == [2, -2, 1, 2]


def test_a_row_of_no_numbers_does_not_hurt_the_others() -> None:
    logits = np.array([[0, 1, 2], [0, np.nan, 1], [np.inf, 0, 0]], np.float32)
    for temperature in (0.0, 1.0):
        drawn = sample(logits, [Sampler(SamplingParams(temperature=temperature))] * 3, [0, 0, 0])
        assert isinstance(drawn[0], Sampled)
        assert isinstance(drawn[1], SamplingError)
        assert isinstance(drawn[2], SamplingError)


@pytest.mark.parametrize(
    ("params", "prompt", "peak"),
    [
        (SamplingParams(logit_bias={8: 1.0}), [], 1.0),  # a token that the model does not have
        (SamplingParams(repetition_penalty=1.5), [8], 1.0),
        (SamplingParams(repetition_penalty=0.01), [0], 3e38),  # beyond what f32 can say
        (SamplingParams(repetition_penalty=0.01, temperature=0.0), [0], 3e38),
    ],
)
def test_what_cannot_be_drawn_fails_alone(params, prompt, peak):
    logits = np.full((2, 8), peak, np.float32)
    bad, good = sample(logits, [Sampler(params, prompt), Sampler(SamplingParams())], [0, 0])
    assert isinstance(bad, SamplingError)
    assert isinstance(good, Sampled)
