"""Receipts of a response that one node made, and of one that three nodes had a part in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from inference.generation import GenerateRequest
from mesh.identity import Identity
from mesh.receipts import (
    Bundle,
    Counts,
    Evidence,
    ModelIdentity,
    Part,
    Receipt,
    Segment,
    Timings,
    request_digest,
    response_digest,
    sign,
)
from mesh.receipts.record import serial_text

MODEL = ModelIdentity(name="smollm2-135m-instruct", digest="ab" * 32, layers=30)
TOKENS = (101, 7, 2**31 - 1, 0, 55, 56, 57, 58, 59, 2)
TEXT = "Grüße, 世界 – \U0001f600 done"
# Where the text of so many tokens ends.
CUTS = {4: TEXT[:6], 7: TEXT[:12], len(TOKENS): TEXT}


@dataclass(frozen=True)
class Story:
    """A response and everything that was said about it."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    text: str
    entry: Identity
    signers: tuple[Identity, ...]
    receipt: Receipt
    bundle: Bundle


def part(identity: Identity, tokens: tuple[int, int], stage: tuple[int, int] = (0, 30)) -> Part:
    return Part(
        peer=identity.peer_id,
        serial=serial_text(identity.certificate.serial),
        stage=stage,
        tokens=tokens,
    )


def segment(
    identity: Identity,
    tokens: tuple[int, int],
    evidence: Evidence = "signer",
    parts: tuple[Part, ...] | None = None,
    receipt: bytes | None = None,
) -> Segment:
    return Segment(
        node=identity.peer_id,
        tokens=tokens,
        evidence=evidence,
        parts=parts or (part(identity, tokens),),
        receipt=receipt,
    )


@pytest.fixture
def tell(authority: Any) -> Callable[..., Story]:
    """``tell("one")``: desk-1 makes all. ``tell("three")``: desk-1 hands over after 4 tokens,
    desk-2 is lost after 7, and a chain of desk-3 and desk-4, where desk-5 takes the place of
    desk-4, makes the rest."""

    def tell(kind: str, *, created: float | None = None, **changes: Any) -> Story:
        entry, one, two, three, four, five = (
            authority.identity(name)
            for name in ("entry", "desk-1", "desk-2", "desk-3", "desk-4", "desk-5")
        )
        request = GenerateRequest(
            model=MODEL.name, messages=({"role": "user", "content": "Hi"},), max_tokens=40
        )
        base: dict[str, Any] = {
            "request": request_digest(request),
            "model": MODEL,
            "entry": entry.peer_id,
            "created": int((authority.now if created is None else created) * 1000),
            "nonce": bytes(range(16)),
            "counts": Counts(prompt=12, completion=len(TOKENS), cached=3),
            "timings": Timings(queue=1, prefill=250_000, decode=1_000_001),
            "finish": "stop",
        }

        def receipt(segments: tuple[Segment, ...], **other: Any) -> Receipt:
            end = segments[-1].tokens[1]
            return Receipt(
                segments=segments,
                response=response_digest(TOKENS[:end], CUTS[end]),
                text_bytes=len(CUTS[end].encode()),
                **{**base, **other},
            )

        n = len(TOKENS)
        if kind == "one":
            whole = receipt((segment(one, (0, n)),), **changes)
            return Story(request, TOKENS, TEXT, entry, (one,), whole, Bundle((sign(whole, one),)))
        first = sign(receipt((segment(one, (0, 4)),), finish=None), one)
        last = receipt(
            (
                segment(one, (0, 4), "receipt", receipt=first.digest),
                segment(two, (4, 7), "lost"),
                segment(
                    three,
                    (7, n),
                    parts=(
                        part(three, (7, n), (0, 13)),
                        part(four, (7, 8), (13, 30)),
                        part(five, (8, n), (13, 30)),
                    ),
                ),
            ),
            **changes,
        )
        bundle = Bundle((first, sign(last, three)))
        return Story(request, TOKENS, TEXT, entry, (one, three), last, bundle)

    return tell
