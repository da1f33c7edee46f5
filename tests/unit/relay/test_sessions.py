"""A stage's table: who may do what, and that room is given back whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inference.generation import SamplingParams
from mesh.identity import PeerId
from mesh.relay.frames import Row, StepHeader
from mesh.relay.messages import Close, Grow, Neighbours, Open, OpenSession, Replay, ReplaySession
from mesh.relay.refusal import Refusal
from mesh.relay.sessions import SessionTable, StageFacts

HEAD, OTHER, NEXT = (PeerId(name * 52) for name in "hon")
CHAIN = b"1" * 16
FACTS = StageFacts(
    model="m" * 64, first=4, last=8, layers=12, hidden=4, block_size=16, blocks=8,
    context_length=100,
)  # fmt: skip


def opening(*numbers: int, capacity: int = 32, **changes) -> Open:
    fields = {
        "chain": CHAIN, "epoch": 1, "previous": HEAD, "next": NEXT, "model": FACTS.model,
        "first": 4, "last": 8, "layers": 12, "rank": 1, "stages": 3, "activations": "f16",
        "sessions": [
            OpenSession(session=n, capacity=capacity, prompt=5).model_dump() for n in numbers
        ],
    }  # fmt: skip
    return Open.model_validate({**fields, **changes})


def table(*numbers: int, facts: StageFacts = FACTS) -> SessionTable:
    made = SessionTable(facts)
    if numbers:
        assert made.open(HEAD, opening(*numbers), [[]] * len(numbers)) == ([], [])
    return made


def frame(*rows: tuple[int, int, int], epoch: int = 1, **changes) -> StepHeader:
    return StepHeader.model_validate(
        {
            "chain": CHAIN,
            "epoch": epoch,
            "step": 1,
            "encoding": "f16",
            "rows": [[*row, False] for row in rows],
            **changes,
        }
    )


def code(call, *arguments) -> str:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "x" * 64}, "unknown_model"),
        ({"first": 3}, "wrong_range"),
        ({"last": 9}, "wrong_range"),
        ({"layers": 13}, "wrong_range"),
        ({"activations": "f8"}, "wrong_encoding"),
    ],
)
def test_a_mismatch_is_refused_by_name_before_anything(changes, expected) -> None:
    made = table()
    assert code(made.open, HEAD, opening(1, **changes), [[]]) == expected
    assert (made.used, made.chains) == (0.0, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": 2},
        {"rank": 3},
        {"first": 8, "last": 4},
        {"activations": ""},
        {"activations": 16},
        {"version": 2},
        {"sessions": []},
        {"previous": "short"},
        {"sessions": [{"session": 1, "capacity": 1 << 30, "prompt": 1}]},
        {"sessions": [{"session": 1, "capacity": 4, "prompt": 1}] * 2},
        *(
            {"sessions": [{"session": 1, "capacity": 4, "prompt": 1, "sampling": sampling}]}
            for sampling in (
                {"logit_bias": {"1": 1.0}},
                {"logit_bias": [[1]]},
                {"logit_bias": [["1", 1.0]]},
                {"logit_bias": [[[], 1.0]]},
                {"logit_bias": [[1, 101.0]]},
                {"logit_bias": [[n, 1.0] for n in range(1025)]},
                {"temperature": 9.0},
                [],
            )
        ),
    ],
)
def test_openings_that_are_none(changes) -> None:
    with pytest.raises(ValueError):
        opening(1, **changes)


def test_sessions_are_refused_one_by_one() -> None:
    made = table(1)
    wanted = opening(1, 2, 3, 4, capacity=40)
    refused, _ = made.open(HEAD, wanted, [[]] * 4)
    assert [(r.session, r.code) for r in refused] == [(1, "session_exists"), (4, "no_free_blocks")]
    refused, _ = made.open(HEAD, opening(9, capacity=101), [[]])
    assert refused[0].code == "context_length"
    sampled = [{"session": 9, "capacity": 4, "prompt": 1, "sampling": SamplingParams()}]
    refused, _ = made.open(HEAD, opening(sessions=sampled), [[]])
    assert refused[0].code == "malformed"
    assert made.sessions == 3


def test_the_last_stage_needs_the_history_that_penalties_look_at() -> None:
    last = StageFacts("m" * 64, 4, 12, 12, 4, 16, 8, 100)
    made = SessionTable(last)

    def refused(penalty: float, history: list[int], emit_from: int) -> list[str]:
        session = {
            "session": 1, "capacity": 30, "prompt": 2, "emit_from": emit_from,
            "history": len(history), "sampling": SamplingParams(presence_penalty=penalty),
        }  # fmt: skip
        message = opening(last=12, rank=2, sessions=[session])
        found, _ = made.open(HEAD, message, [history])
        made.close(HEAD, Close(chain=CHAIN, epoch=9))
        return [r.code for r in found]

    assert refused(0.5, [7, 8, 9], 2) == []
    assert refused(0.0, [], 2) == []
    assert refused(0.5, [7, 8], 2) == ["malformed"]
    assert refused(0.5, [], 2) == ["malformed"]


def test_a_chain_belongs_to_its_head_and_its_neighbours() -> None:
    made = table(1)
    assert code(made.open, OTHER, opening(2), [[]]) == "wrong_peer"
    assert code(made.open, HEAD, opening(2, next=OTHER), [[]]) == "chain_mismatch"
    assert code(made.close, OTHER, Close(chain=CHAIN, epoch=1)) == "wrong_peer"
    assert code(made.grow, OTHER, Grow(chain=CHAIN, session=1, capacity=40)) == "wrong_peer"
    fence = Neighbours(chain=CHAIN, epoch=2, previous=OTHER, next=NEXT)
    assert code(made.fence, OTHER, fence) == "wrong_peer"
    assert code(made.expect, OTHER, frame((1, 0, 1))) == "wrong_peer"
    assert code(made.expect, HEAD, frame((1, 0, 1), chain=b"2" * 16)) == "unknown_chain"
    assert code(made.expect, HEAD, frame((1, 0, 1), epoch=2)) == "stale_epoch"
    made.open(HEAD, opening(5, chain=b"3" * 16, activations="f32"), [[]])
    header = frame((5, 0, 1), chain=b"3" * 16, encoding="f16")
    assert code(made.expect, HEAD, header) == "wrong_encoding"
    made.open(HEAD, opening(6, chain=b"4" * 16, activations="int8"), [[]])
    for encoding, good in (("int8", True), ("f32", True), ("f16", False), ("bf16", False)):
        header = frame((6, 0, 1), chain=b"4" * 16, encoding=encoding)
        if good:
            assert made.expect(HEAD, header) is made.chains[b"4" * 16]
        else:
            assert code(made.expect, HEAD, header) == "wrong_encoding"


def test_rows_are_let_in_only_where_the_session_ends() -> None:
    made = table(1, 2, 3)
    chain = made.expect(HEAD, frame((1, 0, 1)))
    rows = [Row(1, 0, 5, False), Row(2, 1, 1, False), Row(3, 0, 33, False), Row(7, 0, 1, False)]
    refused = made.accept(chain, rows)
    assert {n: r.code for n, r in refused.items()} == {
        2: "wrong_position",
        3: "beyond_capacity",
        7: "unknown_session",
    }
    assert made.accept(chain, [Row(1, 5, 2, False), Row(2, 0, 1, False)]) == {}
    assert made.accept(chain, [Row(1, 5, 2, False)])[1].code == "wrong_position"  # twice
    made.grow(HEAD, Grow(chain=CHAIN, session=3, capacity=33))
    assert made.accept(chain, [Row(3, 0, 33, False)]) == {}


def test_a_fence_voids_what_has_not_begun_and_late_frames() -> None:
    made = table(1)
    chain = made.expect(HEAD, frame((1, 0, 1)))
    made.accept(chain, [Row(1, 0, 5, False)])
    session = chain.sessions[1]
    session.started = 3
    fence = Neighbours(chain=CHAIN, epoch=2, previous=OTHER, next=NEXT)
    [held] = made.fence(HEAD, fence)
    assert (held.past, session.accepted) == (3, 3)
    assert code(made.fence, HEAD, fence) == "stale_epoch"
    assert made.expect(OTHER, frame((1, 5, 1), epoch=1)) is None
    assert code(made.expect, HEAD, frame((1, 3, 1), epoch=2)) == "wrong_peer"
    session.past = 3

    def order(past: int, replay_from: int, epoch: int = 2) -> Replay:
        one = ReplaySession(session=1, past=past, emit_from=4, replay_from=replay_from)
        gone = ReplaySession(session=9, past=0, emit_from=0, replay_from=0)
        return Replay(chain=CHAIN, epoch=epoch, sessions=(one, gone))

    assert code(made.rewind, HEAD, order(2, 1, epoch=1)) == "stale_epoch"
    assert code(made.rewind, HEAD, order(4, 1)) == "wrong_position"
    assert code(made.rewind, HEAD, order(2, 3)) == "wrong_position"
    assert made.rewind(HEAD, order(2, 1)) == [(session, 1)]
    assert (session.accepted, session.past, session.emit_from) == (2, 2, 4)


def test_a_later_epoch_begins_a_chain_anew_and_a_late_goodbye_does_not_end_it() -> None:
    made = table(1, 2)
    refused, ended = made.open(HEAD, opening(1, epoch=3), [[]])
    assert refused == [] and sorted(s.number for s in ended) == [1, 2]
    assert made.close(HEAD, Close(chain=CHAIN, epoch=2)) == []
    assert code(made.open, HEAD, opening(7, epoch=2), [[]]) == "stale_epoch"
    assert len(made.close(HEAD, Close(chain=CHAIN, epoch=3))) == 1


def test_a_lost_head_ends_its_chains_and_a_lost_neighbour_does_not() -> None:
    made = table(1)
    made.open(OTHER, opening(1, chain=b"2" * 16, previous=OTHER), [[]])
    assert [chain.id for chain in made.beside(NEXT)] == [CHAIN, b"2" * 16]
    assert made.beside(HEAD) == []
    assert len(made.drop_head(HEAD)) == 1
    assert made.sessions == 1
    assert made.drop_head(NEXT) == []


class TableMachine(RuleBasedStateMachine):
    """Random openings, steps, losses, late and doubled frames; blocks are always accounted for."""

    chains = st.sampled_from([b"1" * 16, b"2" * 16])
    numbers = st.integers(0, 4)
    epochs = st.integers(1, 4)
    peers = st.sampled_from([HEAD, OTHER, NEXT])

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(FACTS)

    def attempt(self, call, *arguments):
        try:
            return call(*arguments)
        except Refusal as refusal:
            assert refusal.message
            return None

    @rule(sender=peers, chain=chains, epoch=epochs, number=numbers, capacity=st.integers(1, 110))
    def open(self, sender, chain, epoch, number, capacity) -> None:
        wanted = OpenSession(session=number, capacity=capacity, prompt=1).model_dump()
        message = opening(chain=chain, epoch=epoch, sessions=[wanted])
        self.attempt(self.table.open, sender, message, [[]])

    @rule(
        sender=peers, chain=chains, epoch=epochs, number=numbers,
        position=st.integers(0, 60), count=st.integers(1, 40),
    )  # fmt: skip
    def step(self, sender, chain, epoch, number, position, count) -> None:
        header = frame((number, position, count), chain=chain, epoch=epoch)
        found = self.attempt(self.table.expect, sender, header)
        if found is not None:
            assert (found.previous, found.epoch) == (sender, epoch)
            session = found.sessions.get(number)
            before = session.accepted if session else None
            refused = self.table.accept(found, [Row(*header.rows[0])])
            assert bool(refused) == (before != position or position + count > session.capacity)

    @rule(chain=chains, number=numbers)
    def compute(self, chain, number) -> None:
        """What is let in gets computed."""
        found = self.table.chains.get(chain)
        session = found.sessions.get(number) if found else None
        if session:
            session.started = session.past = session.accepted

    @rule(sender=peers, chain=chains, epoch=epochs, previous=peers)
    def fence(self, sender, chain, epoch, previous) -> None:
        message = Neighbours(chain=chain, epoch=epoch, previous=previous, next=NEXT)
        self.attempt(self.table.fence, sender, message)

    @rule(
        sender=peers, chain=chains, epoch=epochs, number=numbers,
        past=st.integers(0, 40), start=st.integers(0, 40),
    )  # fmt: skip
    def rewind(self, sender, chain, epoch, number, past, start) -> None:
        order = ReplaySession(session=number, past=past, emit_from=past, replay_from=start)
        message = Replay(chain=chain, epoch=epoch, sessions=(order,))
        self.attempt(self.table.rewind, sender, message)

    @rule(sender=peers, chain=chains, number=numbers, capacity=st.integers(1, 110))
    def grow(self, sender, chain, number, capacity) -> None:
        self.attempt(self.table.grow, sender, Grow(chain=chain, session=number, capacity=capacity))

    @rule(sender=peers, chain=chains, epoch=epochs, numbers=st.lists(numbers, max_size=2))
    def close(self, sender, chain, epoch, numbers) -> None:
        message = Close(chain=chain, epoch=epoch, sessions=tuple(numbers))
        self.attempt(self.table.close, sender, message)

    @rule(peer=peers)
    def lose(self, peer) -> None:
        self.table.drop_head(peer)
        assert all(chain.head != peer for chain in self.table.chains.values())

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        sessions = [s for c in self.table.chains.values() for s in c.sessions.values()]
        reserved = sum(-(-s.capacity // FACTS.block_size) for s in sessions)
        assert self.table.free_tokens == (FACTS.blocks - reserved) * FACTS.block_size >= 0
        assert len({s.key for s in sessions}) == len(sessions)
        for session in sessions:
            assert 0 <= session.past <= session.started <= session.accepted <= session.capacity
        assert all(chain.sessions for chain in self.table.chains.values())


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
