"""One stage at work: frames that have arrived go through it in batches, its output goes on.

Everything that has arrived from all chains is one batch: a step of the stage takes whole frames in
order of arrival, up to a bound on tokens and at most one row per session. A frame that has to wait
for the next step lets others pass, so a session of which much comes at once, as in a replay, holds
up no other. Each frame that went in comes out as a frame, so the micro-batches of a chain stay what
its head made of them.

A thread waits for the runtime; everything else here happens in the trio thread, between steps.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import outcome
import trio
from numpy.typing import NDArray

from inference.sampling import Sampled as Draw
from mesh.identity import PeerId
from mesh.relay.activations import Encoding
from mesh.relay.compute import Computer, Frame, Result, StageEngine
from mesh.relay.frames import Row, StepHeader, decode, not_finite, rows_of, step_body
from mesh.relay.kept import DEFAULT_BYTES, KeptOutput, Piece
from mesh.relay.messages import Open, Refused, RefusedSession, tokens_body
from mesh.relay.refusal import Refusal
from mesh.relay.schedule import Step
from mesh.relay.sessions import Chain, Session, SessionTable, StageFacts

MAX_STEP_TOKENS = 256  # frames are put together up to this many tokens in one step
# Of one session in one frame. Others wait for a step that computes it, as they do for a chunk of a
# new prompt: it is no longer than that.
REPLAY_TOKENS = 64
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Outlet(Protocol):
    """Where output goes. Called in the trio thread; must not block, order is kept per chain."""

    def activations(self, chain: Chain, body: dict[str, Any], values: NDArray[Any]) -> None:
        """A step frame, to the next stage."""
        ...

    def tokens(self, chain: Chain, body: dict[str, Any]) -> None:
        """Tokens, to the head."""
        ...

    def refused(self, chain: Chain, message: Refused) -> None:
        """To the head."""
        ...


class StageHost:
    """Runs one stage for all chains that it is in.

    ``model`` is the digest of the model that the stage was cut from. ``kept_bytes`` bounds the
    output that is kept for replay. ``on_load`` is called when sessions have come or gone.
    """

    def __init__(
        self,
        stage: StageEngine,
        model: str,
        outlet: Outlet,
        *,
        kept_bytes: int = DEFAULT_BYTES,
        on_load: Callable[[], None] = lambda: None,
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
        self._on_load = on_load
        self._computer = Computer(stage)
        self._outlet = outlet
        self._queue: deque[Frame] = deque()
        self._ended: list[int] = []  # keys whose blocks are to be freed
        self._deferred: list[Callable[[], None]] = []
        self._step: list[Frame] = []  # what is being computed
        self._results: deque[outcome.Outcome[Result]] = deque()  # of the step that has ended
        self._running = False  # steps may begin
        self._wake: socket.socket  # tells the trio thread that a step has ended
        self.steps = 0
        self.busy_seconds = 0.0

    # -- what arrives -------------------------------------------------------------------------

    def receive(
        self, sender: PeerId, header: StepHeader, payload: bytes | bytearray | memoryview
    ) -> None:
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
        chain = self.table.current(me, chain_id, epoch)
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
            self._queue.append(Frame(chain, chain.epoch, step, entries, values, spent))
            self._begin()

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

    def open(
        self, sender: PeerId, message: Open, histories: Sequence[list[int]]
    ) -> list[RefusedSession]:
        """Open sessions (see :meth:`SessionTable.open`); returns those refused."""
        refused, ended = self.table.open(sender, message, histories)
        self.free(ended)
        self._on_load()
        return refused

    def free(self, sessions: Collection[Session]) -> None:
        """Sessions that the table has ended: give back what they hold here."""
        for session in sessions:
            self.kept.drop(session.key)
            self._ended.append(session.key)
        if not self._step:
            self._clear()
        if sessions:
            self._on_load()

    def _clear(self) -> None:
        self._computer.close(self._ended)
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
        for session, _ in sessions:  # all of them, whatever becomes of the first
            self._computer.forget_draws(session.key)
            self.kept.truncate(session.key, session.past)
        for session, start in sessions:
            if self.kept.kept_from(session.key, session.past) > start:
                raise Refusal("not_kept", f"output of session {session.number} is gone")
        for session, start in sessions:
            prompt = session.prompt
            for piece in self.kept.pieces(session.key, start, REPLAY_TOKENS, prompt=prompt):
                row = (session.number, piece.position, len(piece.values), piece.sample)
                spent = (0.0,) * (chain.rank + 1)
                body = step_body(chain.id, chain.epoch, 0, piece.encoding, [row], spent)
                self._outlet.activations(chain, body, piece.values)

    def busy_with(self, chain_id: bytes) -> bool:
        """Do rows of the chain wait here, or are they being computed?"""
        frames = (*self._queue, *self._step)
        return any(frame.chain.id == chain_id and not frame.late for frame in frames)

    # -- steps --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled; a step that is running then is finished first.

        Steps begin where their frames come in: a task would get its turn after whatever else woke
        up, and with many clients that is milliseconds in which nothing is computed. Their ends come
        by a socket: that takes two thirds of the time of trio's own way in, once a token.
        """
        woken, self._wake = socket.socketpair()
        with woken, self._wake:
            woken.setblocking(False)
            self._running = True
            self._begin()
            try:
                while True:
                    await self._step_ended(woken)
            finally:
                self._running = False
                with trio.CancelScope(shield=True):
                    while self._step:
                        await self._step_ended(woken)

    async def _step_ended(self, woken: socket.socket) -> None:
        await trio.lowlevel.wait_readable(woken)
        woken.recv(1)
        self._end(self._results.popleft())

    def _begin(self) -> None:
        """Start the next step, if there is one and none is running."""
        if self._step or not self._running or not (frames := self._take()):
            return
        self._step = frames
        begun = outcome.capture(self._computer.begin, frames)
        trio.lowlevel.start_thread_soon(
            lambda: self._computer.finish(begun.unwrap()), self._deliver
        )

    def _deliver(self, result: outcome.Outcome[Result]) -> None:
        """Called in the thread that has waited."""
        self._results.append(result)
        self._wake.send(b"\0")

    def _end(self, result: outcome.Outcome[Result]) -> None:
        try:
            self._clear()
            if self._running:
                self._finish(self._step, result.unwrap())
        except Exception as error:
            # Some frame of these led where nobody foresaw. They are given up, and not the stage.
            _log.exception("a step failed")
            self._give_up(self._step, f"{type(error).__name__}: {error}")
        finally:  # whatever that leads to, there is no end to be waited for any more
            self._step = []
        self._clear()
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()
        self._begin()

    def _give_up(self, frames: Iterable[Frame], reason: str) -> None:
        for frame in frames:
            if not frame.late:
                why = {row.session: Refusal("engine_failed", reason) for _, row in frame.rows}
                self._refuse(frame.chain, frame.epoch, frame.step, why, ended=True)

    def _take(self) -> list[Frame]:
        taken: list[Frame] = []
        left: deque[Frame] = deque()
        seen: set[int] = set()  # sessions: what comes later of them stays behind
        tokens = 0
        for frame in self._queue:
            frame.keep_alive()
            if frame.late or not frame.rows:
                continue
            keys = {session.key for session, _ in frame.rows}
            if taken and (tokens + len(frame.values) > MAX_STEP_TOKENS or seen & keys):
                left.append(frame)
            else:
                taken.append(frame)
                tokens += len(frame.values)
                for session, row in frame.rows:
                    session.started = row.end
            seen |= keys
        self._queue = left
        return taken

    def _finish(self, frames: list[Frame], result: Result) -> None:
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
        frame: Frame,
        alive: list[tuple[Session, Row, int]],
        draws: dict[int, Draw],
        spent: tuple[float, ...],
    ) -> None:
        drawn = [
            (row.session, row.end - 1, draw)
            for session, row, _ in alive
            if (draw := draws.get(session.key)) is not None
        ]
        body = tokens_body(frame.chain.id, frame.epoch, frame.step, drawn, spent)
        self._outlet.tokens(frame.chain, body)

    def _send_hidden(
        self,
        frame: Frame,
        alive: list[tuple[Session, Row, int]],
        encoding: Encoding,
        hidden: NDArray[Any],
        spent: tuple[float, ...],
    ) -> None:
        rows: list[tuple[int, int, int, bool]] = []
        values: list[NDArray[Any]] = []
        for session, row, at in alive:
            output = hidden[at : at + row.size]
            self.kept.add(session.key, Piece(row.position, row.sample, encoding, output))
            skip = max(0, session.emit_from - row.position)
            if skip < row.size:
                rows.append((row.session, row.position + skip, row.size - skip, row.sample))
                values.append(output[skip:])
        if not rows or frame.late:
            return
        body = step_body(frame.chain.id, frame.epoch, frame.step, encoding, rows, spent)
        self._outlet.activations(
            frame.chain, body, values[0] if len(values) == 1 else np.concatenate(values)
        )
