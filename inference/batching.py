"""Which sequences run in the next step. Pure: no model, no thread, no clock.

A step is one ragged batch: a row for each sequence that decodes, and chunks of prompts that are
still being read. The scheduler keeps a ledger of KV blocks that mirrors what every stage of the
chain will do with the same commands in the same order, so a stage never runs out:

* *Admission*: a sequence starts when blocks for all its tokens are free, and a few more so that
  those that run can grow. First come, first served.
* *Preemption by recomputation*: when a running sequence cannot grow, the youngest gives up its
  blocks and goes back to the head of the queue; its tokens, output included, are read again later.
* *Prefix sharing*: finished sequences stay as long as nobody needs their blocks. A new one starts
  from the longest run of whole blocks that its prompt has in common with the prompt of one of them,
  or of a running one.
* *Exactness*: rows of a prompt run as chunks and rows of output one by one, which differ in the
  last bits (see :mod:`inference.stage`). So a chunk ends where the prompt does, a prompt is never
  left with a chunk of a single row, and only prompts are shared.
* *Fairness*: decode rows go first, in turn. Half of the room for prompts is for the oldest that is
  being read, the rest for the shortest, so that neither waits for the other.

A planned step counts as done for planning: the next one may be planned while it is in flight. What
a sequence lacks is then its next token, and it is left out until :meth:`Scheduler.append`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from inference.blocks import BlockTables
from inference.prefixes import Prefixes

# Half of the smallest chunk still reads a prompt of 3 without leaving one row.
_LEAST_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """``context_length`` must fit into ``blocks``. Where stages of a chain differ, the block size
    is the largest one and ``blocks`` what the smallest holds of it.

    A step reads up to ``chunk`` prompt tokens, or ``mixed_chunk`` when it also has decode rows:
    those wait for the step, and small chunks cost a paged model little.
    """

    blocks: int
    block_size: int
    context_length: int
    sequences: int = 32
    waiting: int = 256
    chunk: int = 512
    mixed_chunk: int = 128
    cached: int = 64


class QueueFull(Exception):
    """As many sequences wait as may."""


@dataclass(frozen=True, slots=True)
class Command:
    """What every stage does with a session before the step.

    ``prompt`` is the length of its prompt; ``source`` and ``length`` are those of a fork, and
    ``length`` is how much to keep when a session is trimmed.
    """

    do: Literal["open", "fork", "trim", "close"]
    session: int
    prompt: int = 0
    source: int = -1
    length: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one sequence: ``tokens`` follow its first ``past``. ``samples``: the last row's
    logits give its next token."""

    session: int
    past: int
    tokens: list[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Commands come first, in order; ``work`` may be empty when only commands are due."""

    commands: tuple[Command, ...]
    work: tuple[Work, ...]


@dataclass(slots=True, eq=False)
class _Sequence:
    session: int
    arrival: int
    tokens: list[int]
    prompt: int
    scheduled: int = 0  # tokens whose KV is there, or will be once the steps in flight are done
    cached: int = 0  # tokens that came from another sequence, when last admitted
    turn: int = 0  # number of its latest step

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.scheduled


class Scheduler:
    """Sessions are integers that the caller chooses, each used once."""

    def __init__(self, limits: Limits) -> None:
        if limits.context_length > limits.blocks * limits.block_size:
            raise ValueError("a whole context does not fit into the blocks")
        if limits.sequences < 1 or min(limits.chunk, limits.mixed_chunk) < _LEAST_CHUNK:
            raise ValueError(f"at least one sequence and chunks of {_LEAST_CHUNK} tokens")
        self.limits = limits
        self._tables = BlockTables(limits.blocks, limits.block_size)
        self._prefixes = Prefixes(limits.block_size)
        self._sequences: dict[int, _Sequence] = {}  # all that have not finished
        self._running: list[_Sequence] = []  # by arrival
        self._waiting: list[_Sequence] = []  # by arrival
        self._commands: list[Command] = []  # for the next step
        self._arrivals = 0
        self._steps = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """No sequence, and no command that the stages have not been given."""
        return not self._sequences and not self._commands

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds; finished sequences that could give way hold theirs."""
        return self._tables.free

    @property
    def cache_used(self) -> float:
        """Part of the blocks that running sequences hold (a shared one counts for each)."""
        held = sum(len(self._tables.indices(sequence.session)) for sequence in self._running)
        return min(1.0, held / self.limits.blocks)

    def cached(self, session: int) -> int:
        """Tokens of the sequence that were not computed when it was last admitted."""
        return self._sequences[session].cached

    def add(self, session: int, tokens: Sequence[int], prompt: int | None = None) -> None:
        """Queue a sequence that knows ``tokens`` and wants more.

        The first ``prompt`` of them are its prompt (default: all), the rest is output so far.

        Raises :class:`QueueFull`, and ValueError for tokens that leave no room in the context.
        """
        if not 0 < len(tokens) < self.limits.context_length:
            raise ValueError(f"{len(tokens)} tokens in a context of {self.limits.context_length}")
        if session in self._sequences or session in self._prefixes:
            raise ValueError(f"session {session} is in use")
        if len(self._waiting) >= self.limits.waiting:
            raise QueueFull(f"{len(self._waiting)} sequences are waiting")
        self._arrivals += 1
        sequence = _Sequence(session, self._arrivals, list(tokens), prompt or len(tokens))
        self._sequences[session] = sequence
        self._waiting.append(sequence)

    def append(self, session: int, token: int) -> None:
        """The next token of a sequence has been drawn. One that has finished is left alone."""
        sequence = self._sequences.get(session)
        if sequence is not None:
            if len(sequence.tokens) >= self.limits.context_length:
                raise ValueError(f"session {session} is at the end of its context")
            sequence.tokens.append(token)

    def finish(self, session: int, *, keep: bool = True) -> None:
        """A sequence is over, or given up; its blocks are free or (``keep``) serve as a prefix."""
        sequence = self._sequences.pop(session, None)
        if sequence is None:
            return
        if sequence not in self._running:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        size = self.limits.block_size
        shareable = min(sequence.scheduled, sequence.prompt) // size * size
        if not keep or not shareable:
            self._prefixes.forget(sequence)
            self._close(session)
            return
        self._tables.truncate(session, shareable)
        self._commands.append(Command("trim", session, length=shareable))
        sequence.scheduled = shareable
        for covered in self._prefixes.keep(sequence):
            self._close(covered)
        while self._prefixes.kept > self.limits.cached:
            self._close(self._prefixes.evict())

    def plan(self) -> Step | None:
        """The next step, or None when nothing can run now."""
        self._steps += 1
        self._admit()
        work = self._decode_rows()
        work += self._chunks(self.limits.mixed_chunk if work else self.limits.chunk)
        commands, self._commands = tuple(self._commands), []
        if not work and not commands:
            return None
        return Step(commands, tuple(work))

    def _decode_rows(self) -> list[Work]:
        ready = [s for s in self._running if s.pending == 1]
        ready.sort(key=lambda s: (s.turn, s.arrival))
        chosen: list[tuple[_Sequence, Work]] = []
        for sequence in ready:
            # It may have been preempted for one before it.
            if sequence in self._running and self._grow(sequence):
                chosen.append((sequence, self._take(sequence, 1)))
        return [work for sequence, work in chosen if sequence in self._running]

    def _take(self, sequence: _Sequence, count: int) -> Work:
        past = sequence.scheduled
        sequence.scheduled += count
        sequence.turn = self._steps
        tokens = sequence.tokens[past : past + count]
        return Work(sequence.session, past, tokens, samples=not sequence.pending)

    def _grow(self, sequence: _Sequence) -> bool:
        """Blocks for all tokens of a running sequence; False when it had to give way itself."""
        while self._cost(sequence) > self._tables.free:
            if self._prefixes.kept:
                self._close(self._prefixes.evict())
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._tables.extend(sequence.session, len(sequence.tokens))
        return True

    def _cost(self, sequence: _Sequence) -> int:
        held = self._tables.length(sequence.session)
        return self._tables.cost(sequence.session, held, len(sequence.tokens))

    def _preempt(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._prefixes.forget(sequence)
        self._close(sequence.session)
        sequence.scheduled = 0
        insort(self._waiting, sequence, key=lambda s: s.arrival)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.sequences:
            sequence = self._waiting[0]
            if not self._place(sequence):
                return
            del self._waiting[0]
            insort(self._running, sequence, key=lambda s: s.arrival)
            self._prefixes.run(sequence)

    def _place(self, sequence: _Sequence) -> bool:
        """Blocks for all tokens of a waiting sequence, or False."""
        session = sequence.session
        source, shared = self._prefixes.longest(sequence.tokens[: sequence.prompt])
        before = len(self._commands)
        if shared:
            self._tables.fork(source, session, shared)
            self._commands.append(Command("fork", session, sequence.prompt, source, shared))
        else:
            self._tables.open(session)
            self._commands.append(Command("open", session, sequence.prompt))
        # One block more for each that runs, so that none has to give way right afterwards.
        wanted = self._cost(sequence) + len(self._running)
        while wanted > self._tables.free and self._prefixes.kept:
            self._close(self._prefixes.evict())
        if wanted > self._tables.free:
            self._close(session)
            if len(self._commands) == before + 2:  # only its own: opened and closed again
                del self._commands[before:]
            return False
        self._tables.extend(session, len(sequence.tokens))
        sequence.scheduled = sequence.cached = shared
        return True

    def _chunks(self, room: int) -> list[Work]:
        reading = [s for s in self._running if s.pending > 1]
        counts = share_room([s.pending for s in reading], room)
        chosen = [
            (sequence, without_lone_row(sequence.prompt - sequence.scheduled, count))
            for sequence, count in zip(reading, counts, strict=True)
        ]
        return [self._take(sequence, count) for sequence, count in chosen if count]

    def _close(self, session: int) -> None:
        self._tables.close(session)
        self._commands.append(Command("close", session))


def share_room(pending: Sequence[int], room: int) -> list[int]:
    """Share ``room`` tokens among prompts that have ``pending`` tokens left, oldest first.

    Half is for the oldest, the rest for the shortest first; what they leave is for the oldest.
    """
    counts = [0] * len(pending)
    if not pending:
        return counts
    counts[0] = min(pending[0], room if len(pending) == 1 else -(-room // 2))
    left = room - counts[0]
    for number in sorted(range(1, len(pending)), key=lambda i: pending[i]):
        counts[number] = min(pending[number], left)
        left -= counts[number]
    counts[0] += min(pending[0] - counts[0], left)
    return counts


def without_lone_row(left: int, count: int) -> int:
    """At most ``count`` tokens of a sequence with ``left`` tokens of prompt to read.

    None of output behind them, and such that neither they nor what remains of the prompt are a
    single row (unless that is all of it). With nothing ``left`` it is ``count``.
    """
    if left < 1:
        return count
    count = min(count, left)
    if left > 1 and count == left - 1:
        count -= 1
    return 0 if left > 1 and count == 1 else count
