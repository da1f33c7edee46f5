"""A receipt holds for what was signed, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mesh.receipts import (
    Bundle,
    Counts,
    Expected,
    ModelIdentity,
    Part,
    Receipt,
    ReceiptError,
    Segment,
    SignedReceipt,
    Timings,
    VerifiedReceipt,
    sign,
    verify,
)
from mesh.receipts.encoding import encode
from mesh.receipts.record import serial_text

DAY = 86400.0


def check(authority: Any, bundle: Bundle, now: float | None = None, **kw: Any) -> VerifiedReceipt:
    return verify(
        bundle,
        [authority.root],
        network=authority.network,
        now=authority.now if now is None else now,
        **kw,
    )


def everything(story: Any) -> Expected:
    return Expected(
        request=story.request,
        token_ids=story.tokens,
        text=story.text,
        finish="stop",
        counts=story.receipt.counts,
        entry=story.entry.peer_id,
        nonce=bytes(range(16)),
        model_name=story.receipt.model.name,
        model_digest=story.receipt.model.digest,
    )


def failure(authority: Any, bundle: Bundle, **kw: Any) -> str:
    with pytest.raises(ReceiptError) as caught:
        check(authority, bundle, **kw)
    return caught.value.code


@pytest.mark.parametrize("kind", ["one", "three"])
def test_a_true_receipt_holds(authority: Any, tell: Callable[..., Any], kind: str) -> None:
    story = tell(kind)
    bundle = Bundle.from_bytes(story.bundle.to_bytes())
    assert bundle == story.bundle
    verified = check(authority, bundle, expected=everything(story))
    assert verified.receipt == story.receipt
    assert verified.request_checked and verified.response_checked and not verified.expired


def test_it_says_which_segments_are_proved_and_which_are_only_reported(
    authority: Any, tell: Callable[..., Any]
) -> None:
    verified = check(authority, tell("three").bundle)
    assert [(s.name, s.tokens, s.evidence) for s in verified.segments] == [
        ("desk-1", (0, 4), "receipt"),
        (None, (4, 7), "lost"),
        ("desk-3", (7, 10), "signer"),
    ]
    assert [s.tokens for s in verified.unsigned] == [(4, 7)]
    assert len(verified.receipt.nodes) == 5


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"token_ids": (1, 2, 3)}, "response"),
        ({"text": "Grüße"}, "response"),
        ({"text": "Grüße, 世界 – \U0001f600 done!"}, "response"),
        ({"text": "half \ud800 of a pair"}, "response"),
        ({"finish": "length"}, "response"),
        ({"counts": Counts(prompt=12, completion=11, cached=3)}, "response"),
        ({"entry": "12D3KooW" + "1" * 44}, "entry"),
        ({"nonce": bytes(16)}, "nonce"),
        ({"model_name": "other"}, "model"),
        ({"model_digest": "00" * 32}, "model"),
    ],
)
@pytest.mark.parametrize("kind", ["one", "three"])
def test_it_does_not_hold_for_anything_else(
    authority: Any, tell: Callable[..., Any], kind: str, changed: dict[str, Any], code: str
) -> None:
    story = tell(kind)
    expected = replace(everything(story), **changed)
    assert failure(authority, story.bundle, expected=expected) == code


def test_a_longer_or_shorter_response_is_another_response(
    authority: Any, tell: Callable[..., Any]
) -> None:
    """The receipt's own counts of tokens and bytes must not hide what comes after them."""
    story = tell("one")
    for tokens, text in (
        (story.tokens, story.text + " and more"),
        ((*story.tokens, 5), story.text),
        (story.tokens[:-1], story.text),
        (story.tokens, story.text[:-1]),
    ):
        expected = Expected(token_ids=tokens, text=text)
        assert failure(authority, story.bundle, expected=expected) == "response"


def test_another_request_fails(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one")
    for change in (
        {"max_tokens": 41},
        {"messages": ({"role": "user", "content": "Hi!"},)},
        {"stop": ("x",)},
        {"sampling": story.request.sampling.model_copy(update={"seed": 1})},
    ):
        expected = Expected(request=story.request.model_copy(update=change))
        assert failure(authority, story.bundle, expected=expected) == "request"


def test_what_was_resumed_is_no_part_of_the_request(
    authority: Any, tell: Callable[..., Any]
) -> None:
    story = tell("three")
    resumed = story.request.model_copy(update={"resume": story.tokens[:7]})
    check(authority, story.bundle, expected=Expected(request=resumed))


CHANGES: list[dict[str, Any]] = [
    {"request": bytes(32)},
    {"response": bytes(32)},
    {"text_bytes": 1},
    {"model": ModelIdentity(name="other", digest="ab" * 32, layers=30)},
    {"model": ModelIdentity(name="smollm2-135m-instruct", digest="ac" * 32, layers=30)},
    {"model": ModelIdentity(name="smollm2-135m-instruct", digest="ab" * 32, layers=31)},
    {"entry": "12D3KooW" + "1" * 44},
    {"created": 1_700_000_000_000},
    {"nonce": bytes(16)},
    {"counts": Counts(prompt=13, completion=10, cached=3)},
    {"counts": Counts(prompt=12, completion=9, cached=3)},
    {"counts": Counts(prompt=12, completion=10, cached=0)},
    {"timings": Timings(queue=0, prefill=250_000, decode=1_000_001)},
    {"timings": Timings(queue=1, prefill=250_001, decode=1_000_001)},
    {"timings": Timings(queue=1, prefill=250_000, decode=1)},
    {"finish": "length"},
    {"finish": None},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
@pytest.mark.parametrize("kind", ["one", "three"])
def test_changing_a_signed_field_breaks_the_signature(
    authority: Any, tell: Callable[..., Any], kind: str, change: dict[str, Any]
) -> None:
    """Whatever field of the record is changed, with the old signature beside it."""
    story = tell(kind)
    forged = story.receipt.model_copy(update=change)
    assert forged != story.receipt
    signed = replace(story.bundle.last, receipt=forged.to_bytes())
    bundle = Bundle((*story.bundle.earlier, signed))
    assert failure(authority, bundle) in ("signature", "certificate")


def test_every_field_is_among_those_changed_above() -> None:
    unchanged = {"version", "segments"}  # changed below
    assert {key for change in CHANGES for key in change} == set(Receipt.model_fields) - unchanged


def _all_changes_of_segments(receipt: Receipt) -> list[dict[str, Any]]:
    """The receipt as plain values, with one leaf of its segments or its version changed."""
    plain = receipt.model_dump(mode="python")
    changed: list[dict[str, Any]] = [{**plain, "version": 2}]

    def walk(value: Any, rebuild: Callable[[Any], dict[str, Any]]) -> None:
        if isinstance(value, dict):
            for key in value:
                walk(value[key], lambda new, k=key: rebuild({**value, k: new}))
        elif isinstance(value, list | tuple):
            for i in range(len(value)):
                walk(value[i], lambda new, i=i: rebuild([*value[:i], new, *value[i + 1 :]]))
        elif isinstance(value, int):
            changed.append(rebuild(value + 1))
        elif isinstance(value, bytes):
            changed.append(rebuild(bytes(len(value))))
        elif value is None:
            changed.append(rebuild(bytes(32)))
        else:
            changed.append(rebuild({"signer": "lost", "lost": "receipt"}.get(value, "lost")))
            changed.append(rebuild(value[:-1] + ("1" if value[-1] != "1" else "2")))

    walk(plain["segments"], lambda new: {**plain, "segments": new})
    return changed


@pytest.mark.parametrize("kind", ["one", "three"])
def test_changing_anything_about_who_took_part_fails(
    authority: Any, tell: Callable[..., Any], kind: str
) -> None:
    story = tell(kind)
    changes = _all_changes_of_segments(story.receipt)
    assert len(changes) > (8 if kind == "one" else 40)
    for plain in changes:
        data = encode(plain)
        if data == story.receipt.to_bytes():
            continue
        signed = replace(story.bundle.last, receipt=data)
        bundle = Bundle((*story.bundle.earlier, signed))
        assert failure(authority, bundle) in ("signature", "malformed")


def test_another_nodes_signature_is_not_enough(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one")
    thief = authority.identity("thief")
    last = story.bundle.last
    with_own_certificate = SignedReceipt(
        last.receipt, thief.sign(b"meshnode-receipt-v1", last.receipt), thief.certificate.chain_der
    )
    assert failure(authority, Bundle((with_own_certificate,))) == "signer"
    stolen_certificate = replace(with_own_certificate, chain=last.chain)
    assert failure(authority, Bundle((stolen_certificate,))) == "signature"
    with pytest.raises(ValueError, match="cannot sign for"):
        sign(story.receipt, thief)


def test_a_signature_for_another_purpose_is_none(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one")
    last = story.bundle.last
    signature = story.signers[0].sign(b"meshnode-advert-v1", last.receipt)
    assert failure(authority, Bundle((replace(last, signature=signature),))) == "signature"


def test_the_certificate_that_signed_is_the_one_that_is_named(
    authority: Any, tell: Callable[..., Any]
) -> None:
    """After a renewal a node has another serial; an old receipt cannot be moved onto it."""
    story = tell("one")
    renewed = authority.identity("desk-1", now=authority.now)
    assert renewed.peer_id == story.signers[0].peer_id
    moved = replace(story.bundle.last, chain=renewed.certificate.chain_der)
    assert failure(authority, Bundle((moved,))) == "signer"


def test_a_certificate_of_another_authority_proves_nothing(
    authority: Any, make_authority: Any, tell: Callable[..., Any]
) -> None:
    other = make_authority("test", now=authority.now, name="another ca")
    stranger = make_authority("elsewhere", now=authority.now)
    story = tell("one")
    for roots, network in (
        ([other.root], "test"),
        ([stranger.root], "elsewhere"),
        ([authority.root], "elsewhere"),
        ([], "test"),
    ):
        with pytest.raises(ReceiptError) as caught:
            verify(story.bundle, roots, network=network, now=authority.now)
        assert caught.value.code == "certificate"


def test_expiry_since_is_reported_and_expiry_before_is_fatal(
    authority: Any, tell: Callable[..., Any]
) -> None:
    story = tell("one")
    later = authority.now + 400 * DAY
    assert check(authority, story.bundle, now=later).expired
    after_the_end = tell("one", created=authority.now + 60 * DAY)
    assert failure(authority, after_the_end.bundle, now=later) == "certificate"
    too_early = tell("one", created=authority.now - 60 * DAY)
    assert failure(authority, too_early.bundle) == "certificate"


def test_a_receipt_from_the_future_is_refused(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one", created=authority.now + 3600)
    assert failure(authority, story.bundle) == "created"
    check(authority, story.bundle, now=authority.now + 3600)
    check(authority, tell("one", created=authority.now + 100).bundle)  # clocks differ a little


@pytest.mark.parametrize("who", [0, 1])
def test_a_revoked_signer_proves_nothing(
    authority: Any, tell: Callable[..., Any], who: int
) -> None:
    """Of the last segment or of an earlier one."""
    story = tell("three")
    serial = story.signers[who].certificate.serial
    revoked = {authority.root.key: {serial}}
    assert failure(authority, story.bundle, revoked=revoked) == "certificate"
    check(authority, story.bundle, revoked={authority.root.key: {serial + 1}})


def test_the_receipt_of_an_earlier_segment_must_be_there_and_fit(
    authority: Any, tell: Callable[..., Any]
) -> None:
    story = tell("three")
    first, last = story.bundle.receipts
    assert failure(authority, Bundle((last,))) == "earlier"
    assert failure(authority, Bundle((first, first, last))) == "earlier"
    assert failure(authority, Bundle((tell("one").bundle.last, last))) == "earlier"
    # Only the handed-over part: it is a true statement, but not about the whole response.
    expected = Expected(token_ids=story.tokens, text=story.text)
    assert failure(authority, Bundle((first,)), expected=expected) == "response"


@pytest.mark.parametrize(
    "change", [{"nonce": bytes(16)}, {"request": bytes(32)}, {"finish": "stop"}]
)
def test_an_earlier_receipt_of_another_response_does_not_fit(
    authority: Any, tell: Callable[..., Any], change: dict[str, Any]
) -> None:
    """Both signatures are genuine; together they tell no one story."""
    story = tell("three")
    one, three = story.signers
    first = sign(Receipt.from_bytes(story.bundle.earlier[0].receipt).model_copy(update=change), one)
    claimed = story.receipt.segments[0].model_copy(update={"receipt": first.digest})
    whole = story.receipt.model_copy(update={"segments": (claimed, *story.receipt.segments[1:])})
    assert failure(authority, Bundle((first, sign(whole, three)))) == "earlier"


@pytest.mark.parametrize(
    "lie",
    [
        {"tokens": (0, 5)},
        {"node": "12D3KooW" + "1" * 44},
        {"parts": ()},
    ],
    ids=["other tokens", "another node", "other parts"],
)
def test_the_signer_cannot_say_otherwise_about_an_earlier_segment(
    authority: Any, tell: Callable[..., Any], lie: dict[str, Any]
) -> None:
    """The last node claims something of the first one's segment that the first did not sign."""
    story = tell("three")
    first, second, third = story.receipt.segments
    if "tokens" in lie:
        second = second.model_copy(
            update={
                "tokens": (5, 7),
                "parts": (second.parts[0].model_copy(update={"tokens": (5, 7)}),),
            }
        )
        parts = (first.parts[0].model_copy(update={"tokens": (0, 5)}),)
        first = first.model_copy(update={"tokens": (0, 5), "parts": parts})
    elif "node" in lie:
        parts = (first.parts[0].model_copy(update={"peer": lie["node"]}),)
        first = first.model_copy(update={"node": lie["node"], "parts": parts})
    else:
        halves = [first.parts[0].model_copy(update={"stage": s}) for s in ((0, 9), (9, 30))]
        first = first.model_copy(update={"parts": tuple(halves)})
    whole = story.receipt.model_copy(update={"segments": (first, second, third)})
    bundle = Bundle((story.bundle.earlier[0], sign(whole, story.signers[1])))
    assert failure(authority, bundle) == "earlier"


def test_what_came_before_an_earlier_segment_must_be_the_same_story(
    authority: Any, tell: Callable[..., Any]
) -> None:
    """desk-1 is lost, desk-2 hands over; the last node leaves desk-1 out and names desk-5."""
    story = tell("three")
    one, two, three, five = (authority.identity(f"desk-{i}") for i in (1, 2, 3, 5))
    base = story.receipt
    other = authority.identity("desk-4")

    def lost(who: Any) -> Segment:
        return part_of(who, (0, 4), "lost")

    def part_of(who: Any, tokens: tuple[int, int], evidence: Any, receipt: Any = None) -> Segment:
        part = Part(
            peer=who.peer_id,
            serial=serial_text(who.certificate.serial),
            stage=(0, 30),
            tokens=tokens,
        )
        return Segment(
            node=who.peer_id, tokens=tokens, evidence=evidence, parts=(part,), receipt=receipt
        )

    handed_over = base.model_copy(
        update={"segments": (lost(one), part_of(two, (4, 7), "signer")), "finish": None}
    )
    middle = sign(handed_over, two)
    for first, code in ((one, None), (five, "earlier"), (other, "earlier")):
        segments = (
            lost(first),
            part_of(two, (4, 7), "receipt", middle.digest),
            part_of(three, (7, 10), "signer"),
        )
        bundle = Bundle((middle, sign(base.model_copy(update={"segments": segments}), three)))
        if code is None:
            check(authority, bundle)
        else:
            assert failure(authority, bundle) == code


def test_added_certificates_do_not_go_unnoticed(authority: Any, tell: Callable[..., Any]) -> None:
    story = tell("one")
    last = story.bundle.last
    longer = replace(last, chain=(*last.chain, authority.root.der))
    assert failure(authority, Bundle((longer,))) == "malformed"
