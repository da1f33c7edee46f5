"""What goes over a link for one generation: a call, then frames back.

The call's body is an :class:`Assignment`, its payload the request. The frames back are short lists,
one per token event and sent the moment it exists:

    [0]                                         alive, nothing new
    [1, position, token id, text(, logprobs)]   a token event; position counts output tokens
    [2, position, token id or null, text, logprobs or null, finish]
                                                the last event; payload: the receipt
    [3, error]                                  cut short; payload: the receipt so far, or empty

A call for a response that has lost its entry node is a :class:`KeptCall`; the first message back
says what is known of it (:class:`Known`, with the request as its payload), then the same frames
follow.

Everything read here comes from a peer and is checked before it is used; what does not fit raises
:class:`WireError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from inference.errors import ErrorCode, GenerationError
from inference.generation import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    Finish,
    GenerateRequest,
    TokenEvent,
    TokenId,
    TokenLogprob,
)
from mesh.receipts import Bundle, ReceiptError, Segment, SignedReceipt
from mesh.receipts.encoding import EncodingError, decode, encode
from mesh.receipts.record import MAX_SEGMENTS, NONCE_BYTES, plain_request

KIND = "generate"
KEPT_KIND = "kept"
KEY_BYTES = 32
MAX_REQUEST_BYTES = 16 << 20
# What a call can carry to resume from; a response that is longer is not carried on.
MAX_RESUMED_TOKENS = 1 << 19
MAX_RESUMED_TEXT = 1 << 20  # characters
MAX_HOPS = 64
BEAT: Final = [0]

_TOKEN, _LAST, _CUT = 1, 2, 3
_Listed = Strict(False)
Buffer = bytes | bytearray | memoryview
_CODES = frozenset(get_args(ErrorCode))
_Text = Annotated[str, Field(max_length=1 << 16)]


class WireError(Exception):
    """A peer sent something that is not part of this protocol."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ChainHop(_Frozen):
    """A stage of the chain to use: layers ``[first, last)`` at ``peer``."""

    peer: str = Field(min_length=32, max_length=128)  # as stages are told it
    first: int = Field(ge=0, lt=1 << 12)
    last: int = Field(ge=1, le=1 << 12)


class Assignment(_Frozen):
    """What the entry node tells the node that is to make (the rest of) a response.

    ``resume`` are the token ids that the client has, ``text`` is their text, and ``earlier`` says
    who made them; together the segments cover ``resume`` exactly.
    """

    response: str = Field(min_length=1, max_length=128)  # id of the response, for logs
    nonce: bytes = Field(min_length=NONCE_BYTES, max_length=NONCE_BYTES)
    # Digest of the model to use: two models of one name would not continue each other's text.
    model_digest: str | None = Field(None, max_length=128)
    resume: Annotated[tuple[TokenId, ...], _Listed] = Field((), max_length=MAX_RESUMED_TOKENS)
    text: str = Field("", max_length=MAX_RESUMED_TEXT)
    earlier: Annotated[tuple[Segment, ...], _Listed] = Field((), max_length=MAX_SEGMENTS - 1)
    # The chain to run it on, beginning with the node that is asked; empty: on a whole model.
    chain: Annotated[tuple[ChainHop, ...], _Listed] = Field((), max_length=MAX_HOPS)
    # Made of the secret of the client, who may come back for the response at another node.
    keep: bytes | None = Field(None, min_length=KEY_BYTES, max_length=KEY_BYTES)

    def check(self) -> None:
        """Raise :class:`WireError` unless ``earlier`` covers ``resume``."""
        due = 0
        for segment in self.earlier:
            if segment.evidence == "signer" or segment.tokens[0] != due:
                raise WireError("earlier segments do not follow each other")
            due = segment.tokens[1]
        if due != len(self.resume):
            raise WireError("earlier segments do not cover the tokens to resume from")


class KeptCall(_Frozen):
    """Asks for what comes after the first ``after`` tokens of a response."""

    response: str = Field(min_length=1, max_length=128)
    proof: bytes = Field(min_length=KEY_BYTES, max_length=KEY_BYTES)
    after: int = Field(ge=0, le=MAX_TOKENS)


class Known(_Frozen):
    """The tokens before those that are asked for, and their text."""

    token_ids: Annotated[tuple[TokenId, ...], _Listed] = Field(max_length=MAX_RESUMED_TOKENS)
    text: str = Field(max_length=MAX_RESUMED_TEXT)


class _ErrorModel(_Frozen):
    code: str = Field(max_length=64)
    message: str = Field(max_length=4096)
    param: str | None = Field(None, max_length=256)
    retry_after: float | None = Field(None, ge=0.0, le=86400.0, allow_inf_nan=False)


class _LogprobModel(_Frozen):
    chosen: TokenLogprob | None
    top: Annotated[tuple[TokenLogprob, ...], _Listed] = Field(max_length=MAX_TOP_LOGPROBS)


_frame_head: TypeAdapter[tuple[int, TokenId | None, str]] = TypeAdapter(
    tuple[Annotated[int, Field(ge=0, le=MAX_TOKENS)], TokenId | None, _Text]
)


def write_call(request: GenerateRequest, assignment: Assignment) -> tuple[dict[str, Any], bytes]:
    """``(body, payload)`` of a call. Raises GenerationError for a message without an encoding."""
    payload = _write_request(request)
    if len(payload) > MAX_REQUEST_BYTES:
        raise GenerationError(
            "invalid_value",
            f"the request has {len(payload)} bytes; at most {MAX_REQUEST_BYTES} are forwarded",
            param="messages",
        )
    return assignment.model_dump(mode="python"), payload


def _write_request(request: GenerateRequest) -> bytes:
    try:
        return encode(plain_request(request))
    except EncodingError as error:
        raise GenerationError("invalid_value", f"messages: {error}", param="messages") from error


def read_call(body: object, payload: Buffer) -> tuple[GenerateRequest, Assignment]:
    """The other end of :func:`write_call`; the request comes with its ``resume``."""
    try:
        assignment = Assignment.model_validate(body)
        assignment.check()
        request = _read_request(payload, assignment.resume)
    except (ValidationError, EncodingError) as error:
        raise WireError(f"a call that cannot be read: {error}") from error
    return request, assignment


def _read_request(payload: Buffer, resume: tuple[int, ...] = ()) -> GenerateRequest:
    plain = decode(bytes(payload), MAX_REQUEST_BYTES)
    if not isinstance(plain, dict) or "resume" in plain:
        raise WireError("the payload of a call is a request without resume")
    return GenerateRequest.model_validate({**plain, "resume": resume})


def write_kept(
    request: GenerateRequest, token_ids: tuple[int, ...], text: str
) -> tuple[dict[str, Any], bytes]:
    """The first message of the answer to a :class:`KeptCall`."""
    known = Known(token_ids=token_ids, text=text)
    return known.model_dump(mode="python"), _write_request(request)


def read_kept(body: object, payload: Buffer) -> tuple[GenerateRequest, Known]:
    """The other end of :func:`write_kept`."""
    try:
        return _read_request(payload), Known.model_validate(body)
    except (ValidationError, EncodingError) as error:
        raise WireError(f"a kept response that cannot be read: {error}") from error


def write_event(position: int, event: TokenEvent) -> list[object]:
    """The frame of a token event. ``position``: how many output tokens come before it."""
    frame: list[object] = [_TOKEN, position, event.token_id, event.text]
    if event.logprob is not None or event.top_logprobs:
        frame.append(_write_logprobs(event))
    if event.finish is not None:
        frame[0] = _LAST
        if len(frame) == 4:
            frame.append(None)
        frame.append(event.finish.model_dump(mode="python"))
    return frame


def write_cut(error: GenerationError) -> list[object]:
    return [
        _CUT,
        {
            "code": error.code,
            "message": error.message[:4096],
            "param": error.param,
            "retry_after": error.retry_after,
        },
    ]


def write_receipt(receipt: SignedReceipt) -> bytes:
    return Bundle((receipt,)).to_bytes()


def read_frame(body: object) -> tuple[int, TokenEvent] | GenerationError | None:
    """``(position, event)``, the error that cut it short, or None for a beat."""
    if not isinstance(body, list) or not body:
        raise WireError("a frame is a list")
    if body == BEAT:
        return None
    try:
        if body[0] == _CUT and len(body) == 2:
            return read_error(body[1])
        if (body[0] == _TOKEN and len(body) in (4, 5)) or (body[0] == _LAST and len(body) == 6):
            position, token_id, text = _frame_head.validate_python(tuple(body[1:4]), strict=True)
            logprobs = _read_logprobs(body[4] if len(body) > 4 else None)
            finish = Finish.model_validate(body[5]) if body[0] == _LAST else None
            if token_id is None and finish is None:
                raise WireError("a frame without a token that is not the last")
            event = TokenEvent(
                token_id=token_id,
                text=text,
                logprob=logprobs.chosen,
                top_logprobs=logprobs.top,
                finish=finish,
            )
            return position, event
    except ValidationError as error:
        raise WireError(f"a frame that cannot be read: {error}") from error
    raise WireError("an unknown frame")


def read_receipt(payload: Buffer) -> SignedReceipt | None:
    """The one receipt of a last or cut frame; None when there is none."""
    if not payload:
        return None
    try:
        bundle = Bundle.from_bytes(bytes(payload))
    except ReceiptError as error:
        raise WireError(error.message) from error
    if bundle.earlier:
        raise WireError("more than one receipt")
    return bundle.last


def read_error(value: object) -> GenerationError:
    """An error of a peer's in our words; a code that we do not know is its engine's failure."""
    try:
        model = _ErrorModel.model_validate(value)
    except ValidationError as error:
        raise WireError(f"an error that cannot be read: {error}") from error
    code: ErrorCode = model.code if model.code in _CODES else "engine_failed"  # type: ignore[assignment]
    return GenerationError(code, model.message, param=model.param, retry_after=model.retry_after)


def read_refusal(code: str, message: str, data: dict[str, Any]) -> GenerationError:
    """What a call was refused with."""
    code = "overloaded" if code == "busy" else code  # by the link: too many or too large calls
    fields = {"param": data.get("param"), "retry_after": data.get("retry_after")}
    try:
        return read_error({"code": code, "message": message or code, **fields})
    except WireError as error:
        return GenerationError("engine_failed", str(error))


def _write_logprobs(event: TokenEvent) -> list[object]:
    chosen = event.logprob
    return [
        None if chosen is None else [chosen.token_id, chosen.token, chosen.logprob],
        [[top.token_id, top.token, top.logprob] for top in event.top_logprobs],
    ]


def _read_logprobs(value: object) -> _LogprobModel:
    if value is None:
        return _LogprobModel(chosen=None, top=())
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise WireError("logprobs that cannot be read")
    chosen = None if value[0] is None else _read_logprob(value[0])
    return _LogprobModel(chosen=chosen, top=tuple(_read_logprob(item) for item in value[1]))


def _read_logprob(value: object) -> TokenLogprob:
    if not isinstance(value, list) or len(value) != 3:
        raise WireError("a logprob that cannot be read")
    token_id, token, logprob = value
    return TokenLogprob(token_id=token_id, token=token, logprob=logprob)
