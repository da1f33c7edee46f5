"""Encoded activations: how far they may be off, and that no payload does harm."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mesh.relay.activations import Encoding, bytes_per_token, decode, encode
from mesh.relay.frames import Row, not_finite
from mesh.relay.refusal import Refusal

FORMS: tuple[Encoding, ...] = get_args(Encoding)
SHAPES = array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12)


def floats(limit: float) -> st.SearchStrategy[Any]:
    return st.floats(-limit, limit, width=32)


def tokens(limit: float) -> st.SearchStrategy[Any]:
    return SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=floats(limit)))


def there_and_back(hidden: np.ndarray, form: Encoding) -> tuple[Encoding, np.ndarray]:
    encoding, rows = encode(hidden, form)
    assert len(rows) == len(hidden)
    payload = rows.tobytes()
    assert len(payload) == len(hidden) * bytes_per_token(encoding, hidden.shape[1])
    return encoding, decode(payload, encoding, *hidden.shape)


def bound(hidden: np.ndarray, form: Encoding) -> np.ndarray:
    """How far each value may be off."""
    size = np.abs(hidden).astype(np.float64)
    if form == "f32":
        return np.zeros_like(size)
    if form == "bf16":
        return size * 2.0**-8 + 1e-40
    if form == "f16":
        return size * 2.0**-11 + 2.0**-25
    # The scale is that of the fifth largest, half of a level is the most that rounding does.
    order = np.sort(size, axis=1)[:, ::-1]
    fifth = order[:, 4:5] if size.shape[1] > 4 else np.zeros((len(size), 1))
    kept = size * 2.0**-11 + 2.0**-25
    return np.maximum(kept, fifth / 127 * 0.5001 + 2e-36)


@pytest.mark.parametrize("form", FORMS)
@given(hidden=tokens(60000.0))
def test_values_come_back_within_the_bound(form: Encoding, hidden: np.ndarray) -> None:
    encoding, values = there_and_back(hidden, form)
    assert encoding == form
    assert (np.abs(values.astype(np.float64) - hidden) <= bound(hidden, form)).all()


@pytest.mark.parametrize("form", FORMS)
@given(hidden=tokens(3.4028234663852886e38))
def test_any_float_survives_in_some_form(form: Encoding, hidden: np.ndarray) -> None:
    encoding, values = there_and_back(hidden, form)
    assert encoding in (form, "f32")
    assert np.isfinite(values).all()
    assert (np.abs(values.astype(np.float64) - hidden) <= bound(hidden, form)).all()


@pytest.mark.parametrize("form", FORMS)
@given(hidden=tokens(1e6), data=st.data())
def test_a_token_does_not_depend_on_its_company(
    form: Encoding, hidden: np.ndarray, data: st.DataObject
) -> None:
    _, together = there_and_back(hidden, form)
    at = data.draw(st.integers(0, len(hidden) - 1))
    _, alone = there_and_back(hidden[at : at + 1], form)
    assert (together[at].astype(np.float32) == alone[0].astype(np.float32)).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_arrives_as_such(form: Encoding, bad: float) -> None:
    hidden = np.ones((3, 8), np.float32)
    hidden[1, 2] = bad
    _, values = there_and_back(hidden, form)
    rows = [Row(n, 0, 1, False) for n in range(3)]
    assert not_finite(rows, values) == {1}


def test_the_largest_four_are_kept_and_the_others_scaled_without_them() -> None:
    hidden = np.linspace(-1, 1, 64, dtype=np.float32)[None].copy()
    hidden[0, [3, 9, 40, 63]] = [24992.0, -300.0, 700.0, 64.0]
    encoding, values = there_and_back(hidden, "int8")
    assert encoding == "int8" and encode(hidden, "int8")[1].nbytes == 64 + 28
    assert (values[0, [3, 9, 40, 63]] == [24992.0, -300.0, 700.0, 64.0]).all()
    assert np.abs(values - hidden).max() <= 1 / 127


@pytest.mark.parametrize("form", FORMS)
@given(
    payload=st.binary(max_size=160), count=st.integers(1, 4), hidden=st.integers(1, 9),
    exact=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_payload_is_decoded_or_refused(
    form: Encoding, payload: bytes, count: int, hidden: int, exact: bool, data: st.DataObject
) -> None:
    if exact:
        size = count * bytes_per_token(form, hidden)
        payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        values = decode(bytearray(payload), form, count, hidden)
    except Refusal as error:
        if error.code == "malformed":
            assert form == "int8"
        else:
            assert error.code == "bad_size"
            assert len(payload) != count * bytes_per_token(form, hidden)
        return
    assert values.shape == (count, hidden) and values.nbytes <= 4 * len(payload)
    assert values.flags.writeable == (form in ("bf16", "int8")), "a view must not be written to"
    found = not_finite([Row(n, 0, 1, False) for n in range(count)], values)
    assert found == {n for n in range(count) if not np.isfinite(values[n]).all()}


@given(scale=st.floats(width=32), hidden=st.integers(5, 9), index=st.integers(0, 2**32 - 1))
def test_hostile_scales_and_indexes(scale: float, hidden: int, index: int) -> None:
    rows = encode(np.ones((1, hidden), np.float32), "int8")[1]
    rows[0, :4] = np.frombuffer(np.array(scale, "<f4").tobytes(), "u1")
    rows[0, 4:8] = np.frombuffer(np.array(index, "<u4").tobytes(), "u1")
    try:
        values = decode(rows.tobytes(), "int8", 1, hidden)
    except Refusal as error:
        assert error.code == "malformed" and index >= hidden
    else:
        assert index < hidden
        assert not_finite([Row(1, 0, 1, False)], values) == (
            set() if np.isfinite(values).all() else {1}
        )
