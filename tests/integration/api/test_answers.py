"""Answers over real HTTP: shapes, errors before and after the first token, several choices."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from mesh.api import AnswerEvent, Completed, Started

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


async def post(
    url: str, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        return await client.post(path, json=body)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; the last one may be the text ``[DONE]``."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [b.removeprefix("data: ") for b in blocks if b.startswith("data: ")]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


def run(serving: Any, node: Any, *bodies: dict[str, Any], path: str = "/v1/chat/completions"):
    responses = []

    async def main() -> None:
        async with serving(node) as server:
            responses.extend([await post(server.url, body, path) for body in bodies])

    trio.run(main)
    return responses[0] if len(responses) == 1 else responses


def test_a_plain_chat(serving: Any, node: Any) -> None:
    response = run(serving, node, CHAT)
    assert response.status_code == 200
    assert response.headers["x-mesh-node"] == node.peer
    request_id = response.headers["x-mesh-request"]
    body = response.json()
    assert body["id"] == f"chatcmpl-{request_id}"
    assert node.ids == [request_id]
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert body["mesh"] == {
        "request": request_id,
        "node": node.peer,
        "nodes": [{"peer": node.peer}],
        "receipt": "AHJlY2VpcHQ=",
        "timings": {"decode": 0.5},
        "token_ids": [0, 1, 2],
        "seed": node.requests[0].sampling.seed,
    }


def test_a_streamed_chat(serving: Any, node: Any) -> None:
    response = run(serving, node, {**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-mesh-node"] == node.peer
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]  # every chunk has one
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content", "") for c in choices) == "Hello world!"
    assert [c["finish_reason"] for c in choices] == [None] * 4 + ["stop"]
    assert choices[-1]["delta"] == {}
    assert "mesh" not in chunks[-2]
    assert chunks[-1]["mesh"]["receipt"] == "AHJlY2VpcHQ="
    assert "usage" not in chunks[-1]


def test_usage_comes_last_when_asked_for(serving: Any, node: Any) -> None:
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events_of(run(serving, node, asked))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8
    assert usage["mesh"]["token_ids"] == [0, 1, 2]
    assert all(chunk["usage"] is None and "mesh" not in chunk for chunk in chunks)


def test_a_legacy_completion_plain_and_streamed(serving: Any, node: Any) -> None:
    body = {"model": "demo", "prompt": "once", "logprobs": 1}
    plain, stream = run(serving, node, body, {**body, "stream": True}, path="/v1/completions")
    whole = plain.json()["choices"][0]
    assert whole["text"] == "Hello world!"
    assert whole["logprobs"]["text_offset"] == [0, 5, 11]
    assert whole["finish_reason"] == "stop"
    *chunks, done = events_of(stream)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    shown = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [t for part in shown for t in part["tokens"]] == whole["logprobs"]["tokens"]


def test_choices_run_together_and_keep_their_indexes(serving: Any, node: Any) -> None:
    together = trio.Event()

    async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
        # No answer begins before all of them run: one after the other would hang here.
        if node.running == 6:
            together.set()
        await together.wait()
        for event in node.events(f"{request.prompt}:", f"{request.sampling.seed}"):
            yield event

    node.script = script
    body = {"model": "demo", "prompt": ["a", "b"], "n": 3, "seed": 11, "stream": True}
    *chunks, done = events_of(run(serving, node, body, path="/v1/completions"))
    assert done == "[DONE]"
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert [text[0] for text in texts.values()] == ["a", "a", "a", "b", "b", "b"]
    assert texts[0] == "a:11"
    assert len({text[2:] for text in texts.values()}) == 3  # seeds by choice, not by prompt
    mesh = chunks[-1]["mesh"]
    assert [record["index"] for record in mesh["receipts"]] == list(range(6))
    assert mesh["token_ids"] == mesh["receipts"][0]["token_ids"]
    assert len(set(node.ids)) == 6


def test_usage_counts_each_prompt_once(serving: Any, node: Any) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "n": 3}
    usage = run(serving, node, body, path="/v1/completions").json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (10, 18)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (GenerationError("context_length_exceeded", "9 tokens, room for 8"), 400, "messages"),
        (GenerationError("unsupported_parameter", "no", param="min_p"), 400, "min_p"),
        (GenerationError("invalid_value", "no", param="prompt"), 400, "messages"),
        (
            GenerationError("context_length_exceeded", "9, room for 8", param="max_tokens"),
            400,
            "max_completion_tokens",
        ),
        (GenerationError("model_not_found", "nobody serves it"), 404, "model"),
        (GenerationError("overloaded", "queues are full", retry_after=2.2), 503, None),
        (GenerationError("node_lost", "gone"), 502, None),
        (GenerationError("engine_failed", "broken"), 500, None),
    ],
)
def test_an_error_before_the_first_token_is_an_http_error(
    serving: Any, node: Any, stream: bool, error: GenerationError, status: int, param: str | None
) -> None:
    node.script = node.fail(error)
    response = run(serving, node, {**CHAT, "stream": stream, "max_completion_tokens": 4})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "error": {
            "message": error.message,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": param,
            "code": error.code,
        }
    }
    assert response.headers.get("retry-after") == ("3" if error.code == "overloaded" else None)


def test_what_nobody_foresaw_tells_no_internals(serving: Any, node: Any) -> None:
    node.script = node.fail(RuntimeError("secret"))
    response = run(serving, node, CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_an_error_after_the_first_token_is_an_event(serving: Any, node: Any) -> None:
    node.script = node.fail(GenerationError("node_lost", "gone"), after=2)
    response = run(serving, node, {**CHAT, "stream": True})
    assert response.status_code == 200
    *chunks, last = events_of(response)
    assert last["error"]["code"] == "node_lost"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "[DONE]" not in response.text


def test_an_error_late_in_a_plain_answer_is_an_http_error(serving: Any, node: Any) -> None:
    node.script = node.fail(GenerationError("node_lost", "gone"), after=2)
    assert run(serving, node, CHAT).status_code == 502


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_choice_stops_the_others(serving: Any, node: Any, stream: bool) -> None:
    first = trio.Event()

    async def script(request: GenerateRequest, name: str) -> AsyncGenerator[AnswerEvent, None]:
        if name.endswith("-1"):
            await first.wait()
            raise GenerationError("node_lost", "gone")
        async for event in node.say_for_ever()(request, name):
            yield event
            if isinstance(event, TokenEvent):
                first.set()

    node.script = script
    response = run(serving, node, {**CHAT, "n": 3, "stream": stream})
    assert node.running == 0
    if stream:
        assert events_of(response)[-1]["error"]["code"] == "node_lost"
    else:
        assert response.status_code == 502


def _without_record(node: Any) -> list[AnswerEvent]:
    return node.events("a", "b")[:-1]


def _without_finish(node: Any) -> list[AnswerEvent]:
    return [e for e in node.events("a") if not isinstance(e, TokenEvent) or e.finish is None]


def _cut_short(node: Any) -> list[AnswerEvent]:
    return node.events("a", "b")[:2]


def _more_after_finish(node: Any) -> list[AnswerEvent]:
    events = node.events("a")
    return [*events[:-1], events[1], events[-1]]


def _empty(node: Any) -> list[AnswerEvent]:
    return []


def _no_tokens(node: Any) -> list[AnswerEvent]:
    return [e for e in node.events("a") if isinstance(e, Started | Completed)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "events",
    [_without_record, _without_finish, _cut_short, _more_after_finish, _empty, _no_tokens],
)
def test_an_answer_that_breaks_its_contract_is_an_error_never_a_silent_end(
    serving: Any, node: Any, stream: bool, events: Any
) -> None:
    async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
        for event in events(node):
            yield event

    node.script = script
    response = run(serving, node, {**CHAT, "stream": stream})
    if response.status_code == 200:
        last = events_of(response)[-1]
        assert last["error"]["code"] == "internal_error"
        assert '"finish_reason":"' not in response.text
    else:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"


def test_a_successor_is_reported_in_the_record(serving: Any, node: Any) -> None:
    async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
        started, one, two, finish, record = node.events("a", "b")
        for event in (started, one, Started("other"), two, finish):
            yield event
        yield Completed(
            "other", record.receipt, [{"peer": node.peer}, {"peer": "other"}], {}, [0, 1]
        )

    node.script = script
    response = run(serving, node, {**CHAT, "stream": True})
    assert response.headers["x-mesh-node"] == node.peer
    mesh = events_of(response)[-2]["mesh"]
    assert (mesh["node"], [n["peer"] for n in mesh["nodes"]]) == ("other", [node.peer, "other"])


def test_a_silent_stream_gets_comments(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.openai.answering.KEEPALIVE_SECONDS", 0.05)
    node.script = node.say("a", "b", pause=0.3)
    response = run(serving, node, {**CHAT, "stream": True})
    assert ": waiting\n\n" in response.text
    assert events_of(response)[-1] == "[DONE]"
