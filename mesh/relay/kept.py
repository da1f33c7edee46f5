"""Activations that a stage has sent, kept so that they can be sent again after a loss. Pure.

When the next stage is lost, its replacement needs the input that the lost one had: the output of
this stage. Keeping it costs ``hidden * 4`` bytes per token (f32), so a bound on all sessions
together is needed; beyond it the session that takes most is given up (it can still be replayed from
its token ids, by computing every layer again).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesh.relay.activations import Encoding

DEFAULT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Output for consecutive positions from ``position`` on, encoded, one row for each token."""

    position: int
    sample: bool
    encoding: Encoding
    values: NDArray[Any]

    @property
    def end(self) -> int:
        return self.position + len(self.values)


@dataclass(slots=True)
class _Kept:
    pieces: list[Piece] = field(default_factory=list)
    bytes: int = 0


class KeptOutput:
    """Pieces by session key, contiguous up to the session's last output."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self.bytes = 0
        self._sessions: dict[int, _Kept] = {}

    def add(self, key: int, piece: Piece) -> None:
        """Keep a copy of ``piece``, which follows what is kept of the session."""
        kept = self._sessions.setdefault(key, _Kept())
        if kept.pieces and kept.pieces[-1].end != piece.position:
            raise ValueError(f"output up to {kept.pieces[-1].end} is kept, not {piece.position}")
        # A copy: a view would hold the output of the whole batch in memory.
        copy = Piece(piece.position, piece.sample, piece.encoding, piece.values.copy())
        kept.pieces.append(copy)
        self._count(kept, copy.values.nbytes)
        while self.bytes > self.limit:
            largest = max(self._sessions.values(), key=lambda k: k.bytes)
            self._count(largest, -largest.bytes)
            largest.pieces.clear()

    def kept_from(self, key: int, end: int) -> int:
        """The first position that is kept; ``end`` (where the output ends) when nothing is."""
        kept = self._sessions.get(key)
        return kept.pieces[0].position if kept is not None and kept.pieces else end

    def truncate(self, key: int, end: int) -> None:
        """Forget the output from position ``end`` on."""
        kept = self._sessions.get(key)
        while kept is not None and kept.pieces and kept.pieces[-1].end > end:
            last = kept.pieces.pop()
            self._count(kept, -last.values.nbytes)
            if last.position < end:
                values = last.values[: end - last.position].copy()
                kept.pieces.append(Piece(last.position, False, last.encoding, values))
                self._count(kept, values.nbytes)

    def drop(self, key: int) -> None:
        kept = self._sessions.pop(key, None)
        if kept is not None:
            self.bytes -= kept.bytes

    def pieces(self, key: int, start: int, max_tokens: int, *, prompt: int) -> Iterator[Piece]:
        """What is kept from position ``start`` on, joined to pieces of up to ``max_tokens``.

        The ``prompt`` tokens of the prompt and what follows are not joined: a stage does not take
        both at once. The caller has made sure by :meth:`kept_from` that it is there.
        """
        kept = self._sessions.get(key)
        run: list[Piece] = []
        for piece in list(kept.pieces) if kept is not None else []:
            if piece.end <= start:
                continue
            skip = max(0, start - piece.position)
            for at in range(skip, len(piece.values), max_tokens):
                values = piece.values[at : at + max_tokens]
                position = piece.position + at
                last = position + len(values) == piece.end
                part = Piece(position, piece.sample and last, piece.encoding, values)
                joined = sum(len(p.values) for p in run) + len(values)
                if run and (
                    joined > max_tokens
                    or run[0].encoding != part.encoding
                    or run[0].position < prompt <= position
                ):
                    yield _join(run)
                    run = []
                run.append(part)
        if run:
            yield _join(run)

    def _count(self, kept: _Kept, size: int) -> None:
        kept.bytes += size
        self.bytes += size


def _join(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    values = np.concatenate([piece.values for piece in pieces])
    return Piece(pieces[0].position, pieces[-1].sample, pieces[0].encoding, values)
