"""Which rows go next: few steps for few sessions, prompts in chunks, no waiting for a long one."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from mesh.relay.frames import Row
from mesh.relay.schedule import Schedule, Step


def drain(schedule: Schedule) -> list[Step]:
    steps = []
    while (step := schedule.next()) is not None:
        steps.append(step)
    return steps


def generating(schedule: Schedule, sessions: int) -> None:
    """Bring ``sessions`` sessions to where each has had its first token and waits for nothing."""
    for number in range(sessions):
        schedule.add(number, [1, 2], 2, 100)
    while steps := drain(schedule):
        for step in steps:
            schedule.done(step.number)
    for number in range(sessions):
        schedule.token(number, 3)


def test_a_prompt_goes_in_chunks_as_many_at_once_as_there_are_stages() -> None:
    schedule = Schedule(3, chunk=4, prefill_budget=8)
    schedule.add(1, list(range(15)), 15, 100)
    steps = drain(schedule)
    assert [step.rows for step in steps] == [
        (Row(1, 0, 4, False),),
        (Row(1, 4, 4, False),),
        (Row(1, 8, 4, False),),
    ]
    assert steps[1].tokens == (4, 5, 6, 7)
    schedule.done(steps[0].number)
    assert schedule.next().rows == (Row(1, 12, 3, True),)
    assert not schedule.expects(1, 13)
    assert schedule.expects(1, 14)


def test_few_sessions_share_one_step() -> None:
    schedule = Schedule(2)
    generating(schedule, 5)
    [step] = drain(schedule)
    assert [row.session for row in step.rows] == [0, 1, 2, 3, 4]
    assert all(row == Row(row.session, 2, 1, True) for row in step.rows)


def test_many_sessions_are_spread_over_the_stages() -> None:
    schedule = Schedule(2)
    generating(schedule, 16)
    assert [len(step.rows) for step in drain(schedule)] == [8, 8]
    schedule = Schedule(4)
    generating(schedule, 8)
    assert [len(step.rows) for step in drain(schedule)] == [4, 4]


def test_rows_that_generate_ride_with_prompts_and_prompts_share() -> None:
    schedule = Schedule(2, chunk=4, prefill_budget=8)
    generating(schedule, 2)
    schedule.add(10, list(range(50)), 50, 100)
    schedule.add(11, list(range(3)), 3, 100)
    first = schedule.next()
    assert first.rows == (
        Row(0, 2, 1, True),
        Row(1, 2, 1, True),
        Row(10, 0, 4, False),
        Row(11, 0, 3, True),
    )
    second = schedule.next()
    assert second.rows == (Row(10, 4, 4, False),)
    assert schedule.next() is None
    schedule.done(second.number)
    assert schedule.next().rows == (Row(10, 8, 4, False),)


def test_a_session_stops_at_its_room_until_it_grows() -> None:
    schedule = Schedule(1)
    schedule.add(1, list(range(6)), 6, 4)
    [step] = drain(schedule)
    assert step.rows == (Row(1, 0, 4, False),)
    schedule.done(step.number)
    assert drain(schedule) == []
    schedule.grow(1, 10)
    assert drain(schedule)[0].rows == (Row(1, 4, 2, True),)


def test_an_ended_session_leaves_no_step_waiting() -> None:
    schedule = Schedule(1)
    schedule.add(1, [1], 1, 10)
    schedule.next()
    schedule.add(2, [1], 1, 10)
    assert schedule.next() is None
    schedule.remove(1)
    assert schedule.next().rows == (Row(2, 0, 1, True),)


def test_after_a_recovery_it_goes_on_from_what_the_first_stage_has() -> None:
    schedule = Schedule(2, chunk=4)
    schedule.add(1, list(range(12)), 12, 100)
    assert len(drain(schedule)) == 2
    schedule.restart({1: 4})
    assert [step.rows for step in drain(schedule)] == [
        (Row(1, 4, 4, False),),
        (Row(1, 8, 4, True),),
    ]


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    stages=st.integers(1, 4),
    data=st.data(),
)
def test_every_token_is_sent_once_in_order_and_all_end(prompts, stages, data) -> None:
    schedule = Schedule(stages, chunk=5, prefill_budget=9)
    for number, length in enumerate(prompts):
        schedule.add(number, [number] * length, length, length + 6)
    sent = dict.fromkeys(range(len(prompts)), 0)
    under_way: deque[Step] = deque()
    while sent:
        while (step := schedule.next()) is not None:
            under_way.append(step)
            for row in step.rows:
                assert row.position == sent[row.session]
                in_prompt = min(row.end, prompts[row.session]) - row.position
                assert in_prompt != 1 or prompts[row.session] == 1
                sent[row.session] = row.end
        assert 0 < len(under_way) <= stages
        for _ in range(data.draw(st.integers(1, len(under_way)))):
            step = under_way.popleft()
            schedule.done(step.number)
            for row in step.rows:
                if row.sample:
                    assert schedule.expects(row.session, row.end - 1)
                    schedule.token(row.session, 0)
                    if len(schedule.known(row.session)) == prompts[row.session] + 6:
                        schedule.remove(row.session)
                        del sent[row.session]
    assert len(schedule) == 0
