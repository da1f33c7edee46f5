"""Checking a saved HTTP response offline: a plain JSON body, or the events of a stream.

The text that is checked is the one that ``choices`` shows, so a receipt cannot vouch for a text
that the reader does not see; a field beside it that could show another is refused. The token ids
come from the ``mesh`` field. Log probabilities are not signed, and not checked. A response with
several choices has a receipt for each.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ca.certificate import NOTHING_REVOKED, CertificateError, Revoked, Root, load_root
from ca.pem import read_bundle
from inference.generation import FinishReason
from mesh.receipts.bundle import MAX_BUNDLE_BYTES, Bundle
from mesh.receipts.errors import ReceiptError
from mesh.receipts.record import Counts, Receipt
from mesh.receipts.verification import Expected, VerifiedReceipt, verify

MAX_RESPONSE_BYTES = 256 << 20


class _Shown(BaseModel):
    """The fields that matter; a response has many more."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Content(BaseModel):
    """A message. Whatever else it could say is nothing that the receipt covers."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _said(cls, value: Any) -> Any:
        # Client libraries write out every field that they know of: null says nothing.
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class _Choice(_Shown):
    index: int = Field(ge=0, lt=1024)
    message: _Content | None = None  # chat, plain
    delta: _Content | None = None  # chat, stream
    text: str | None = None  # legacy completion, both
    finish_reason: FinishReason | None = None

    @model_validator(mode="after")
    def _one_text(self) -> _Choice:
        if sum(shown is not None for shown in (self.message, self.delta, self.text)) != 1:
            raise ValueError("a choice shows exactly one of message, delta, text")
        return self

    @property
    def shown(self) -> str:
        content = self.message or self.delta
        return (content.content if content is not None else self.text) or ""


class _CachedTokens(_Shown):
    cached_tokens: int = 0


class _Usage(_Shown):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Record(_Shown):
    index: int = 0
    node: str
    nodes: list[dict[str, Any]]
    receipt: str = Field(max_length=MAX_BUNDLE_BYTES * 4 // 3 + 4)
    token_ids: list[int]


class _Mesh(_Record):
    receipts: list[_Record] | None = None


class _Body(_Shown):
    model: str
    choices: list[_Choice]
    usage: _Usage | None = None
    mesh: _Mesh | None = None


def verify_response(
    data: bytes, ca_pem: bytes, *, now: float, revoked: Revoked = NOTHING_REVOKED
) -> tuple[VerifiedReceipt, ...]:
    """Check every choice of a saved response against the CA certificates in ``ca_pem``.

    Returns one verified receipt per choice, in order of their index. ``now`` is in seconds since
    1970. Raises :class:`ReceiptError`, also for a file that is not a response or holds no receipt.
    """
    body = _read(data)
    if body.mesh is None:
        raise ReceiptError("malformed", "the response has no receipt (no field `mesh`)")
    roots = _roots(ca_pem)
    records = {record.index: record for record in body.mesh.receipts or [body.mesh]}
    choices = sorted(body.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != sorted(records):
        raise ReceiptError("malformed", "the receipts are not those of the choices")
    return tuple(
        _verify_choice(body, choice, records[choice.index], roots, now, revoked)
        for choice in choices
    )


def show_nodes(receipt: Receipt) -> list[dict[str, Any]]:
    """Who took part, as the ``mesh.nodes`` field of a response shows it."""
    return [
        {
            "node": part.peer,
            "serial": part.serial,
            "layers": list(part.stage),
            "tokens": list(part.tokens),
            "evidence": segment.evidence,
        }
        for segment in receipt.segments
        for part in segment.parts
    ]


def _verify_choice(
    body: _Body,
    choice: _Choice,
    record: _Record,
    roots: Sequence[Root],
    now: float,
    revoked: Revoked,
) -> VerifiedReceipt:
    try:
        bundle = Bundle.from_bytes(base64.b64decode(record.receipt, validate=True))
    except binascii.Error as error:
        raise ReceiptError("malformed", "the receipt is not base64") from error
    if choice.finish_reason is None:
        raise ReceiptError("response", f"choice {choice.index} has no end")
    counts = None
    if body.usage is not None and len(body.choices) == 1:
        details = body.usage.prompt_tokens_details or _CachedTokens()
        counts = Counts(
            prompt=body.usage.prompt_tokens,
            completion=body.usage.completion_tokens,
            cached=details.cached_tokens,
        )
    verified = verify(
        bundle,
        roots,
        network=roots[0].network,
        now=now,
        revoked=revoked,
        expected=Expected(
            token_ids=record.token_ids,
            text=choice.shown,
            finish=choice.finish_reason,
            counts=counts,
            model_name=body.model,
        ),
    )
    receipt = verified.receipt
    if record.node != receipt.signer or record.nodes != show_nodes(receipt):
        raise ReceiptError("response", "the nodes shown are not those that were signed")
    return verified


def _roots(ca_pem: bytes) -> tuple[Root, ...]:
    try:
        roots = tuple(load_root(der) for der in read_bundle(ca_pem))
    except CertificateError as error:
        raise ReceiptError("certificate", f"the CA's certificate: {error}") from error
    if len({root.network for root in roots}) != 1:
        raise ReceiptError("certificate", "give the CA certificates of exactly one network")
    return roots


def _read(data: bytes) -> _Body:
    if len(data) > MAX_RESPONSE_BYTES:
        raise ReceiptError("malformed", f"more than {MAX_RESPONSE_BYTES} bytes")
    try:
        text = data.decode("utf-8").strip()
        if text.startswith("{"):
            return _Body.model_validate(_json(text))
        return _merge([_Body.model_validate(event) for event in _events(text)])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ReceiptError("malformed", f"not a saved response: {where}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ReceiptError("malformed", f"not a saved response: {error}") from error


def _events(text: str) -> list[object]:
    """The JSON of the server-sent events in ``text``, each of which is one ``data`` line here."""
    lines = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("a stream that did not end well")
    return [_json(line) for line in lines[:-1]]


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_unambiguous)


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two equal keys they take; a receipt must not depend on it."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def _merge(chunks: Sequence[_Body]) -> _Body:
    """The plain response that a stream amounts to."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, FinishReason | None] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        if reasons.get(choice.index) is not None:
            raise ValueError(f"choice {choice.index} goes on after its end")
        texts.setdefault(choice.index, []).append(choice.shown)
        reasons[choice.index] = choice.finish_reason
    records = [chunk.mesh for chunk in chunks if chunk.mesh is not None]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    if len(records) > 1 or len(usages) > 1 or len({chunk.model for chunk in chunks}) != 1:
        raise ValueError("the events are not those of one response")
    return _Body(
        model=chunks[0].model,
        choices=[
            _Choice(index=index, text="".join(texts[index]), finish_reason=reasons[index])
            for index in texts
        ],
        usage=usages[0] if usages else None,
        mesh=records[0] if records else None,
    )
