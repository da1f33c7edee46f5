"""Step frames: what goes in comes out, and whatever is not exactly right is refused by name."""

from __future__ import annotations

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.sampling import Sampled
from mesh.relay.activations import encode
from mesh.relay.frames import (
    MAX_ROW_TOKENS,
    Row,
    StepHeader,
    decode,
    not_finite,
    parse,
    rows_of,
    step_body,
)
from mesh.relay.messages import Tokens, tokens_body
from mesh.relay.refusal import Refusal

CHAIN = b"c" * 16
BODY = {
    "chain": CHAIN,
    "epoch": 1,
    "step": 5,
    "encoding": "f16",
    "rows": [[1, 10, 2, False], [2, 0, 1, True]],
    "spent": [0.5],
}


def header(**changes) -> StepHeader:
    return parse(StepHeader, {**BODY, **changes})


def refusal(call, *arguments) -> str:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    assert caught.value.message
    return caught.value.code


def test_values_survive_the_way() -> None:
    hidden = np.array([[1.5, -2.0], [0.25, 3.0], [100.0, 65504.0]], np.float32)
    encoding, values = encode(hidden, "f16")
    assert (encoding, values.nbytes) == ("f16", 12)
    assert (decode(header(), values.tobytes(), 2) == hidden).all()


def test_single_floats_are_exact() -> None:
    hidden = np.array([[1 / 3, 2e9], [-1e-9, 3.0], [0.1, 0.2]], np.float32)
    encoding, values = encode(hidden, "f32")
    assert encoding == "f32"
    assert (decode(header(encoding="f32"), values.tobytes(), 2) == hidden).all()


def test_a_value_beyond_half_floats_makes_the_frame_one_of_single_floats() -> None:
    hidden = np.array([[1 / 3, 2.0], [70000.0, 1 / 3], [1 / 3, 1.0]], np.float32)
    encoding, values = encode(hidden, "f16")
    assert encoding == "f32"
    received = decode(header(encoding="f32"), values.tobytes(), 2)
    assert (received[1] == hidden[1]).all()
    # Those that fit are rounded as they are without such a neighbour.
    alone = encode(hidden[:1], "f16")[1]
    assert received[0, 0] == alone[0, 0] != hidden[0, 0]


@pytest.mark.parametrize("size", [0, 11, 13, 24])
def test_the_payload_is_exactly_what_the_header_says(size: int) -> None:
    assert refusal(decode, header(), b"\0" * size, 2) == "bad_size"


@pytest.mark.parametrize(
    "changes",
    [
        {"chain": b"short"},
        {"chain": "c" * 16},
        {"epoch": -1},
        {"epoch": 1.0},
        {"step": 1 << 40},
        {"encoding": "f64"},
        {"rows": []},
        {"rows": [[1, 0, 0, True]]},
        {"rows": [[1, 0, MAX_ROW_TOKENS + 1, True]]},
        {"rows": [[1, 0, 1]]},
        {"rows": [[1, -1, 1, True]]},
        {"rows": [[1, 0, 1, 1]]},
        {"rows": [[True, 0, 1, True]]},
        {"rows": [[n, 0, 1, True] for n in range(1025)]},
        {"spent": [float("nan")]},
        {"spent": [-1.0]},
        {"spent": [0.0] * 65},
        {"more": 1},
    ],
)
def test_headers_that_are_none(changes) -> None:
    assert refusal(parse, StepHeader, {**BODY, **changes}) == "malformed"


def test_what_is_sent_is_what_is_parsed() -> None:
    rows = [(1, 10, 2, False), (2, 0, 1, True)]
    body = step_body(CHAIN, 3, 7, "f16", rows, (0.25, 0.5))
    found = parse(StepHeader, cbor2.loads(cbor2.dumps(body)))
    assert found.model_dump() == {**body, "rows": tuple(rows)}
    drawn = [(1, 11, Sampled(5)), (2, 0, Sampled(6, 1e-9, ((6, 1e-9), (5, -2.5))))]
    message = tokens_body(CHAIN, 3, 7, drawn, (0.25, 0.5))
    tokens = parse(Tokens, cbor2.loads(cbor2.dumps(message)))
    first, second = tokens.sampled
    assert (tokens.epoch, tokens.step, tokens.spent) == (3, 7, (0.25, 0.5))
    assert (first.session, first.position, first.token, first.logprob) == (1, 11, 5, None)
    assert (second.token, second.logprob) == (6, 0.0)  # a logprob above 0 is a rounding error
    assert [(t.token, t.logprob) for t in second.top] == [(6, 0.0), (5, -2.5)]


def test_one_row_a_session_and_a_bound_on_the_whole() -> None:
    assert refusal(rows_of, header(rows=[[1, 0, 1, True], [1, 1, 1, True]])) == "malformed"
    large = [[n, 0, MAX_ROW_TOKENS, False] for n in range(3)]
    assert refusal(rows_of, header(rows=large)) == "malformed"
    assert rows_of(header()) == [Row(1, 10, 2, False), Row(2, 0, 1, True)]


@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_found_by_session(dtype: str, value: float) -> None:
    rows = [Row(1, 0, 2, False), Row(2, 0, 1, False), Row(3, 0, 2, False)]
    values = np.ones((5, 4), dtype)
    assert not_finite(rows, values) == set()
    values[2, 3] = value
    assert not_finite(rows, values) == {2}
    values[4, 0] = value
    assert not_finite(rows, values) == {2, 3}


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(body=_plain | st.fixed_dictionaries({key: st.just(v) | _plain for key, v in BODY.items()}))
def test_anything_at_all_is_a_header_or_refused(body) -> None:
    try:
        found = parse(StepHeader, body)
    except Refusal as error:
        assert error.code == "malformed"
        assert len(error.message) <= 512
    else:
        assert found.tokens >= 1


@given(payload=st.binary(max_size=64), hidden=st.integers(1, 8))
def test_any_payload_is_decoded_or_refused(payload: bytes, hidden: int) -> None:
    try:
        values = decode(header(), payload, hidden)
    except Refusal as error:
        assert error.code == "bad_size"
        assert len(payload) != 3 * hidden * 2
    else:
        assert values.shape == (3, hidden)
        not_finite(rows_of(header()), values)
