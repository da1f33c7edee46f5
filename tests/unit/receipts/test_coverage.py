"""Every token and every layer has exactly one node that answers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mesh.receipts import Bundle, Evidence, Part, ReceiptError, Segment, sign, verify
from mesh.receipts.coverage import find_gap

SERIAL = "0" * 40


def peer(name: str) -> str:
    return "12D3KooW" + name * 44


def part(name: str, stage: tuple[int, int], tokens: tuple[int, int]) -> Part:
    return Part(peer=peer(name), serial=SERIAL, stage=stage, tokens=tokens)


def segment(tokens: tuple[int, int], *parts: Part, evidence: Evidence = "signer") -> Segment:
    receipt = bytes(32) if evidence == "receipt" else None
    given = parts or (part("A", (0, 30), tokens),)
    return Segment(
        node=given[0].peer, tokens=tokens, evidence=evidence, parts=given, receipt=receipt
    )


GOOD: dict[str, tuple[Segment, ...]] = {
    "one node": (segment((0, 10)),),
    "no tokens at all": (segment((0, 0)),),
    "a chain": (
        segment(
            (0, 9),
            part("A", (0, 4), (0, 9)),
            part("B", (20, 30), (0, 9)),
            part("C", (4, 20), (0, 9)),
        ),
    ),
    "a stage replaced twice": (
        segment(
            (0, 9),
            part("A", (0, 4), (0, 9)),
            part("B", (4, 30), (0, 3)),
            part("C", (4, 30), (3, 5)),
            part("D", (4, 30), (5, 9)),
        ),
    ),
    "two stages replaced by one": (
        segment(
            (0, 9),
            part("A", (0, 4), (0, 9)),
            part("B", (4, 10), (0, 3)),
            part("C", (10, 30), (0, 3)),
            part("D", (4, 30), (3, 9)),
        ),
    ),
    "resumed": (segment((0, 4), evidence="lost"), segment((4, 9), part("B", (0, 30), (4, 9)))),
    "resumed for the end alone": (segment((0, 4), evidence="receipt"), segment((4, 4))),
    "a lost one of which only the head is known": (
        segment((0, 4), part("A", (0, 9), (0, 4)), evidence="lost"),
        segment((4, 9)),
    ),
}  # fmt: skip
BAD: dict[str, tuple[Segment, ...]] = {
    "begins late": (segment((1, 10)),),
    "a gap": (segment((0, 4), evidence="lost"), segment((5, 9))),
    "an overlap": (segment((0, 4), evidence="lost"), segment((3, 9))),
    "an empty one in between": (segment((0, 0), evidence="lost"), segment((0, 9))),
    "two signers": (segment((0, 4)), segment((4, 9))),
    "no signer": (segment((0, 4), evidence="lost"),),
    "ends with a receipt": (segment((0, 4), evidence="receipt"),),
    "layers missing at the end": (segment((0, 9), part("A", (0, 29), (0, 9))),),
    "layers missing at the beginning": (segment((0, 9), part("A", (1, 30), (0, 9))),),
    "layers missing between": (
        segment((0, 9), part("A", (0, 9), (0, 9)), part("B", (10, 30), (0, 9))),
    ),
    "layers twice": (segment((0, 9), part("A", (0, 10), (0, 9)), part("B", (9, 30), (0, 9))),),
    "more layers than there are": (segment((0, 9), part("A", (0, 31), (0, 9))),),
    "nobody for one token": (
        segment((0, 9), part("A", (0, 30), (0, 4)), part("B", (0, 30), (5, 9))),
    ),
    "two for one token": (
        segment((0, 9), part("A", (0, 30), (0, 5)), part("B", (0, 30), (4, 9))),
    ),
    "tokens of another segment": (
        segment((0, 4), part("A", (0, 30), (0, 5)), evidence="lost"),
        segment((4, 9)),
    ),
    "layers missing in an earlier receipt": (
        segment((0, 4), part("A", (0, 9), (0, 4)), evidence="receipt"),
        segment((4, 9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("segments", GOOD.values(), ids=GOOD.keys())
def test_complete(tell: Callable[..., Any], segments: tuple[Segment, ...]) -> None:
    receipt = tell("one").receipt.model_copy(update={"segments": segments})
    assert find_gap(receipt) is None


@pytest.mark.parametrize("segments", BAD.values(), ids=BAD.keys())
def test_not_complete(tell: Callable[..., Any], segments: tuple[Segment, ...]) -> None:
    receipt = tell("one").receipt.model_copy(update={"segments": segments})
    assert find_gap(receipt) is not None


def test_a_signed_receipt_with_a_gap_does_not_hold(
    authority: Any, tell: Callable[..., Any]
) -> None:
    story = tell("one")
    (whole,) = story.receipt.segments
    short = whole.parts[0].model_copy(update={"stage": (0, 29)})
    receipt = story.receipt.model_copy(
        update={"segments": (whole.model_copy(update={"parts": (short,)}),)}
    )
    with pytest.raises(ReceiptError) as caught:
        verify(
            Bundle((sign(receipt, story.signers[0]),)),
            [authority.root],
            network=authority.network,
            now=authority.now,
        )
    assert caught.value.code == "segments"
