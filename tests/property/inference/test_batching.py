"""The scheduler driven through random lives of sequences, mirrored by stage-like block tables."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.batching import Limits, QueueFull, Scheduler, Step, share_room
from inference.blocks import BlockTables


class Mirror:
    """What a stage does with the same commands: it must never run out or be told nonsense.

    ``content`` is what each KV block holds, so that sharing can be checked for what it shares.
    """

    def __init__(self, limits: Limits) -> None:
        self.tables = BlockTables(limits.blocks, limits.block_size)
        self.size = limits.block_size
        self.content: dict[tuple[int, int], int] = {}
        self.prompts: dict[int, int] = {}

    def run(self, step: Step, known: dict[int, list[int]]) -> None:
        for command in step.commands:
            if command.do == "open":
                self.tables.open(command.session)
                self.prompts[command.session] = command.prompt
            elif command.do == "fork":
                assert command.length <= self.prompts[command.source]
                self.tables.fork(command.source, command.session, command.length)
                self.prompts[command.session] = command.prompt
            elif command.do == "trim":
                self.tables.truncate(command.session, command.length)
            else:
                assert command.session in self.tables
                self.tables.close(command.session)
        for work in step.work:
            assert work.tokens
            assert self.tables.length(work.session) == work.past
            prompt = self.prompts[work.session]
            if work.past < prompt:  # a chunk of prompt and nothing else, never a lone row
                assert work.past + len(work.tokens) <= prompt
                assert prompt == 1 or len(work.tokens) > 1
            self.tables.extend(work.session, work.past + len(work.tokens))  # never OutOfBlocks
            blocks = self.tables.indices(work.session)
            for offset, token in enumerate(work.tokens):
                at = work.past + offset
                self.content[int(blocks[at // self.size]), at % self.size] = token
        for work in step.work:
            end = work.past + len(work.tokens)
            blocks = self.tables.indices(work.session)
            held = [self.content[int(blocks[i // self.size]), i % self.size] for i in range(end)]
            assert held == known[work.session][:end]  # its own tokens, whoever computed them
            assert work.samples == (end == len(known[work.session]))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    blocks = draw(st.integers(4, 40))
    return Limits(
        blocks=blocks,
        block_size=block_size,
        context_length=draw(st.integers(2, blocks * block_size)),
        sequences=draw(st.integers(1, 8)),
        waiting=draw(st.integers(1, 10)),
        chunk=draw(st.integers(8, 32)),
        mixed_chunk=draw(st.integers(8, 16)),
        cached=draw(st.integers(0, 6)),
    )


@given(limits(), st.data())
@settings(max_examples=200, deadline=None)
def test_random_lives(limits: Limits, data: st.DataObject) -> None:
    scheduler = Scheduler(limits)
    mirror = Mirror(limits)
    known: dict[int, list[int]] = {}
    in_flight: list[Step] = []
    sessions = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "plan", "plan", "land", "land", "finish"]))
        if action == "add":
            length = data.draw(st.integers(1, limits.context_length - 1))
            # Few different tokens and starts, so that prefixes are shared often.
            kind = data.draw(st.integers(0, 2))
            tokens = [(kind if i < length // 2 else i + kind) % 5 for i in range(length)]
            try:
                scheduler.add(sessions, tokens, data.draw(st.integers(1, length)))
            except QueueFull:
                # Those that had to give way come on top of those that may wait.
                assert scheduler.waiting >= limits.waiting
            else:
                known[sessions] = tokens
                sessions += 1
        elif action == "plan" and len(in_flight) < 3:
            step = scheduler.plan()
            if step is not None:
                mirror.run(step, known)
                in_flight.append(step)
        elif action == "land" and in_flight:
            for work in in_flight.pop(0).work:
                if not work.samples or work.session not in known:
                    continue
                if len(known[work.session]) == limits.context_length:
                    scheduler.finish(work.session)
                    del known[work.session]
                else:
                    token = data.draw(st.integers(0, 4))
                    known[work.session].append(token)
                    scheduler.append(work.session, token)
        elif action == "finish" and known:
            session = data.draw(st.sampled_from(sorted(known)))
            scheduler.finish(session, keep=data.draw(st.booleans()))
            del known[session]
        assert scheduler.running + scheduler.waiting == len(known)
        assert 0 <= scheduler.cache_used <= 1
    for session in list(known):
        scheduler.finish(session, keep=False)
    step = scheduler.plan()
    if step is not None:
        mirror.run(step, {})
    assert scheduler.free_blocks == mirror.tables.free


@given(limits(), st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_everyone_gets_finished(limits: Limits, asked: list[tuple[int, int]]) -> None:
    """Without cancellation every sequence gets all its tokens, whatever is preempted."""
    scheduler = Scheduler(limits)
    mirror = Mirror(limits)
    known: dict[int, list[int]] = {}
    owed: dict[int, int] = {}
    queue = [
        (n, min(length, limits.context_length - 1), more) for n, (length, more) in enumerate(asked)
    ]
    steps = 0
    while queue or known:
        while queue and scheduler.waiting < limits.waiting:
            session, length, more = queue.pop(0)
            known[session] = [(session + i) % 7 for i in range(length)]
            owed[session] = min(more, limits.context_length - length)
            scheduler.add(session, known[session], length - session % 3 if length > 3 else None)
        step = scheduler.plan()
        assert step is not None, "nothing runs although something is left"
        mirror.run(step, known)
        for work in step.work:
            if work.samples:
                owed[work.session] -= 1
                if owed[work.session] == 0:
                    scheduler.finish(work.session)
                    del known[work.session]
                else:
                    known[work.session].append(3)
                    scheduler.append(work.session, 3)
        steps += 1
        assert steps < 20_000


@given(st.lists(st.integers(1, 1000), max_size=10), st.integers(1, 600))
def test_room_is_used_and_shared(pending: list[int], room: int) -> None:
    counts = share_room(pending, room)
    assert all(0 <= c <= p for c, p in zip(counts, pending, strict=True))
    assert sum(counts) == min(room, sum(pending))
    if len(pending) > 1:
        assert counts[0] >= min(pending[0], room // 2)
        shortest = min(range(1, len(pending)), key=lambda i: pending[i])
        assert counts[shortest] >= min(pending[shortest], room // 2)
