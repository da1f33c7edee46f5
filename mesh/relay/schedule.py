"""Which rows the head sends into the ring next. Pure.

A *step* is one micro-batch on its way through all stages. Rows of sessions that wait for nothing
are put into steps so that

* at most one step per stage is under way, so that every stage can be busy and none has a queue;
* sessions that are generating share one step while they are few, because a step costs a stage about
  as much for four sessions as for one. From eight on they may be spread over several steps, so that
  one stage computes while another does: over as many as pay (see ``overlap``);
* a prompt goes in chunks, several on their way at once, so that its prefill overlaps across stages;
  rows of sessions that are generating ride along, and prompts share a step's budget, so that a long
  one delays neither. A prompt is never left with a chunk of a single row, which a stage computes
  otherwise in the last bits (see :mod:`inference.stage`).
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.batching import without_lone_row
from mesh.relay.frames import MAX_ROWS, Row
from mesh.relay.overlap import Overlap

# Measured with an int4 model of 30 layers over two stages: chunks of 64 make the best overlap, and
# the paged engine loses nothing with small ones.
CHUNK = 64
PREFILL_BUDGET = 128  # tokens of prompts in one step
OVERLAP_FROM = 8  # sessions that generate; below, two steps under way are slower than one
_PER_STEP = 4  # and never fewer sessions in a step than this when they are spread


@dataclass(frozen=True, slots=True)
class Step:
    """``tokens`` are the ids of all rows, one row after the other."""

    number: int
    rows: tuple[Row, ...]
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Progress:
    tokens: list[int]  # prompt and output so far
    prompt: int
    capacity: int  # tokens that the stages have reserved
    sent: int = 0
    generating: bool = False  # has had a token, or is about to: its last known row is a single one

    @property
    def pending(self) -> int:
        return min(len(self.tokens), self.capacity) - self.sent


@dataclass(slots=True)
class _UnderWay:
    decodes: bool  # it has rows of sessions that are generating
    prompts: bool  # and of others
    sessions: set[int]  # those that have not ended since


class Schedule:
    """The rows of one chain. ``stages`` bounds the steps under way."""

    def __init__(
        self,
        stages: int,
        *,
        chunk: int = CHUNK,
        prefill_budget: int = PREFILL_BUDGET,
        overlap_from: int = OVERLAP_FROM,
    ) -> None:
        self._stages = stages
        self._chunk = chunk
        self._budget = prefill_budget
        self._overlap_from = overlap_from
        self._overlap = Overlap()
        self._sessions: dict[int, _Progress] = {}  # in order of arrival
        self._under_way: dict[int, _UnderWay] = {}
        self._next_step = 1  # 0 is for rows that belong to no step of this schedule

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def add(self, session: int, tokens: list[int], prompt: int, capacity: int) -> None:
        """``tokens``: what is known of the session, at least one; the stages have seen none.

        The first ``prompt`` of them are its prompt.
        """
        if session in self._sessions or not tokens:
            raise ValueError(f"session {session} is there already, or has no token")
        self._sessions[session] = _Progress(list(tokens), prompt, capacity)

    def remove(self, session: int) -> None:
        """A session that has ended; its rows under way no longer count. Unknown is fine."""
        if self._sessions.pop(session, None) is None:
            return
        for number, step in list(self._under_way.items()):
            step.sessions.discard(session)
            if not step.sessions:
                del self._under_way[number]

    def known(self, session: int) -> list[int]:
        """The session's token ids, prompt and output."""
        return self._sessions[session].tokens

    def sent(self, session: int) -> int:
        return self._sessions[session].sent

    def expects(self, session: int, position: int) -> bool:
        """Is the token that follows ``position`` the one that the session waits for?"""
        progress = self._sessions.get(session)
        return progress is not None and progress.sent == len(progress.tokens) == position + 1

    def token(self, session: int, token: int) -> None:
        """The next token of a session that :meth:`expects` it."""
        progress = self._sessions[session]
        progress.tokens.append(token)
        progress.generating = True

    def grow(self, session: int, capacity: int) -> None:
        self._sessions[session].capacity = capacity

    def done(self, step: int) -> set[int]:
        """Nothing is left of a step that was under way; its sessions."""
        self._overlap.disturbed()
        found = self._under_way.pop(step, None)
        return set() if found is None else found.sessions

    def stepped(self, step: int, tokens: int, now: float) -> set[int]:
        """A step has left the last stage at ``now`` seconds, with ``tokens``; its sessions."""
        found = self._under_way.pop(step, None)
        if found is None:
            return set()
        generating = self._generating
        if found.prompts or generating < self._overlap_from:
            self._overlap.disturbed()
        else:
            self._overlap.stepped(generating, self._most_steps(generating), tokens, now)
        return found.sessions

    def restart(self, sent: dict[int, int]) -> None:
        """After a recovery nothing is under way, and the first stage has seen ``sent`` tokens."""
        self._overlap.disturbed()
        self._under_way.clear()
        for session, count in sent.items():
            if (progress := self._sessions.get(session)) is not None:
                progress.sent = count

    def next(self) -> Step | None:
        """The next step to send, or None while there is nothing to send or too much under way."""
        if len(self._under_way) >= self._stages:
            return None
        ready = [n for n, p in self._sessions.items() if p.generating and p.pending == 1]
        prompts = [
            n
            for n, p in self._sessions.items()
            if p.pending > 1 or (p.pending == 1 and not p.generating)
        ]
        generating = self._generating
        if ready:
            spread = self._spread(generating)
            decoding = sum(1 for step in self._under_way.values() if step.decodes)
            ready = ready[: -(-generating // spread)] if decoding < spread else []
        if not ready and not prompts:
            return None
        rows = [self._row(session, 1) for session in ready[:MAX_ROWS]]
        decoding_rows = len(rows)
        budget = self._budget
        for session in prompts[: MAX_ROWS - len(rows)]:
            progress = self._sessions[session]
            count = min(progress.pending, self._chunk, budget)
            count = without_lone_row(progress.prompt - progress.sent, count)
            if count > 0:
                rows.append(self._row(session, count))
                budget -= count
        if not rows:
            return None
        return self._send(rows, bool(ready), prompts=len(rows) > decoding_rows)

    def _spread(self, generating: int) -> int:
        """Over how many steps the sessions that generate are spread."""
        if generating < self._overlap_from:
            return 1
        return self._overlap.choose(generating, self._most_steps(generating))

    def _most_steps(self, generating: int) -> int:
        return max(1, min(self._stages, generating // _PER_STEP))

    @property
    def _generating(self) -> int:
        return sum(1 for progress in self._sessions.values() if progress.generating)

    def _row(self, session: int, count: int) -> Row:
        progress = self._sessions[session]
        end = progress.sent + count
        return Row(session, progress.sent, count, sample=end == len(progress.tokens))

    def _send(self, rows: list[Row], decodes: bool, *, prompts: bool) -> Step:
        tokens: list[int] = []
        for row in rows:
            progress = self._sessions[row.session]
            tokens += progress.tokens[row.position : row.end]
            progress.sent = row.end
        step = Step(self._next_step, tuple(rows), tuple(tokens))
        self._under_way[step.number] = _UnderWay(decodes, prompts, {row.session for row in rows})
        self._next_step += 1
        return step
