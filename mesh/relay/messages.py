"""What head and stages say to each other beside the step frames.

Requests of the head, each answered: ``relay.open``, ``relay.fence``, ``relay.replay``,
``relay.grow``, ``relay.close``, ``relay.probe``. One-way reports to the head: ``relay.tokens``
(from the last stage), ``relay.refused`` and ``relay.lost`` (from any stage).

A chain is named by 16 random bytes that its head chose, a session by a number that is unique in its
chain for good. The epoch belongs to the chain: whoever fences it makes every frame of an earlier
epoch void, for all its sessions at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from inference.generation import MAX_TOP_LOGPROBS, SamplingParams, TokenId
from inference.sampling import Sampled as Draw
from mesh.relay.frames import MAX_ROWS, MAX_STAGES, ChainId, Listed, Number, Seconds, Wire
from mesh.relay.refusal import Refusal

OPEN, FENCE, REPLAY = "relay.open", "relay.fence", "relay.replay"
GROW, CLOSE, PROBE = "relay.grow", "relay.close", "relay.probe"
TOKENS, REFUSED, LOST = "relay.tokens", "relay.refused", "relay.lost"

MAX_SESSIONS = 256  # in one message
MAX_BIASES = 1024

Peer = Annotated[str, Field(min_length=32, max_length=128)]
Digest = Annotated[str, Field(min_length=32, max_length=128)]
Code = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(max_length=512)]
Logprob = Annotated[float, Field(le=0.0)]  # -inf: a token that a bias or a filter excluded


class OpenSession(Wire):
    """One session as a stage has to know it.

    ``capacity`` is the number of tokens to reserve. Rows before ``emit_from`` are computed but
    their output goes nowhere: who comes next has it already. The last stage gets ``sampling``, and
    draws the output token of index ``n`` from the row at position ``prompt + n - 1``. ``history``
    says how many token ids of the session (prompt, then output) are in the message's payload, as
    little-endian int32: all of them when penalties need them, otherwise none.
    """

    session: Number
    capacity: Annotated[int, Field(ge=1, lt=1 << 24)]
    emit_from: Number = 0
    prompt: Annotated[int, Field(ge=1, lt=1 << 24)]
    history: Annotated[int, Field(ge=0, lt=1 << 24)] = 0
    sampling: SamplingParams | None = None

    # Maps on the wire have text keys only, so the bias goes as pairs.
    @field_serializer("sampling")
    def _to_wire(self, sampling: SamplingParams | None) -> dict[str, Any] | None:
        if sampling is None:
            return None
        bias = [[token, value] for token, value in sampling.logit_bias.items()]
        return {**sampling.model_dump(mode="python"), "logit_bias": bias}

    @field_validator("sampling", mode="before")
    @classmethod
    def _from_wire(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        pairs = value.get("logit_bias", [])
        if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
            raise ValueError(f"logit_bias: up to {MAX_BIASES} pairs of token id and bias")
        if not all(isinstance(p, list) and len(p) == 2 and type(p[0]) is int for p in pairs):
            raise ValueError("logit_bias: a pair is a token id and its bias")
        return {**value, "logit_bias": dict(pairs)}


class Neighbours(Wire):
    """A chain as one of its stages sees it. ``next`` of the last stage is the head."""

    chain: ChainId
    epoch: Number
    previous: Peer
    next: Peer


class Open(Neighbours):
    """Reserve room for sessions. Everything is checked before any memory is taken.

    ``activations`` between stages are f32, or in this form where it can hold the values. A stage
    that does not take it refuses as ``wrong_encoding``, and the head asks again for f32.
    """

    version: Literal[1] = 1
    model: Digest
    first: Number
    last: Number
    layers: Number
    rank: Annotated[int, Field(ge=0, lt=MAX_STAGES)]
    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)]
    activations: Annotated[str, Field(min_length=1, max_length=16)]
    sessions: Annotated[tuple[OpenSession, ...], Listed] = Field(
        min_length=1, max_length=MAX_SESSIONS
    )

    @model_validator(mode="after")
    def _consistent(self) -> Open:
        if not (self.first < self.last <= self.layers and self.rank < self.stages):
            raise ValueError("not a range of layers, or not a rank of the chain")
        if (self.rank == 0) != (self.first == 0):
            raise ValueError("rank 0 and only rank 0 begins with layer 0")
        if (self.rank == self.stages - 1) != (self.last == self.layers):
            raise ValueError("the last rank and only the last rank ends with the last layer")
        if len({s.session for s in self.sessions}) != len(self.sessions):
            raise ValueError("a session twice")
        return self


def histories(message: Open, payload: bytes | bytearray | memoryview) -> list[list[int]]:
    """The token ids in the payload of an open message, of each session. Raises :class:`Refusal`."""
    total = sum(session.history for session in message.sessions)
    if len(payload) != 4 * total:
        raise Refusal("bad_size", f"{total} token ids are {4 * total} bytes, not {len(payload)}")
    ids = np.frombuffer(payload, "<i4")
    if total and ids.min() < 0:
        raise Refusal("malformed", "a token id is negative")
    found = []
    start = 0
    for session in message.sessions:
        found.append(ids[start : start + session.history].tolist())
        start += session.history
    return found


class RefusedSession(Wire):
    session: Number
    code: Code
    message: Text = ""


class Opened(Wire):
    """Answer to :class:`Open`: what could not be opened, and how many tokens would still fit."""

    refused: Annotated[tuple[RefusedSession, ...], Listed] = Field((), max_length=MAX_SESSIONS)
    free_tokens: Annotated[int, Field(ge=0, lt=1 << 40)]


class Grow(Wire):
    """Make room for ``capacity`` tokens of a session in all."""

    chain: ChainId
    session: Number
    capacity: Annotated[int, Field(ge=1, lt=1 << 24)]


class Close(Wire):
    """Forget sessions, or with none named the whole chain unless it is past ``epoch`` by now.

    What is not there is fine, and is not opened either when that comes later: requests may pass
    each other.
    """

    chain: ChainId
    epoch: Number
    sessions: Annotated[tuple[Number, ...], Listed] = Field((), max_length=MAX_SESSIONS)


class Held(Wire):
    """What a stage holds of a session: KV of ``past`` tokens, output kept from ``kept_from`` on."""

    session: Number
    past: Number
    kept_from: Number


class Fenced(Wire):
    """Answer to :class:`Neighbours` as a fence: every session of the chain that is here."""

    sessions: Annotated[tuple[Held, ...], Listed] = Field((), max_length=4096)


class ReplaySession(Wire):
    """Cut a session to ``past`` tokens and send its output from ``replay_from`` (<= past) on again.

    Output of later rows goes on from ``emit_from``.
    """

    session: Number
    past: Number
    emit_from: Number
    replay_from: Number


class Replay(Wire):
    chain: ChainId
    epoch: Number
    sessions: Annotated[tuple[ReplaySession, ...], Listed] = Field(max_length=MAX_SESSIONS)


class Probe(Wire):
    """Are you there? Answered by the node's event loop even while the stage computes."""

    chain: ChainId


class Probed(Wire):
    """``busy``: rows of the chain wait here or are being computed."""

    busy: bool


class TopLogprob(Wire):
    token: TokenId
    logprob: Logprob


class Sampled(Wire):
    """The token drawn from the row at ``position``."""

    session: Number
    position: Number
    token: TokenId
    logprob: Logprob | None = None
    top: Annotated[tuple[TopLogprob, ...], Listed] = Field((), max_length=MAX_TOP_LOGPROBS)


class Tokens(Wire):
    """Step ``step`` has passed the last stage. Rows that were not to be sampled have no token.
    As it is received; :func:`tokens_body` makes one to be sent."""

    chain: ChainId
    epoch: Number
    step: Number
    sampled: Annotated[tuple[Sampled, ...], Listed] = Field((), max_length=MAX_ROWS)
    spent: Annotated[tuple[Seconds, ...], Listed] = Field((), max_length=MAX_STAGES)


def tokens_body(
    chain: bytes,
    epoch: int,
    step: int,
    drawn: Iterable[tuple[int, int, Draw]],
    spent: tuple[float, ...],
) -> dict[str, Any]:
    """The body that is parsed as :class:`Tokens`, of (session, position, what was drawn). Made as
    :func:`mesh.relay.frames.step_body` is."""
    return {
        "chain": chain,
        "epoch": epoch,
        "step": step,
        "sampled": [
            {
                "session": session,
                "position": position,
                "token": draw.token_id,
                "logprob": None if draw.logprob is None else min(0.0, draw.logprob),
                "top": [{"token": t, "logprob": min(0.0, p)} for t, p in draw.top],
            }
            for session, position, draw in drawn
        ],
        "spent": spent,
    }


class Refused(Wire):
    """Rows that a stage does not accept. ``ended``: nothing is left of the step."""

    chain: ChainId
    epoch: Number
    step: Number
    ended: bool
    sessions: Annotated[tuple[RefusedSession, ...], Listed] = Field(max_length=MAX_ROWS)


class Lost(Wire):
    """The sender's link to its neighbour ``peer`` in the chain is gone."""

    chain: ChainId
    epoch: Number
    peer: Peer
