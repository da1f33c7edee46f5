"""A stage refuses what is wrong before it allocates or runs anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.paged import StageConfig, UnsupportedModel
from inference.split import read_splittable
from inference.stage import Part, Stage, StageRefusal, StepBatch


@pytest.fixture(scope="module")
def pair(zoo: Callable[[str], Path]) -> tuple[Stage, Stage]:
    whole = read_splittable(zoo("llama"))
    config = StageConfig(kv_bytes=1 << 18, threads=1)
    return (
        Stage(whole.cut(0, 1), config, context_length=200),
        Stage(whole.cut(1, 3), config, context_length=200),
    )


@pytest.fixture
def stages(pair: tuple[Stage, Stage]) -> Iterator[tuple[Stage, Stage]]:
    for stage in pair:
        stage.clear()
        stage.open(1)
        stage.open(2)
    yield pair
    for stage in pair:
        stage.clear()
        assert stage.free_blocks == stage.blocks


def ids(count: int, start: int = 3) -> Any:
    return np.arange(start, start + count, dtype=np.int64)


def logits(stages: tuple[Stage, Stage], session: int, past: int, tokens: Any) -> Any:
    first, last = stages
    part = (Part(session, past, len(tokens)),)
    hidden = first.step(StepBatch(part, tokens))
    assert hidden.shape == (len(tokens), 32)
    out = last.step(StepBatch(part, hidden, (len(tokens) - 1,)))
    assert out.shape == (1, 256)
    return out.copy()


def test_what_a_stage_says_of_itself(stages: tuple[Stage, Stage]) -> None:
    first, last = stages
    assert (first.range.first, first.range.last, first.range.layers) == (0, 1, 3)
    assert first.range.is_first and last.range.is_last and not first.range.is_last
    assert (first.hidden, first.width, last.hidden, last.width) == (32, 32, 32, 256)
    assert first.block_size == 32
    # Keys and values in f32 of 2 heads of 16, one layer and two.
    assert (first.block_bytes, last.block_bytes) == (32 * 2 * 2 * 16 * 4, 2 * 32 * 2 * 2 * 16 * 4)


BAD = [
    ("bad_past", [Part(1, 1, 2)], ids(2)),
    ("bad_past", [Part(1, -1, 2)], ids(2)),
    ("bad_count", [], ids(0)),
    ("bad_count", [Part(1, 0, 0)], ids(0)),
    ("bad_count", [Part(1, 0, -3)], ids(0)),
    ("bad_count", [Part(1, 0, 1), Part(1, 0, 1)], ids(2)),
    ("unknown_session", [Part(7, 0, 2)], ids(2)),
    ("context_exceeded", [Part(1, 0, 201)], ids(201)),
    ("context_exceeded", [Part(1, 0, 1 << 60)], ids(2)),
    ("bad_input", [Part(1, 0, 2)], ids(3)),
    ("bad_input", [Part(1, 0, 2)], ids(2).reshape(1, 2)),
    ("bad_input", [Part(1, 0, 2)], ids(2).astype(np.float32)),
    ("bad_input", [Part(1, 0, 2)], ids(2, 255)),
    ("bad_input", [Part(1, 0, 2)], ids(2, -1)),
]


@pytest.mark.parametrize(("reason", "parts", "rows"), BAD)
def test_hostile_batches_of_tokens(
    stages: tuple[Stage, Stage], reason: str, parts: list[Part], rows: Any
) -> None:
    free = stages[0].free_blocks
    with pytest.raises(StageRefusal) as refused:
        stages[0].step(StepBatch(parts, rows))
    assert refused.value.reason == reason
    assert (stages[0].free_blocks, stages[0].length(1)) == (free, 0)


def test_hostile_hidden_states(stages: tuple[Stage, Stage]) -> None:
    good = np.ones((2, 32), np.float32)
    poisoned = good.copy()
    poisoned[1, 3] = np.nan
    endless = good.copy()
    endless[0, 0] = np.inf
    part = (Part(1, 0, 2),)
    for rows in (poisoned, endless, good[:, :31], good[:1], good.astype(np.int32), good[None]):
        with pytest.raises(StageRefusal) as refused:
            stages[1].step(StepBatch(part, rows))
        assert refused.value.reason == "bad_input"
    for sampled in ((2,), (-1,), (1, 0), (0, 0)):
        with pytest.raises(StageRefusal) as refused:
            stages[1].step(StepBatch(part, good, sampled))
        assert refused.value.reason == "bad_rows"
    assert stages[1].length(1) == 0
    assert stages[1].step(StepBatch(part, good.astype(np.float16), (0, 1))).shape == (2, 256)
    assert stages[1].step(StepBatch((Part(1, 2, 2),), good)).shape == (0, 256)


def test_what_is_told_may_change_while_it_is_computed(stages: tuple[Stage, Stage]) -> None:
    first = stages[0]
    wanted = [first.step(StepBatch((Part(1, 0, 4),), ids(4, at))).copy() for at in (3, 9)]
    rows = ids(4)
    for at, hidden in zip((3, 9), wanted, strict=True):  # into a new tensor and into a kept one
        rows[:] = ids(4, at)
        first.begin(StepBatch((Part(1, 0, 4),), rows))
        rows[:] = 0
        assert np.array_equal(first.finish(), hidden)


def test_an_input_that_the_runtime_refuses_leaves_no_trace(stages: tuple[Stage, Stage]) -> None:
    first = stages[0]
    good = [first.step(StepBatch((Part(1, 0, n),), ids(n))).copy() for n in (3, 5)]
    first.step(StepBatch((Part(1, 0, 3),), ids(3, 50)))
    paged = first._paged
    paged.input_dtype, dtype = np.dtype(np.float32), paged.input_dtype
    with pytest.raises(RuntimeError):
        first.step(StepBatch((Part(1, 0, 5),), ids(5)))
    paged.input_dtype = dtype
    assert np.array_equal(first.step(StepBatch((Part(1, 0, 5),), ids(5))), good[1])
    assert np.array_equal(first.step(StepBatch((Part(1, 0, 3),), ids(3))), good[0])


def test_one_refused_part_can_be_left_out(stages: tuple[Stage, Stage]) -> None:
    alone = logits(stages, 1, 0, ids(20))
    parts = [Part(1, 0, 20), Part(2, 5, 20)]
    bad = [stages[0].refusal(part) for part in parts]
    assert bad[0] is None and bad[1] is not None and bad[1].session == 2
    np.testing.assert_array_equal(logits(stages, 1, 0, ids(20)), alone)


def test_chunks_batches_and_going_back_give_the_same(stages: tuple[Stage, Stage]) -> None:
    tokens = ids(100)
    wanted = logits(stages, 1, 0, tokens)
    logits(stages, 2, 0, tokens[:37])
    got = logits(stages, 2, 37, tokens[37:])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    logits(stages, 2, 100, ids(9, 50))  # rejected drafts
    assert stages[0].length(2) == 109
    got = logits(stages, 2, 99, tokens[99:])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    assert stages[0].length(2) == 100
    for stage in stages:
        stage.fork(1, 3, 96)
    got = logits(stages, 3, 96, tokens[96:])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(StageRefusal, match="shared"):
        stages[0].step(StepBatch((Part(3, 50, 1),), ids(1)))
    with pytest.raises(StageRefusal, match="whole blocks"):
        stages[0].fork(1, 4, 95)
    with pytest.raises(StageRefusal, match="not open"):
        stages[0].fork(99, 4, 32)


def test_a_row_gives_the_same_whatever_runs_beside_it(stages: tuple[Stage, Stage]) -> None:
    """To the last bit, from two rows on: a prompt in chunks, output row by row, and both again as
    a resume does."""
    prompt, output = ids(61), ids(30, 90)
    for stage in stages:
        for session in (10, 11, 12):
            stage.open(session, prompt=61)

    def beside(session: int, past: int, tokens: Any, others: int) -> Any:
        parts = (Part(1, 0, others), Part(session, past, len(tokens)))
        rows = stages[0].step(StepBatch(parts, np.concatenate([ids(others, 100), tokens])))
        ends = range(others, others + len(tokens))
        return stages[1].step(StepBatch(parts, rows, tuple(ends))).copy()

    one = [beside(10, 0, prompt, 1)[-1:]]
    one += [beside(10, 61 + n, output[n : n + 1], 2) for n in range(30)]
    beside(11, 0, prompt[:7], 12)
    other = [beside(11, 7, prompt[7:], 1)[-1:], beside(11, 61, output, 40)]
    np.testing.assert_array_equal(np.concatenate(other), np.concatenate(one))
    lone = [logits(stages, 12, 0, prompt)]
    lone += [logits(stages, 12, 61 + n, output[n : n + 1]) for n in range(30)]
    np.testing.assert_allclose(np.concatenate(lone), np.concatenate(one), rtol=1e-4, atol=1e-4)


def test_a_part_may_end_behind_the_prompt(stages: tuple[Stage, Stage]) -> None:
    for stage in stages:
        stage.open(10, prompt=40)
        stage.open(11, prompt=40)
    logits(stages, 10, 0, ids(40))
    wanted = logits(stages, 10, 40, ids(10, 43))
    got = logits(stages, 11, 0, ids(50))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_blocks_run_out_and_come_back(stages: tuple[Stage, Stage]) -> None:
    first = stages[0]
    full = first.blocks // 6
    for session in range(10, 10 + full):
        first.open(session)
        first.step(StepBatch((Part(session, 0, 192),), ids(192)))
    rest = 32 * first.free_blocks
    first.step(StepBatch((Part(1, 0, rest),), ids(rest)))
    with pytest.raises(StageRefusal) as refused:
        first.step(StepBatch((Part(2, 0, 1),), ids(1)))
    assert refused.value.reason == "out_of_blocks"
    first.close(11)
    first.close(11)
    first.step(StepBatch((Part(2, 0, 1),), ids(1)))


def test_what_cannot_be_loaded(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="less than a block"):
        Stage.read(zoo("llama"), StageConfig(kv_bytes=100), context_length=10)
    with pytest.raises(UnsupportedModel, match="GPU"):
        Stage.read(zoo("llama"), StageConfig(device="GPU.7"), context_length=10)
