"""One stage at work: frames that have arrived go through it in batches, its output goes on.

Everything that has arrived from all chains is one batch: a step of the stage takes whole frames in
order of arrival, up to a bound on tokens and at most one row per session. Each frame that went in
comes out as a frame, so the micro-batches of a chain stay what its head made of them.

The stage computes in a thread; everything else here happens in the trio thread, between steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import outcome
import trio
from numpy.typing import NDArray

from inference.paged import StageRange
from inference.sampling import Sampled as Draw
from inference.sampling import Sampler, SamplingError, sample
from inference.stage import Part, StageRefusal, StepBatch
from mesh.identity import PeerId
from mesh.relay.frames import Encoding, Row, StepHeader, decode, encode, not_finite, rows_of
from mesh.relay.kept import DEFAULT_BYTES, KeptOutput, Piece
from mesh.relay.messages import Refused, RefusedSession, Sampled, Tokens, TopLogprob
from mesh.relay.refusal import Refusal
from mesh.relay.schedule import Step
from mesh.relay.sessions import Chain, Session, SessionTable, StageFacts

MAX_STEP_TOKENS = 256  # frames are put together up to this many tokens in one step
REPLAY_TOKENS = 128  # of one session in one frame
_T = TypeVar("_T")


class StageEngine(Protocol):
    """What the relay uses of :class:`inference.stage.Stage`."""

    @property
    def range(self) -> StageRange: ...
    @property
    def hidden(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    def __contains__(self, session: int) -> bool: ...
    def open(self, session: int) -> None: ...
    def close(self, session: int) -> None: ...
    def step(self, batch: StepBatch) -> NDArray[Any]: ...


class Outlet(Protocol):
    """Where output goes. Called in the trio thread; must not block, order is kept per chain."""

    def activations(self, chain: Chain, header: StepHeader, values: NDArray[np.floating]) -> None:
        """To the next stage."""
        ...

    def tokens(self, chain: Chain, message: Tokens) -> None:
        """To the head."""
        ...

    def refused(self, chain: Chain, message: Refused) -> None:
        """To the head."""
        ...


@dataclass(slots=True, eq=False)
class _Frame:
    """Rows that were let in: of ``chain`` at ``epoch``, each with its session."""

    chain: Chain
    epoch: int
    step: int
    rows: list[tuple[Session, Row]]
    values: NDArray[Any]  # int64 [tokens], or float [tokens, hidden]
    spent: tuple[float, ...]

    @property
    def late(self) -> bool:
        return self.epoch != self.chain.epoch

    def keep_alive(self) -> None:
        """Leave out rows of sessions that have ended."""
        alive = [self.chain.sessions.get(row.session) is session for session, row in self.rows]
        if not all(alive):
            mask = np.repeat(alive, [row.size for _, row in self.rows])
            self.values = self.values[mask]
            self.rows = [entry for entry, live in zip(self.rows, alive, strict=True) if live]


@dataclass(slots=True)
class _Result:
    """Of one step: for a last stage draws by session key, otherwise encoded hidden states for each
    frame, of the rows that have not failed."""

    failed: dict[int, Refusal]  # by session key
    seconds: float
    hidden: list[tuple[Encoding, NDArray[np.floating]]] | None = None
    draws: dict[int, Draw] | None = None


class StageHost:
    """Runs one stage for all chains that it is in.

    ``model`` is the digest of the model that the stage was cut from. ``kept_bytes`` bounds the
    output that is kept for replay.
    """

    def __init__(
        self, stage: StageEngine, model: str, outlet: Outlet, *, kept_bytes: int = DEFAULT_BYTES
    ) -> None:
        self.facts = StageFacts(
            model=model,
            first=stage.range.first,
            last=stage.range.last,
            layers=stage.range.layers,
            hidden=stage.hidden,
            block_size=stage.block_size,
            blocks=stage.blocks,
            context_length=stage.context_length,
        )
        self.table = SessionTable(self.facts)
        self.kept = KeptOutput(kept_bytes)
        self._stage = stage
        self._outlet = outlet
        self._samplers: dict[int, Sampler] = {}
        self._queue: deque[_Frame] = deque()
        self._ended: list[int] = []  # keys whose blocks are to be freed
        self._deferred: list[Callable[[], None]] = []
        self._step: list[_Frame] = []  # what is being computed
        self._wake = trio.Event()
        self._thread = trio.CapacityLimiter(1)
        self.steps = 0
        self.busy_seconds = 0.0

    # -- what arrives -------------------------------------------------------------------------

    def receive(self, sender: PeerId, header: StepHeader, payload: bytes | memoryview) -> None:
        """A frame from the stage before. Raises :class:`Refusal` when all of it is refused."""
        chain = self.table.expect(sender, header)
        if chain is None:
            return
        if self.facts.is_first:
            raise Refusal("wrong_peer", "the first stage takes no activations")
        rows = rows_of(header)
        values = decode(header, payload, self.facts.hidden)
        broken = {
            session: Refusal("not_finite", "an activation is infinite or not a number")
            for session in not_finite(rows, values)
        }
        self._let_in(chain, header.step, rows, values, header.spent, broken)

    def submit(self, me: PeerId, chain_id: bytes, epoch: int, step: Step) -> None:
        """Rows of token ids from this node's own head, for a first stage."""
        header = StepHeader(
            chain=chain_id, epoch=epoch, step=step.number, encoding="f16", rows=step.rows
        )
        chain = self.table.expect(me, header)
        if chain is not None:
            values = np.array(step.tokens, np.int64)
            self._let_in(chain, step.number, list(step.rows), values, (), {})

    def _let_in(
        self,
        chain: Chain,
        step: int,
        rows: list[Row],
        values: NDArray[Any],
        spent: tuple[float, ...],
        refused: dict[int, Refusal],
    ) -> None:
        refused = refused | self.table.accept(chain, [r for r in rows if r.session not in refused])
        good = [row.session not in refused for row in rows]
        if refused:
            values = values[np.repeat(good, [row.size for row in rows])]
            rows = [row for row, ok in zip(rows, good, strict=True) if ok]
            self._refuse(chain, chain.epoch, step, refused, ended=not rows)
        if rows:
            entries = [(chain.sessions[row.session], row) for row in rows]
            self._queue.append(_Frame(chain, chain.epoch, step, entries, values, spent))
            self._wake.set()

    def _refuse(
        self, chain: Chain, epoch: int, step: int, why: dict[int, Refusal], *, ended: bool
    ) -> None:
        sessions = tuple(
            RefusedSession(session=number, code=refusal.code, message=refusal.message[:512])
            for number, refusal in why.items()
        )
        self._outlet.refused(
            chain,
            Refused(chain=chain.id, epoch=epoch, step=step, ended=ended, sessions=sessions),
        )

    def free(self, sessions: Iterable[Session]) -> None:
        """Sessions that the table has ended: give back what they hold here."""
        for session in sessions:
            self.kept.drop(session.key)
            self._ended.append(session.key)
        if not self._step:
            self._clear()

    def _clear(self) -> None:
        for key in self._ended:
            self._samplers.pop(key, None)
            self._stage.close(key)
        self._ended.clear()

    async def between_steps(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` while no step is running; its exception comes back to the caller."""
        if not self._step:
            return action()
        done = trio.Event()
        results: list[outcome.Outcome[_T]] = []

        def run() -> None:
            results.append(outcome.capture(action))
            done.set()

        self._deferred.append(run)
        await done.wait()
        return results[0].unwrap()

    def replay(self, chain: Chain, sessions: Sequence[tuple[Session, int]]) -> None:
        """Between steps, after sessions were rewound: send kept output from a position on again."""
        for session, start in sessions:
            self._samplers.pop(session.key, None)
            self.kept.truncate(session.key, session.past)
            if self.kept.kept_from(session.key, session.past) > start:
                raise Refusal("not_kept", f"output of session {session.number} is gone")
        for session, start in sessions:
            for piece in self.kept.pieces(session.key, start, REPLAY_TOKENS):
                row = Row(session.number, piece.position, len(piece.values), piece.sample)
                header = StepHeader(
                    chain=chain.id,
                    epoch=chain.epoch,
                    step=0,
                    encoding=piece.encoding,
                    rows=(row,),
                    spent=(0.0,) * (chain.rank + 1),
                )
                self._outlet.activations(chain, header, piece.values)

    def busy_with(self, chain_id: bytes) -> bool:
        """Do rows of the chain wait here, or are they being computed?"""
        frames = (*self._queue, *self._step)
        return any(frame.chain.id == chain_id and not frame.late for frame in frames)

    # -- steps --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled; a step that is running then is finished first."""
        while True:
            frames = self._take()
            if not frames:
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            self._step = frames
            try:
                result = await trio.to_thread.run_sync(self._compute, frames, limiter=self._thread)
            finally:
                self._step = []
                self._clear()
            await trio.lowlevel.checkpoint_if_cancelled()
            self._finish(frames, result)
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                action()

    def _take(self) -> list[_Frame]:
        taken: list[_Frame] = []
        sessions: set[int] = set()
        tokens = 0
        while self._queue:
            frame = self._queue[0]
            frame.keep_alive()
            if frame.late or not frame.rows:
                self._queue.popleft()
                continue
            keys = {session.key for session, _ in frame.rows}
            if taken and (tokens + len(frame.values) > MAX_STEP_TOKENS or sessions & keys):
                break
            taken.append(self._queue.popleft())
            sessions |= keys
            tokens += len(frame.values)
            for session, row in frame.rows:
                session.started = row.end
        return taken

    def _compute(self, frames: list[_Frame]) -> _Result:
        """In the stage's thread: one step. A session that the engine refuses is left out."""
        started = time.perf_counter()
        entries = [entry for frame in frames for entry in frame.rows]
        values = [frame.values for frame in frames]
        # A copy of the runtime's own: what has arrived is a view that must not be written to.
        dtype = np.int64 if self.facts.is_first else np.float32
        batch = np.concatenate(values, dtype=dtype)
        failed: dict[int, Refusal] = {}
        while True:
            parts = [Part(session.key, row.position, row.size) for session, row in entries]
            sampled = self._to_sample(entries)
            try:
                for part in parts:
                    if part.session not in self._stage:
                        self._stage.open(part.session)
                output = self._stage.step(StepBatch(parts, batch, [at for at, _, _ in sampled]))
                break
            except StageRefusal as refusal:
                found = (
                    [refusal.session] if refusal.session is not None else [p.session for p in parts]
                )
                reason = f"{refusal.reason}: {refusal}"
            except Exception as error:
                found = [part.session for part in parts]
                reason = f"{type(error).__name__}: {error}"
            failed |= {key: Refusal("engine_failed", reason) for key in found}
            good = [session.key not in failed for session, _ in entries]
            batch = batch[np.repeat(good, [row.size for _, row in entries])]
            entries = [entry for entry, ok in zip(entries, good, strict=True) if ok]
            if not entries:
                return _Result(failed, time.perf_counter() - started)
        result = _Result(failed, 0.0)
        if self.facts.is_last:
            result.draws = self._draw(output, sampled, failed)
        else:
            result.hidden = _encode(frames, output, failed)
        result.seconds = time.perf_counter() - started
        return result

    def _to_sample(self, entries: list[tuple[Session, Row]]) -> list[tuple[int, Session, Row]]:
        """Row numbers of the batch to draw from, each with its session."""
        found = []
        end = 0
        for session, row in entries:
            end += row.size
            if self.facts.is_last and row.sample and row.end > session.emit_from:
                found.append((end - 1, session, row))
        return found

    def _draw(
        self,
        logits: NDArray[np.float32],
        rows: list[tuple[int, Session, Row]],
        failed: dict[int, Refusal],
    ) -> dict[int, Draw]:
        samplers = [self._sampler(session) for _, session, _ in rows]
        positions = [row.end - session.prompt for _, session, row in rows]
        draws: dict[int, Draw] = {}
        results = sample(logits, samplers, positions) if rows else []
        for (_, session, _), sampler, draw in zip(rows, samplers, results, strict=True):
            if isinstance(draw, SamplingError):
                failed[session.key] = Refusal("engine_failed", str(draw))
                continue
            draws[session.key] = draw
            sampler.count(draw.token_id)
            if session.history is not None:
                session.history.append(draw.token_id)
        return draws

    def _sampler(self, session: Session) -> Sampler:
        sampler = self._samplers.get(session.key)
        if sampler is None:
            if session.sampling is None:
                raise ValueError("a session of a last stage without sampling parameters")
            history = session.history or []
            sampler = Sampler(session.sampling, history[: session.prompt])
            for token in history[session.prompt :]:
                sampler.count(token)
            self._samplers[session.key] = sampler
        return sampler

    def _finish(self, frames: list[_Frame], result: _Result) -> None:
        self.steps += 1
        self.busy_seconds += result.seconds
        for number, frame in enumerate(frames):
            alive = []  # with the row's place in the frame's output
            refused: dict[int, Refusal] = {}
            at = 0
            for session, row in frame.rows:
                if session.key in result.failed:
                    refused[row.session] = result.failed[session.key]
                    continue
                if frame.chain.sessions.get(row.session) is session:
                    session.past = row.end
                    alive.append((session, row, at))
                at += row.size
            if refused and not frame.late:
                self._refuse(frame.chain, frame.epoch, frame.step, refused, ended=not alive)
            if not alive:
                continue
            spent = (*frame.spent, result.seconds)
            if result.hidden is not None:
                self._send_hidden(frame, alive, *result.hidden[number], spent)
            elif not frame.late:
                self._send_tokens(frame, alive, result.draws or {}, spent)

    def _send_tokens(
        self,
        frame: _Frame,
        alive: list[tuple[Session, Row, int]],
        draws: dict[int, Draw],
        spent: tuple[float, ...],
    ) -> None:
        sampled = tuple(
            Sampled(
                session=row.session,
                position=row.end - 1,
                token=draw.token_id,
                logprob=None if draw.logprob is None else min(0.0, draw.logprob),
                top=tuple(TopLogprob(token=t, logprob=min(0.0, p)) for t, p in draw.top),
            )
            for session, row, _ in alive
            if (draw := draws.get(session.key)) is not None
        )
        chain = frame.chain
        message = Tokens(
            chain=chain.id, epoch=frame.epoch, step=frame.step, sampled=sampled, spent=spent
        )
        self._outlet.tokens(chain, message)

    def _send_hidden(
        self,
        frame: _Frame,
        alive: list[tuple[Session, Row, int]],
        encoding: Encoding,
        hidden: NDArray[np.floating],
        spent: tuple[float, ...],
    ) -> None:
        rows: list[Row] = []
        values: list[NDArray[np.floating]] = []
        for session, row, at in alive:
            output = hidden[at : at + row.size]
            self.kept.add(session.key, Piece(row.position, row.sample, encoding, output))
            skip = max(0, session.emit_from - row.position)
            if skip < row.size:
                rows.append(Row(row.session, row.position + skip, row.size - skip, row.sample))
                values.append(output[skip:])
        if not rows or frame.late:
            return
        header = StepHeader(
            chain=frame.chain.id,
            epoch=frame.epoch,
            step=frame.step,
            encoding=encoding,
            rows=tuple(rows),
            spent=spent,
        )
        self._outlet.activations(
            frame.chain, header, values[0] if len(values) == 1 else np.concatenate(values)
        )


def _encode(
    frames: list[_Frame], output: NDArray[np.float32], failed: dict[int, Refusal]
) -> list[tuple[Encoding, NDArray[np.floating]]]:
    encoded = []
    start = 0
    for frame in frames:
        rows = [entry for entry in frame.rows if entry[0].key not in failed]
        sizes = [row.size for _, row in rows]
        exact = np.repeat(np.array([session.exact for session, _ in rows], np.bool_), sizes)
        encoded.append(encode(output[start : start + len(exact)], exact))
        start += len(exact)
    return encoded
