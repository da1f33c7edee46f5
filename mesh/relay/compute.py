"""One step of a stage: rows of frames in, draws or hidden states out.

It is begun where the frames are, so that the runtime computes at once, and waited for in a thread.

A session that the engine refuses, or whose logits are no numbers, fails alone: the step is run for
the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inference.paged import StageRange
from inference.sampling import Sampled as Draw
from inference.sampling import Sampler, SamplingError, sample
from inference.stage import Part, StageRefusal, StepBatch
from mesh.relay.activations import Encoding, encode
from mesh.relay.frames import Row
from mesh.relay.refusal import Refusal
from mesh.relay.sessions import Chain, Session


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
    def open(self, session: int, prompt: int | None = None) -> None: ...
    def close(self, session: int) -> None: ...
    def step(self, batch: StepBatch) -> NDArray[Any]: ...
    def begin(self, batch: StepBatch) -> None: ...
    def finish(self) -> NDArray[Any]: ...


@dataclass(slots=True, eq=False)
class Frame:
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
class Result:
    """Of one step: for a last stage draws by session key, otherwise encoded hidden states for each
    frame, of the rows that have not failed."""

    failed: dict[int, Refusal]  # by session key
    seconds: float
    hidden: list[tuple[Encoding, NDArray[Any]]] | None = None
    draws: dict[int, Draw] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A step that the runtime computes, of ``entries``; ``sampled`` are those to draw from, with
    their row numbers in the batch. ``failed`` are those that it could not be begun for."""

    started: float
    frames: list[Frame]
    entries: list[tuple[Session, Row]]
    sampled: list[tuple[int, Session, Row]]
    failed: dict[int, Refusal]


class Computer:
    """A stage with the samplers of its sessions. Nothing here may be called while a step runs,
    from :meth:`begin` to the end of :meth:`finish`."""

    def __init__(self, stage: StageEngine) -> None:
        self._stage = stage
        self._is_last = stage.range.is_last
        self._dtype = np.int64 if stage.range.is_first else np.float32
        self._samplers: dict[int, Sampler] = {}

    def close(self, keys: Iterable[int]) -> None:
        """Sessions have ended: free their blocks."""
        for key in keys:
            self.forget_draws(key)
            self._stage.close(key)

    def forget_draws(self, key: int) -> None:
        """A session was rewound: what its sampler has counted is counted again from its history."""
        self._samplers.pop(key, None)

    def begin(self, frames: list[Frame]) -> Begun:
        """Have the runtime compute a step, unless there is nobody that it could be done for.
        :meth:`finish` has to follow."""
        started = time.perf_counter()
        entries = [entry for frame in frames for entry in frame.rows]
        values = [frame.values for frame in frames]
        batch = np.concatenate(values, dtype=self._dtype)
        failed: dict[int, Refusal] = {}
        sampled: list[tuple[int, Session, Row]] = []
        while entries:
            parts = [Part(session.key, row.position, row.size) for session, row in entries]
            sampled = self._to_sample(entries)
            try:
                for session, _ in entries:
                    if session.key not in self._stage:
                        self._stage.open(session.key, session.prompt)
                self._stage.begin(StepBatch(parts, batch, [at for at, _, _ in sampled]))
                break
            except StageRefusal as refusal:
                found = (
                    [refusal.session] if refusal.session is not None else [p.session for p in parts]
                )
                failed |= _failed(found, f"{refusal.reason}: {refusal}")
            except Exception as error:
                failed |= _failed((p.session for p in parts), f"{type(error).__name__}: {error}")
            good = [session.key not in failed for session, _ in entries]
            batch = batch[np.repeat(good, [row.size for _, row in entries])]
            entries = [entry for entry, ok in zip(entries, good, strict=True) if ok]
        return Begun(started, frames, entries, sampled, failed)

    def finish(self, begun: Begun) -> Result:
        """What became of a step; blocks until the runtime is done, in any thread."""
        failed = begun.failed
        result = Result(failed, 0.0)
        if begun.entries:
            try:
                output = self._stage.finish()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                failed |= _failed((session.key for session, _ in begun.entries), reason)
            else:
                if self._is_last:
                    result.draws = self._draw(output, begun.sampled, failed)
                else:
                    result.hidden = encode_frames(begun.frames, output, failed)
        result.seconds = time.perf_counter() - begun.started
        return result

    def _to_sample(self, entries: list[tuple[Session, Row]]) -> list[tuple[int, Session, Row]]:
        """Row numbers of the batch to draw from, each with its session."""
        found = []
        end = 0
        for session, row in entries:
            end += row.size
            if self._is_last and row.sample and row.end > session.emit_from:
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


def _failed(keys: Iterable[int], reason: str) -> dict[int, Refusal]:
    return {key: Refusal("engine_failed", reason) for key in keys}


def encode_frames(
    frames: list[Frame], output: NDArray[np.float32], failed: dict[int, Refusal]
) -> list[tuple[Encoding, NDArray[Any]]]:
    """The output of each frame's rows that have not failed, as it goes on the wire."""
    encoded = []
    start = 0
    for frame in frames:
        tokens = sum(row.size for session, row in frame.rows if session.key not in failed)
        encoded.append(encode(output[start : start + tokens], frame.chain.activations))
        start += tokens
    return encoded
