"""The plan after a loss, and the output that is kept for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.relay.kept import KeptOutput, Piece
from mesh.relay.messages import Held
from mesh.relay.recovery import Marks, plan
from mesh.relay.watch import PATIENCE, QUIET, STUCK, Watch


def held(past: int, kept_from: int = 0) -> Held:
    return Held(session=1, past=past, kept_from=kept_from)


def test_a_middle_stage_is_filled_by_the_one_before_it() -> None:
    assert plan(50, 30, [held(50), None, held(48), held(48)]) == (
        Marks(past=50, replay_from=0, emit_from=0),
        Marks(past=0, replay_from=0, emit_from=48),
        Marks(past=48, replay_from=48, emit_from=48),
        Marks(past=48, replay_from=48, emit_from=49),
    )


def test_a_token_that_was_drawn_and_lost_is_drawn_again() -> None:
    # The tail has seen all 50 tokens and drawn the next, which did not arrive.
    marks = plan(50, 30, [held(50), held(50)])
    assert marks[1] == Marks(past=49, replay_from=49, emit_from=49)
    assert marks[0].replay_from == 49


def test_the_last_row_of_a_prompt_is_not_computed_alone() -> None:
    marks = plan(50, 50, [held(50), held(50)])
    assert marks[0].replay_from == 48
    assert marks[1] == Marks(past=48, replay_from=48, emit_from=49)
    assert plan(1, 1, [held(1), held(1)])[1].past == 0


def test_a_loss_while_a_replacement_was_being_filled() -> None:
    marks = plan(50, 30, [held(50), held(20), None])
    assert [m.past for m in marks] == [50, 20, 0]
    assert [m.replay_from for m in marks] == [20, 0, 0]
    assert [m.emit_from for m in marks] == [20, 0, 49]


def test_what_is_not_kept_cannot_be_replayed() -> None:
    assert plan(50, 30, [held(50, kept_from=10), None]) is None
    assert plan(50, 30, [held(50, kept_from=50), held(49)]) is None
    assert plan(50, 30, [held(49, kept_from=49), held(49)]) is not None


@given(st.data())
def test_every_stage_gets_every_position_once(data) -> None:
    """Follow the orders: each stage receives its missing positions in order, and the tail samples
    exactly the token that is due."""
    known = data.draw(st.integers(1, 30))
    prompt = data.draw(st.integers(1, known))
    stages = data.draw(st.integers(2, 5))
    pasts = sorted(
        data.draw(st.lists(st.integers(0, known), min_size=stages, max_size=stages)), reverse=True
    )
    lost = data.draw(st.sets(st.integers(1, stages - 1)))
    marks = plan(known, prompt, [None if rank in lost else held(p) for rank, p in enumerate(pasts)])
    assert marks is not None
    arriving = list(range(marks[0].past, known))  # what the head sends on
    for rank, order in enumerate(marks):
        assert arriving == list(range(order.past, known))
        if rank in lost:
            assert order.past == 0
        else:
            assert order.past in (pasts[rank], known - 1, known - 2)
        replayed = list(range(order.replay_from, order.past))
        arriving = replayed + [p for p in arriving if p >= order.emit_from]
    assert arriving == [known - 1]  # the tail passes on what it draws


def piece(position: int, count: int, sample: bool = False, encoding: str = "f16") -> Piece:
    values = np.arange(position, position + count, dtype="<f2" if encoding == "f16" else "<f4")
    return Piece(position, sample, encoding, values.reshape(-1, 1))


def test_kept_output_comes_back_joined_from_any_position() -> None:
    kept = KeptOutput()
    kept.add(1, piece(0, 10))
    for position in range(10, 15):
        kept.add(1, piece(position, 1, sample=True))
    kept.add(1, piece(15, 3, encoding="f32"))
    found = list(kept.pieces(1, 7, max_tokens=4, prompt=10))
    assert [(p.position, len(p.values), p.sample, p.encoding) for p in found] == [
        (7, 3, False, "f16"),
        (10, 4, True, "f16"),
        (14, 1, True, "f16"),
        (15, 3, False, "f32"),
    ]
    assert np.concatenate([p.values for p in found])[:, 0].tolist() == list(range(7, 18))
    assert kept.bytes == 15 * 2 + 3 * 4


def test_kept_output_is_cut_back_and_goes_on() -> None:
    kept = KeptOutput()
    kept.add(1, piece(0, 10, sample=True))
    kept.truncate(1, 6)
    assert kept.bytes == 12
    kept.add(1, piece(6, 2))
    [found] = kept.pieces(1, 0, 100, prompt=8)
    assert found.values[:, 0].tolist() == list(range(8))
    with pytest.raises(ValueError, match="up to 8"):
        kept.add(1, piece(9, 1))


def test_the_largest_session_is_given_up_when_memory_is_short() -> None:
    kept = KeptOutput(limit=40)
    kept.add(1, piece(0, 12))
    kept.add(2, piece(0, 5))
    kept.add(2, piece(5, 5))
    assert kept.bytes <= 40
    assert kept.kept_from(1, 12) == 12
    assert kept.kept_from(2, 10) == 0
    kept.add(1, piece(12, 2))  # and it can be kept again from here on
    assert kept.kept_from(1, 14) == 12
    kept.drop(1)
    kept.drop(2)
    assert kept.bytes == 0


def test_silence_is_asked_about_and_slowness_is_not_a_loss() -> None:
    assert QUIET + PATIENCE <= 1.5 and PATIENCE > 1.0
    watch = Watch(0.0)
    assert watch.ask_in(0.1) > 0
    assert watch.ask_in(QUIET) <= 0
    now = QUIET
    while now < 100:  # a stage that computes for minutes
        assert not watch.answered(now, now + 0.01, busy=True)
        now += QUIET
    watch.heard(now)
    assert watch.ask_in(now) > 0
    began = now
    while not watch.answered(now, now + 0.01, busy=False):  # nobody has it, and nothing comes
        now += QUIET
    assert STUCK <= now + 0.01 - began < STUCK + 1
