"""One compiled stage: sessions in, batches of rows through, hidden states or logits out.

A stage trusts nothing that it is told. Sessions' block tables live here and are never sent; what a
batch claims about past lengths, counts and rows is checked against what the stage knows before
anything is allocated or run. A refused batch changes nothing, and :meth:`Stage.refusal` tells
beforehand whether one session's part of a batch would be refused, so that it can be left out for
the sake of the others.

What a row gives hardly depends on its company. The runtime's matrix products give each row the same
to the last bit whatever the number of rows, from two on; a lone row goes another way and differs by
rounding. Attention differs between a row that is a sequence of its own and one inside a longer
sequence, so rows of a prompt always run as a chunk and rows of output one by one, also when a batch
brings many of them because a session is resumed. Measured on the demo model, logits then differ by
1e-5 on average with f32 KV, and by 7e-4 with f16 KV, because rounding what is kept makes more of
it: seeded sampling takes another turn every few hundred tokens with f16, practically never with
f32.

Calls must come from one thread at a time, and while a batch is computed only :meth:`Stage.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from inference.blocks import BlockTables
from inference.paged import SAMPLED_ROWS, PagedModel, StageConfig, StageRange

RefusalReason = Literal[
    "unknown_session",
    "bad_past",  # more tokens claimed than the stage has seen
    "bad_count",
    "context_exceeded",
    "out_of_blocks",
    "bad_input",  # shape, type or value of the rows
    "bad_rows",  # rows to sample that are not in the batch
]


class StageRefusal(Exception):
    """A batch, or one session's part of it, that the stage does not run. Nothing was changed."""

    def __init__(self, reason: RefusalReason, message: str, session: int | None = None) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.session = session


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` rows of one session that follow its first ``past`` tokens.

    ``past`` may be less than what the stage has seen: the rest is forgotten first.
    """

    session: int
    past: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step: the parts' rows one after the other.

    ``rows`` is int64 ``[tokens]`` (token ids, first stage) or float ``[tokens, hidden]``.
    ``sampled`` are the row numbers, ascending, whose logits the last stage is to compute.
    """

    parts: Sequence[Part]
    rows: NDArray[Any]
    sampled: Sequence[int] = ()


class Stage:
    """A stage with its sessions. ``context_length`` bounds a session's tokens."""

    def __init__(self, model: ov.Model, config: StageConfig, *, context_length: int) -> None:
        """Compile. ``model`` is consumed. Raises :class:`inference.paged.UnsupportedModel`."""
        self._paged = PagedModel(model, config)
        self.config = config
        self.context_length = min(context_length, self.blocks * self.block_size)
        self._tables = BlockTables(self.blocks, self.block_size)
        self._prompts: dict[int, int] = {}
        self._wanted = 0  # rows of logits, of the batch that was begun last

    @classmethod
    def read(cls, path: Path, config: StageConfig, *, context_length: int) -> Stage:
        """Load a stage, or a whole model, from its ``.xml``."""
        return cls(ov.Core().read_model(path), config, context_length=context_length)

    @property
    def range(self) -> StageRange:
        return self._paged.range

    @property
    def hidden(self) -> int:
        """Features of the rows at this stage's borders; 0 for a whole model, which has none."""
        return self._paged.hidden

    @property
    def width(self) -> int:
        """Features of the output: the hidden size, or the vocabulary on the last stage."""
        return self._paged.width

    @property
    def block_size(self) -> int:
        return self._paged.block_size

    @property
    def blocks(self) -> int:
        return self._paged.blocks

    @property
    def block_bytes(self) -> int:
        return self._paged.block_bytes

    @property
    def free_blocks(self) -> int:
        return self._tables.free

    @property
    def sessions(self) -> int:
        return len(self._tables)

    def __contains__(self, session: int) -> bool:
        return session in self._tables

    def open(self, session: int, prompt: int | None = None) -> None:
        """``prompt`` tokens are the session's prompt, what comes behind them is its output.

        None: several rows at once are prompt. Otherwise a batch should not bring rows of both in
        one part (it runs, as one chunk).
        """
        self._tables.open(session)
        if prompt is not None:
            self._prompts[session] = prompt

    def fork(self, source: int, target: int, length: int, prompt: int | None = None) -> None:
        """Open ``target`` with the first ``length`` tokens (whole blocks) of ``source``, shared."""
        if source not in self._tables:
            raise StageRefusal("unknown_session", f"session {source} is not open here", source)
        try:
            self._tables.fork(source, target, length)
        except ValueError as error:
            raise StageRefusal("bad_past", str(error), target) from error
        if prompt is not None:
            self._prompts[target] = prompt

    def trim(self, session: int, length: int) -> None:
        """Forget a session's tokens from ``length`` on."""
        if session not in self._tables:
            raise StageRefusal("unknown_session", f"session {session} is not open here", session)
        try:
            self._tables.truncate(session, length)
        except ValueError as error:
            raise StageRefusal("bad_past", str(error), session) from error

    def close(self, session: int) -> None:
        """Free the session's blocks. One that is not open is fine."""
        self._tables.close(session)
        self._prompts.pop(session, None)

    def warm_up(self) -> None:
        """Run a chunk and a single row: the runtime compiles its kernels at first use (0.3 s)."""
        session = -1
        self.open(session)
        past = 0
        for count in (64, 1):
            if past + count <= self.context_length:
                rows: NDArray[Any] = (
                    np.zeros(count, np.int64)
                    if self.range.is_first
                    else np.zeros((count, self.hidden), np.float32)
                )
                sampled = (count - 1,) if self.range.is_last else ()
                self.step(StepBatch((Part(session, past, count),), rows, sampled))
                past += count
        self.close(session)

    def clear(self) -> None:
        """Forget all sessions."""
        self._tables = BlockTables(self.blocks, self.block_size)
        self._prompts.clear()

    def length(self, session: int) -> int:
        """Tokens of the session that this stage has seen."""
        return self._tables.length(session)

    def refusal(self, part: Part) -> StageRefusal | None:
        """Why this part alone could not run now, or None."""
        session = part.session
        if session not in self._tables:
            return StageRefusal("unknown_session", f"session {session} is not open here", session)
        seen = self._tables.length(session)
        if not 0 <= part.past <= seen:
            return StageRefusal(
                "bad_past", f"session {session} is at {seen} tokens, not at {part.past}", session
            )
        if part.count < 1:
            return StageRefusal("bad_count", f"{part.count} rows of session {session}", session)
        if part.past + part.count > self.context_length:
            return StageRefusal(
                "context_exceeded",
                f"session {session} would have {part.past + part.count} tokens, "
                f"more than {self.context_length}",
                session,
            )
        try:
            cost = self._tables.cost(session, part.past, part.past + part.count)
        except ValueError as error:
            return StageRefusal("bad_past", str(error), session)
        if cost > self._tables.free:
            return StageRefusal("out_of_blocks", f"no KV blocks for session {session}", session)
        return None

    def step(self, batch: StepBatch, meanwhile: Callable[[], None] | None = None) -> NDArray[Any]:
        """Run a batch; ``meanwhile`` is called while the runtime computes. See :meth:`begin` and
        :meth:`finish`."""
        self.begin(batch)
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            output = self.finish()
        return output

    def begin(self, batch: StepBatch) -> None:
        """Have the runtime compute a batch. Nothing but :meth:`finish` may be called then.

        Raises :class:`StageRefusal`; RuntimeError when the runtime does not begin.
        """
        rows = self._check(batch)
        past: list[int] = []  # of each run: rows that the runtime takes as one sequence
        counts: list[int] = []
        indices: list[NDArray[np.int32]] = []
        for part in batch.parts:
            if part.past < self._tables.length(part.session):
                self._tables.truncate(part.session, part.past)
            self._tables.extend(part.session, part.past + part.count)
            blocks = self._tables.indices(part.session)
            for begin, count in self._runs(part):
                past.append(begin)
                counts.append(count)
                indices.append(blocks[: -(-(begin + count) // self.block_size)])
        begins = np.array([0, *accumulate(counts)], np.int32)
        block_begins = np.array([0, *accumulate(map(len, indices))], np.int32)
        pasts = np.array(past, np.int32)
        positions = pasts.astype(np.int64)
        if len(rows) > len(past):
            positions = np.repeat(positions - begins[:-1], counts) + np.arange(len(rows))
        # The head always computes a row: an empty tensor is not every plugin's friend.
        sampled = list(batch.sampled) or [len(rows) - 1]
        self._wanted = len(batch.sampled)
        self._paged.start(
            {
                self._paged.input_name: rows,
                "position_ids": positions,
                "past_lens": pasts,
                "subsequence_begins": begins,
                "block_indices": np.concatenate(indices),
                "block_indices_begins": block_begins,
                "max_context_len": np.array(max(map(add, past, counts)), np.int32),
                SAMPLED_ROWS: np.array(sampled, np.int64),
            }
        )

    def finish(self) -> NDArray[Any]:
        """Wait for what was begun, in any thread.

        Returns hidden states ``[tokens, hidden]``, or on the last stage logits f32
        ``[len(sampled), vocabulary]``: memory of the runtime, valid until the next step. With
        nothing to sample the last stage still runs (its KV is needed) and gives no row. Raises
        RuntimeError.
        """
        output = self._paged.wait()
        return output[: self._wanted] if self.range.is_last else output

    def _runs(self, part: Part) -> list[tuple[int, int]]:
        """(past, rows) of the runs of a part: one chunk of a prompt, or each row of output.

        A part with rows of both is one chunk: with f32 KV the runtime computes rows wrong that
        follow a chunk of their own session in the same step.
        """
        prompt = self._prompts.get(part.session)
        if prompt is None or part.past < prompt:
            return [(part.past, part.count)]
        return [(at, 1) for at in range(part.past, part.past + part.count)]

    def _check(self, batch: StepBatch) -> NDArray[Any]:
        """The rows, contiguous and of the stage's type. Raises :class:`StageRefusal`."""
        if not batch.parts:
            raise StageRefusal("bad_count", "a batch without parts")
        need = 0
        seen: set[int] = set()
        for part in batch.parts:
            if part.session in seen:
                raise StageRefusal("bad_count", "a session twice in a batch", part.session)
            seen.add(part.session)
            refusal = self.refusal(part)
            if refusal is not None:
                raise refusal
            # Blocks that a shorter session gives back are not counted on: another part may run
            # first, and blocks are taken one part after the other.
            need += max(0, self._tables.cost(part.session, part.past, part.past + part.count))
        if need > self._tables.free:
            raise StageRefusal("out_of_blocks", f"{need} blocks needed, {self.free_blocks} free")
        return checked_rows(
            batch, self.range, self.hidden, self._paged.vocabulary, self._paged.input_dtype
        )


def checked_rows(
    batch: StepBatch, layers: StageRange, hidden: int, vocabulary: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """The rows of a batch, contiguous and of ``dtype``. Raises :class:`StageRefusal` when they, or
    those of them that are to be sampled, are not what a stage of these ``layers`` takes."""
    rows, total = batch.rows, sum(part.count for part in batch.parts)
    if layers.is_first:
        if rows.ndim != 1 or len(rows) != total or not np.issubdtype(rows.dtype, np.integer):
            raise StageRefusal("bad_input", f"{total} token ids expected, not {_like(rows)}")
        if rows.min() < 0 or rows.max() >= vocabulary:
            raise StageRefusal("bad_input", "a token id outside the vocabulary")
    else:
        if rows.shape != (total, hidden) or not np.issubdtype(rows.dtype, np.floating):
            raise StageRefusal(
                "bad_input", f"[{total}, {hidden}] floats expected, not {_like(rows)}"
            )
        if not np.isfinite(rows).all():
            raise StageRefusal("bad_input", "a hidden state with values that are no numbers")
    if batch.sampled and not (
        layers.is_last
        and batch.sampled[0] >= 0
        and batch.sampled[-1] < total
        and all(a < b for a, b in zip(batch.sampled, batch.sampled[1:], strict=False))
    ):
        raise StageRefusal("bad_rows", "rows to sample must be ascending rows of the batch")
    return np.ascontiguousarray(rows, dtype)


def _like(rows: NDArray[Any]) -> str:
    return f"{rows.dtype} {list(rows.shape)}"
