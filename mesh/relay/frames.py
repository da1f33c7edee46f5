"""Step frames: activations from one stage to the next. A pure codec; nothing here does I/O.

A frame is a small header (CBOR, beside it in the transport) and a payload: the rows of the header
one after the other, each ``count`` tokens of ``hidden`` features, in the frame's encoding (see
:mod:`mesh.relay.activations`).

The sender chooses the encoding per frame. Sizes follow from the header and must match to the byte,
so nothing is ever allocated from a number alone, only from bytes that have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from mesh.relay import activations
from mesh.relay.activations import Encoding
from mesh.relay.refusal import Refusal

STEP_KIND = "relay.step"
MAX_ROWS = 1024  # sessions in one frame
MAX_ROW_TOKENS = 4096  # tokens of one session in one frame
MAX_FRAME_TOKENS = 8192
MAX_STAGES = 64

Number = Annotated[int, Field(ge=0, lt=1 << 31)]
ChainId = Annotated[bytes, Field(min_length=16, max_length=16)]
Listed = Strict(False)  # a tuple here is a list on the wire; its items stay strict
Seconds = Annotated[float, Field(ge=0.0, le=86400.0, allow_inf_nan=False)]


class Row(NamedTuple):
    """``size`` tokens of a session from ``position`` (its tokens before that) on.

    ``sample``: the last stage draws the next token from the last of them.
    """

    session: int
    position: int
    size: int
    sample: bool

    @property
    def end(self) -> int:
        return self.position + self.size


_WireRow = Annotated[
    tuple[
        Number,
        Number,
        Annotated[int, Field(ge=1, le=MAX_ROW_TOKENS)],
        bool,
    ],
    Listed,
]


class Wire(BaseModel):
    """Base of everything that crosses the wire: strict, frozen, and no field that is not known."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class StepHeader(Wire):
    """Which rows the payload holds. ``spent`` has the compute seconds of each stage before.
    As it is received; :func:`step_body` makes one to be sent."""

    chain: ChainId
    epoch: Number
    step: Number
    encoding: Encoding
    rows: Annotated[tuple[_WireRow, ...], Listed] = Field(min_length=1, max_length=MAX_ROWS)
    spent: Annotated[tuple[Seconds, ...], Listed] = Field((), max_length=MAX_STAGES)

    @property
    def tokens(self) -> int:
        return sum(row[2] for row in self.rows)


def step_body(
    chain: bytes,
    epoch: int,
    step: int,
    encoding: Encoding,
    rows: Sequence[tuple[int, int, int, bool]],
    spent: tuple[float, ...],
) -> dict[str, Any]:
    """The body that is parsed as :class:`StepHeader`. Every token waits for it, so it is not made
    by way of a model: what is our own needs no check."""
    return {
        "chain": chain,
        "epoch": epoch,
        "step": step,
        "encoding": encoding,
        "rows": rows,
        "spent": spent,
    }


_W = TypeVar("_W", bound=Wire)


def parse(model: type[_W], body: object) -> _W:
    """``body`` as a ``model``; raises :class:`Refusal` ``malformed`` that says which field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise Refusal("malformed", f"{model.__name__}: {where}: {first['msg']}"[:512]) from None


def rows_of(header: StepHeader) -> list[Row]:
    """The header's rows. Raises :class:`Refusal` for a session twice, or too many tokens."""
    rows = list(map(Row._make, header.rows))
    if len(rows) > 1 and len({row.session for row in rows}) != len(rows):
        raise Refusal("malformed", "a session has two rows in one frame")
    if header.tokens > MAX_FRAME_TOKENS:
        raise Refusal("malformed", f"{header.tokens} tokens in one frame, over {MAX_FRAME_TOKENS}")
    return rows


def decode(
    header: StepHeader, payload: bytes | bytearray | memoryview, hidden: int
) -> NDArray[np.floating]:
    """The payload as ``[tokens, hidden]`` of f16 or f32, see :func:`activations.decode`.

    Raises :class:`Refusal` when the payload is not exactly what the header says. Whether the values
    are finite is for :func:`not_finite` to say, row by row.
    """
    return activations.decode(payload, header.encoding, header.tokens, hidden)


def not_finite(rows: list[Row], values: NDArray[np.floating]) -> set[int]:
    """Sessions whose rows hold an infinity or NaN."""
    finite = np.isfinite(values)
    if finite.all():
        return set()
    flagged = ~finite.all(axis=1)
    found: set[int] = set()
    start = 0
    for row in rows:
        if flagged[start : start + row.size].any():
            found.add(row.session)
        start += row.size
    return found
