"""Calls and frames survive the wire, and nothing else does."""

from __future__ import annotations

import contextlib
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, SamplingParams, TokenEvent, TokenLogprob
from mesh.forward.wire import (
    BEAT,
    Assignment,
    WireError,
    read_call,
    read_frame,
    read_receipt,
    read_refusal,
    write_call,
    write_cut,
    write_event,
)
from mesh.receipts import Part, Segment

PEER = "12D3KooW" + "1" * 44


def lost(first: int, last: int) -> Segment:
    part = Part(peer=PEER, serial=None, stage=(0, 30), tokens=(first, last))
    return Segment(node=PEER, tokens=(first, last), evidence="lost", parts=(part,))


def over_the_wire(value: Any) -> Any:
    return cbor2.loads(cbor2.dumps(value))


REQUEST = GenerateRequest(
    model="m",
    messages=({"role": "user", "content": [{"type": "text", "text": "Grüße \U0001f600"}]},),
    sampling=SamplingParams(temperature=0.3, seed=2**62, logit_bias={5: -1.5}, logprobs=2),
    stop=("\n\n", "END"),
    max_tokens=9,
    resume=(4, 5, 6),
)
ASSIGNMENT = Assignment(
    response="r1",
    nonce=bytes(16),
    model_digest="ab",
    resume=REQUEST.resume,
    text="abc",
    earlier=(lost(0, 2), lost(2, 3)),
)


def test_a_call_comes_through() -> None:
    body, payload = write_call(REQUEST, ASSIGNMENT)
    assert read_call(over_the_wire(body), memoryview(payload)) == (REQUEST, ASSIGNMENT)


@pytest.mark.parametrize(
    "change",
    [
        {"resume": [4, 5]},
        {"resume": [4, 5, -6]},
        {"earlier": []},
        {"nonce": b"short"},
        {"nonce": None},
        {"response": ""},
        {"entry": PEER},
        {"text": 5},
        {"earlier": [lost(1, 3).model_dump()]},
        {"earlier": [{**lost(0, 3).model_dump(), "evidence": "signer"}]},
        {"earlier": [{**lost(0, 3).model_dump(), "evidence": "receipt"}]},
        {"earlier": [lost(0, 3).model_dump()] * 16},
        {"chain": [{"peer": "x", "first": 0, "last": 2}]},
    ],
)
def test_a_wrong_call_is_refused(change: dict[str, Any]) -> None:
    body, payload = write_call(REQUEST, ASSIGNMENT)
    with pytest.raises(WireError):
        read_call(over_the_wire({**body, **change}), payload)


@pytest.mark.parametrize("payload", [b"", b"\xa0", b"\x80", b"\xff" * 9, b"\xa1\x65model\x61m"])
def test_a_wrong_request_is_refused(payload: bytes) -> None:
    body, _ = write_call(REQUEST, ASSIGNMENT)
    with pytest.raises(WireError):
        read_call(over_the_wire(body), payload)


def test_resume_comes_once() -> None:
    body, _ = write_call(REQUEST, ASSIGNMENT)
    with pytest.raises(WireError, match="without resume"):
        read_call(over_the_wire(body), cbor2.dumps({"resume": [1]}, canonical=True))


def test_a_request_without_an_encoding_is_the_requests_fault() -> None:
    broken = GenerateRequest(model="m", messages=({"role": "user", "content": "\ud800"},))
    with pytest.raises(GenerationError) as caught:
        write_call(broken, Assignment(response="r", nonce=bytes(16)))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")


LOGPROB = TokenLogprob(token_id=7, token=" a", logprob=-0.25)
FINISH = Finish(reason="length", prompt_tokens=3, completion_tokens=5, prefill_seconds=0.5)
EVENTS = [
    TokenEvent(token_id=7, text=" a"),
    TokenEvent(token_id=0, text=""),
    TokenEvent(token_id=7, text="é", logprob=LOGPROB, top_logprobs=(LOGPROB, LOGPROB)),
    TokenEvent(token_id=7, text=" a", finish=FINISH),
    TokenEvent(token_id=None, text="rest", finish=FINISH),
    TokenEvent(token_id=7, logprob=LOGPROB, finish=FINISH),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_comes_through(event: TokenEvent) -> None:
    assert read_frame(over_the_wire(write_event(12, event))) == (12, event)


def test_a_token_is_a_few_bytes() -> None:
    assert len(cbor2.dumps(write_event(500, EVENTS[0]))) <= 12


@pytest.mark.parametrize(
    "error",
    [
        GenerationError("overloaded", "full", retry_after=1.5),
        GenerationError("context_length_exceeded", "too long", param="messages"),
    ],
)
def test_an_error_comes_through_with_all_it_says(error: GenerationError) -> None:
    frame = read_frame(over_the_wire(write_cut(error)))
    refusal = read_refusal(
        error.code, error.message, {"param": error.param, "retry_after": error.retry_after}
    )
    for got in (frame, refusal):
        assert isinstance(got, GenerationError)
        assert vars(got) == vars(error)


def test_a_link_that_is_busy_is_an_overloaded_node() -> None:
    assert read_refusal("busy", "too many calls at once", {}).code == "overloaded"


def test_an_unknown_code_is_the_engines_failure() -> None:
    assert read_refusal("forbidden", "no", {}).code == "engine_failed"
    assert read_refusal("overloaded", "no", {"retry_after": "soon"}).code == "engine_failed"


def test_a_beat_is_nothing() -> None:
    assert read_frame(over_the_wire(BEAT)) is None
    assert read_receipt(b"") is None


@pytest.mark.parametrize(
    "frame",
    [
        None,
        [],
        {},
        [0, 1],
        [9],
        [1],
        [1, 0, 1],
        [1, -1, 1, ""],
        [1, True, 1, ""],
        [1, 0, None, ""],
        [1, 0, "1", ""],
        [1, 0, 1 << 31, ""],
        [1, 0, 1, "x" * 70000],
        [1, 0, 1, "", [1]],
        [1, 0, 1, "", [[1, "a"], []]],
        [1, 0, 1, "", [None, [[1, "a", 0.0]] * 21]],
        [2, 0, 1, "", None],
        [2, 0, 1, "", None, None],
        [2, 0, 1, "", None, {"reason": "tired", "prompt_tokens": 1, "completion_tokens": 1}],
        [3],
        [3, {"code": "x"}],
        [3, {"code": "x", "message": "y", "retry_after": -1.0}],
    ],
)
def test_wrong_frames_are_refused(frame: Any) -> None:
    with pytest.raises(WireError):
        read_frame(frame)


def test_a_wrong_receipt_is_refused() -> None:
    with pytest.raises(WireError):
        read_receipt(b"\x00")


hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=25,
)


@given(hostile | st.tuples(st.integers(0, 4), hostile, hostile, hostile).map(list))
def test_hostile_frames_are_read_or_refused(frame: Any) -> None:
    with contextlib.suppress(WireError):
        read_frame(frame)


@given(hostile, st.binary(max_size=64))
def test_hostile_calls_are_read_or_refused(body: Any, payload: bytes) -> None:
    with pytest.raises(WireError):
        read_call(body, payload)
