"""Whatever bit of a receipt or of a response is turned, the check fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.generation import GenerateRequest
from mesh.receipts import (
    Bundle,
    Counts,
    Expected,
    ModelIdentity,
    Part,
    Receipt,
    ReceiptError,
    Segment,
    Timings,
    request_digest,
    response_digest,
    sign,
    verify,
)
from mesh.receipts.encoding import EncodingError, decode, encode
from mesh.receipts.record import serial_text

TOKENS = tuple(range(40, 60))
TEXT = "A text of some length, größer als nötig."
REQUEST = GenerateRequest(model="m", prompt="x")


@pytest.fixture(scope="module")
def bundle(authority: Any) -> bytes:
    node, entry = authority.identity("node"), authority.identity("entry")
    part = Part(
        peer=node.peer_id,
        serial=serial_text(node.certificate.serial),
        stage=(0, 30),
        tokens=(0, len(TOKENS)),
    )
    receipt = Receipt(
        request=request_digest(REQUEST),
        response=response_digest(TOKENS, TEXT),
        text_bytes=len(TEXT.encode()),
        model=ModelIdentity(name="m", digest="d", layers=30),
        entry=entry.peer_id,
        segments=(
            Segment(node=node.peer_id, tokens=part.tokens, evidence="signer", parts=(part,)),
        ),
        created=int(authority.now * 1000),
        nonce=bytes(16),
        counts=Counts(prompt=3, completion=len(TOKENS)),
        timings=Timings(queue=0, prefill=5, decode=6),
        finish="stop",
    )
    return Bundle((sign(receipt, node),)).to_bytes()


def holds(authority: Any, data: bytes, tokens: tuple[int, ...], text: str) -> bool:
    try:
        verify(
            Bundle.from_bytes(data),
            [authority.root],
            network=authority.network,
            now=authority.now,
            expected=Expected(request=REQUEST, token_ids=tokens, text=text),
        )
    except ReceiptError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_bit_can_be_turned(authority: Any, bundle: bytes) -> None:
    """Each single one: of the record, its signature, the certificate, or what holds them."""
    assert holds(authority, bundle, TOKENS, TEXT)
    for bit in range(len(bundle) * 8):
        turned = bytearray(bundle)
        turned[bit // 8] ^= 1 << bit % 8
        assert not holds(authority, bytes(turned), TOKENS, TEXT), bit


@given(st.data())
def test_no_piece_can_be_cut_out_or_put_in(
    authority: Any, bundle: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(bundle)))
    upto = data.draw(st.integers(at, len(bundle)))
    put = data.draw(st.binary(max_size=40))
    changed = bundle[:at] + put + bundle[upto:]
    assert holds(authority, changed, TOKENS, TEXT) == (changed == bundle)


@given(st.data())
def test_no_token_and_no_character_can_be_changed(
    authority: Any, bundle: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(TEXT)))
    upto = data.draw(st.integers(at, len(TEXT)))
    text = TEXT[:at] + data.draw(st.text(max_size=20)) + TEXT[upto:]
    assert holds(authority, bundle, TOKENS, text) == (text == TEXT)
    tokens = list(TOKENS)
    index = data.draw(st.integers(0, len(tokens) - 1))
    tokens[index] = data.draw(st.integers(0, 2**31 - 1))
    assert holds(authority, bundle, tuple(tokens), TEXT) == (tuple(tokens) == TOKENS)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(plain)
def test_what_is_encoded_comes_back(value: object) -> None:
    data = encode(value)
    assert encode(decode(data, len(data))) == data


@given(st.binary(max_size=200))
def test_hostile_bytes_decode_to_their_one_value_or_not_at_all(data: bytes) -> None:
    try:
        value = decode(data, 200)
    except EncodingError:
        return
    assert encode(value) == data
