"""The JSON of answers, apart from HTTP."""

from __future__ import annotations

from typing import Any

from inference.generation import TokenEvent, TokenLogprob
from mesh.api.openai.shapes import Shape, make_shape
from mesh.api.openai.translate import chat_ask, completion_ask


def chat_shape(**fields: Any) -> Shape:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return make_shape(chat_ask(body, lambda: 1), "id", 1_700_000_000)


def completion_shape(**fields: Any) -> Shape:
    body = {"model": "m", "prompt": "x", **fields}
    return make_shape(completion_ask(body, lambda: 1), "id", 1_700_000_000)


def event(text: str, logprob: float = -0.5, *others: tuple[str, float]) -> TokenEvent:
    chosen = TokenLogprob(token_id=1, token=text, logprob=logprob)
    top = tuple(TokenLogprob(token_id=2 + i, token=t, logprob=p) for i, (t, p) in enumerate(others))
    return TokenEvent(token_id=1, text=text, logprob=chosen, top_logprobs=top)


def test_a_chat_chunk_adds_text_and_nothing_else() -> None:
    shape = chat_shape(stream=True)
    assert shape.delta(0, event("hi")) == {
        "index": 0,
        "delta": {"content": "hi"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert shape.delta(0, TokenEvent(token_id=3)) is None  # held back: nothing to say yet


def test_a_token_without_text_still_shows_its_logprob() -> None:
    shape = chat_shape(stream=True, logprobs=True)
    held = TokenEvent(
        token_id=3, logprob=TokenLogprob(token_id=3, token="\ufffd", logprob=float("-inf"))
    )
    chunk = shape.delta(0, held)
    assert chunk is not None
    assert chunk["delta"] == {"content": ""}
    assert chunk["logprobs"]["content"] == [
        {"token": "\ufffd", "logprob": -9999.0, "bytes": None, "top_logprobs": []}
    ]


def test_usage_is_null_in_chunks_only_where_it_was_asked_for() -> None:
    assert "usage" not in chat_shape(stream=True).chunk({"index": 0})
    asked = chat_shape(stream=True, stream_options={"include_usage": True})
    assert asked.chunk({"index": 0})["usage"] is None
    assert asked.chunk(None, {"total_tokens": 3})["choices"] == []


def test_legacy_logprobs_in_chunks_are_those_of_the_whole() -> None:
    events = [event("ab", -0.1, ("ab", -0.1), ("x", -2.0)), event("c", -3.0, ("y", -0.2))]
    whole = completion_shape(logprobs=2).whole_choice(0, events, "stop")["logprobs"]
    assert whole == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.1, -3.0],
        "text_offset": [0, 2],
        "top_logprobs": [{"ab": -0.1, "x": -2.0}, {"y": -0.2, "c": -3.0}],
    }
    shape = completion_shape(logprobs=2, stream=True)
    parts = [chunk["logprobs"] for e in events if (chunk := shape.delta(0, e)) is not None]
    assert {name: [one for part in parts for one in part[name]] for name in whole} == whole


def test_of_tokens_with_one_text_the_likeliest_counts() -> None:
    one = event("\ufffd", -5.0, ("\ufffd", -1.0))
    logprobs = completion_shape(logprobs=1).whole_choice(0, [one], "stop")["logprobs"]
    assert logprobs["top_logprobs"] == [{"\ufffd": -1.0}]
