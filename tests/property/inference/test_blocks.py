"""Block tables against a model of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.blocks import BlockTables, OutOfBlocks


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(12, 4)
        self.lengths: dict[int, int] = {}
        self.next = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lengths)))

    @rule()
    def open(self) -> None:
        self.tables.open(self.next)
        self.lengths[self.next] = 0
        self.next += 1

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(0, 20))
    def extend(self, data: st.DataObject, more: int) -> None:
        session = self.pick(data)
        past = self.lengths[session]
        cost = self.tables.cost(session, past, past + more)
        if cost > self.tables.free:
            with pytest.raises(OutOfBlocks):
                self.tables.extend(session, past + more)
        else:
            free = self.tables.free
            self.tables.extend(session, past + more)
            self.lengths[session] = past + more
            assert free - self.tables.free == cost

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        session = self.pick(data)
        length = data.draw(st.integers(0, self.lengths[session]))
        free = self.tables.free
        try:
            cost = self.tables.cost(session, length, length)
        except ValueError:
            with pytest.raises(ValueError, match="shared"):
                self.tables.truncate(session, length)
            return
        self.tables.truncate(session, length)
        self.lengths[session] = length
        assert free - self.tables.free == cost

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.pick(data)
        length = data.draw(st.integers(0, self.lengths[source] // 4)) * 4
        self.tables.fork(source, self.next, length)
        self.lengths[self.next] = length
        self.next += 1

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.pick(data)
        self.tables.close(session)
        del self.lengths[session]

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held: dict[int, list[tuple[int, int]]] = {}
        for session, length in self.lengths.items():
            assert self.tables.length(session) == length
            blocks = self.tables.indices(session).tolist()
            assert len(blocks) == -(-length // 4) == len(set(blocks))
            for place, block in enumerate(blocks):
                assert 0 <= block < 12
                held.setdefault(block, []).append((session, place))
        assert self.tables.free == 12 - len(held)
        for holders in held.values():
            # A shared block is at the same place in all tables, and full in all of them.
            assert len({place for _, place in holders}) == 1
            if len(holders) > 1:
                place = holders[0][1]
                assert all(self.lengths[session] >= (place + 1) * 4 for session, _ in holders)


Tables.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase


def test_what_cannot_be_is_refused() -> None:
    tables = BlockTables(4, 2)
    tables.open(1)
    tables.extend(1, 5)
    with pytest.raises(ValueError, match="open"):
        tables.open(1)
    with pytest.raises(ValueError, match="whole blocks"):
        tables.fork(1, 2, 3)
    with pytest.raises(ValueError, match="not 6"):
        tables.fork(1, 2, 6)
    with pytest.raises(ValueError, match="not 6"):
        tables.truncate(1, 6)
    with pytest.raises(ValueError, match="more than"):
        tables.extend(1, 4)
    with pytest.raises(OutOfBlocks):
        tables.extend(1, 9)
    assert tables.length(1) == 5
