"""One value, one encoding; hostile bytes are refused cheaply."""

from __future__ import annotations

import pytest

from inference.generation import GenerateRequest, SamplingParams
from mesh.receipts import Bundle, Receipt, ReceiptError, request_digest, response_digest
from mesh.receipts.encoding import MAX_DEPTH, MAX_ITEMS, EncodingError, decode, encode

NOT_CANONICAL = {
    "a longer length than needed": "1801",
    "bytes after the end": "0101",
    "an indefinite list": "9f01ff",
    "an indefinite text": "7f6161ff",
    "keys out of order": "a2616201616102",
    "a key twice": "a2616101616102",
    "a float longer than needed": "fb3ff0000000000000",
    "a date": "c001",
    "a big integer": "c249ffffffffffffffffff",
    "a big float": "c5821b000000010000000001",
    "a regular expression": "d8236128",
    "a shared value": "d81c80",
    "self-described": "d9d9f701",
    "an unknown tag": "d9999901",
    "undefined": "f7",
    "a simple value": "e0",
    "more items than bytes": "9bffffffffffffffff",
    "a longer text than bytes": "7bffffffffffffffff",
    "not UTF-8": "62c328",
    "nothing": "",
    "a list as a key": "a1800100",
    "true as a key": "a1f501",
}


@pytest.mark.parametrize("data", NOT_CANONICAL.values(), ids=NOT_CANONICAL.keys())
def test_other_encodings_are_refused(data: str) -> None:
    with pytest.raises(EncodingError):
        decode(bytes.fromhex(data), 1000)


def test_depth_and_size_are_bounded() -> None:
    assert decode(b"\x81" * MAX_DEPTH + b"\x01", 1000)
    with pytest.raises(EncodingError):
        decode(b"\x81" * (MAX_DEPTH + 2) + b"\x01", 1000)
    with pytest.raises(EncodingError, match="at most 3"):
        decode(b"\x44abcd", 3)


def test_items_are_bounded_before_any_is_built() -> None:
    fits = encode([0] * (MAX_ITEMS - 1))
    assert len(decode(fits, len(fits))) == MAX_ITEMS - 1
    too_many = b"\x9a" + MAX_ITEMS.to_bytes(4, "big") + b"\x80" * MAX_ITEMS
    pairs = b"\xba" + (MAX_ITEMS // 2).to_bytes(4, "big")
    for data in (too_many, too_many[:5], pairs, b"\x82" + fits + b"\x00"):
        with pytest.raises(EncodingError, match="more than"):
            decode(data, len(data))


@pytest.mark.parametrize(
    "value", ["\ud800", 1 << 64, {1.5: 2}, {True: 1}, {1, 2}, object(), [[b"", (1, "\udfff")]]]
)
def test_values_without_an_encoding_are_refused(value: object) -> None:
    with pytest.raises(EncodingError):
        encode(value)


def test_a_request_digest_depends_on_everything_but_resume() -> None:
    request = GenerateRequest(model="m", messages=({"role": "user", "content": "a"},))
    digest = request_digest(request)
    assert digest == request_digest(request.model_copy(update={"resume": (1, 2)}))
    others = [
        {"model": "n"},
        {"messages": ({"content": "a", "role": "user", "x": None},)},
        {"messages": None, "prompt": "a"},
        {"ignore_eos": True},
        {"max_tokens": 1},
        {"stop": ("a",)},
        *(
            {"sampling": SamplingParams.model_validate(change)}
            for change in (
                {"temperature": 0.0},
                {"seed": 1},
                {"logprobs": 0},
                {"logit_bias": {5: 1.0}},
            )
        ),
    ]
    digests = {request_digest(request.model_copy(update=change)) for change in others}
    assert len(digests | {digest}) == len(others) + 1
    same = GenerateRequest(model="m", messages=({"content": "a", "role": "user"},))
    assert request_digest(same) == digest  # the order of keys is nothing


def test_a_response_digest_keeps_ids_and_text_apart() -> None:
    digests = {
        response_digest(ids, text)
        for ids, text in (((1, 2), "ab"), ((12,), "ab"), ((1,), "2ab"), ((1, 2), "a"), ((), ""))
    }
    assert len(digests) == 5


def test_a_request_with_half_a_surrogate_pair_has_no_digest() -> None:
    request = GenerateRequest(model="m", messages=({"role": "user", "content": "\ud83d"},))
    with pytest.raises(ValueError, match="surrogates"):
        request_digest(request)


def test_what_is_no_bundle_is_malformed() -> None:
    for data in (b"", b"\xa0", encode({"receipts": []}), encode([1]), b"\xff" * 100):
        with pytest.raises(ReceiptError) as caught:
            Bundle.from_bytes(data)
        assert caught.value.code == "malformed"
    with pytest.raises(ValueError):
        Receipt.from_bytes(encode({"version": 1}))
