"""Whatever a client sends, the answer is an answer or an OpenAI-shaped refusal, never a 500."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import httpx
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.api import AnswerEvent, Completed, Health, ModelInfo, Started, create_app
from mesh.api.errors import ApiError
from mesh.api.openai.schema import ChatRequest, CompletionRequest
from mesh.api.openai.translate import MAX_CHOICES, chat_ask, choice_seed, completion_ask

PATHS = ("/v1/chat/completions", "/v1/completions")


class OneToken:
    """A node that answers everything with one token."""

    async def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        yield Started("peer")
        finish = Finish(reason="stop", prompt_tokens=1, completion_tokens=1)
        yield TokenEvent(token_id=7, text="x", finish=finish)
        yield Completed("peer", b"receipt", [{"peer": "peer"}], {}, [7])

    def models(self) -> Sequence[ModelInfo]:
        return []

    def view(self) -> Mapping[str, Any]:
        return {}

    def capabilities(self) -> Mapping[str, Any]:
        return {}

    def health(self) -> Health:
        return Health("peer", True)


def send(path: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(OneToken()), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=content, headers=headers)

    return trio.run(main)


def check(response: httpx.Response) -> None:
    assert response.headers["x-mesh-request"]
    if response.status_code == 200:
        assert response.headers["x-mesh-node"] == "peer"
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"]
        return
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]
    assert len(response.content) < 8000


text = st.text(max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4)
)
fields = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))
roles = st.sampled_from(["system", "developer", "user", "assistant"])
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), min_size=1)
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": text | parts}), min_size=1, max_size=4
)


@given(st.binary(max_size=200), st.sampled_from(PATHS), text.map(repr) | st.just(""))
@settings(max_examples=100, deadline=None)
def test_any_bytes(content: bytes, path: str, kind: str) -> None:
    headers = {"content-type": "application/json" if not kind else kind.encode("ascii", "replace")}
    check(send(path, content, headers))


@given(st.dictionaries(fields | text, anything, max_size=6), st.sampled_from(PATHS))
@settings(max_examples=200, deadline=None)
def test_any_json(body: dict[str, Any], path: str) -> None:
    content = json.dumps(body).encode()
    check(send(path, content, {"content-type": "application/json"}))


@given(messages, st.tuples(fields, anything), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_good_body_with_one_odd_field(
    messages: list[Any], odd: tuple[str, Any], chat: bool
) -> None:
    good = {"messages": messages} if chat else {"prompt": "once"}
    body = {"model": "m", **good, odd[0]: odd[1]}
    response = send(
        PATHS[not chat], json.dumps(body).encode(), {"content-type": "application/json"}
    )
    check(response)
    if response.status_code == 400 and response.json()["error"]["code"] != "invalid_json":
        # The refusal names the field at fault (or one that the odd field contradicts).
        param = response.json()["error"]["param"]
        related = {"stream_options", "top_logprobs", "best_of", "n", "max_tokens"}
        assert param is not None
        assert param.startswith(odd[0]) or param in related


sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(0, 1000),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 10),
    },
)


@given(
    sampling,
    st.integers(0, (1 << 63) - 1),
    st.integers(1, 8),
    st.lists(st.text(min_size=1, max_size=9), max_size=4),
    st.integers(1, 1000),
)
@settings(deadline=None)
def test_what_is_accepted_arrives_unchanged(
    sampling: dict[str, Any], seed: int, n: int, stop: list[str], limit: int
) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "seed": seed,
        "n": n,
        "stop": stop,
        "max_tokens": limit,
        **sampling,
    }
    requests = chat_ask(body, lambda: 0).requests
    assert len(requests) == n
    for choice, request in enumerate(requests):
        assert request.sampling.model_dump(include=set(sampling)) == sampling
        assert request.sampling.seed == choice_seed(seed, choice)
        assert list(request.stop) == stop
        assert request.max_tokens == limit
        # A copy that skipped validation would show here.
        assert GenerateRequest.model_validate(request.model_dump()) == request
    assert len({request.sampling.seed for request in requests}) == n


@given(st.lists(st.text(max_size=5) | st.integers(-3, 9), max_size=70), st.integers(-2, 70))
@settings(deadline=None)
def test_prompts_times_n_is_bounded(prompt: list[Any], n: int) -> None:
    try:
        ask = completion_ask({"model": "m", "prompt": prompt, "n": n}, lambda: 1)
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None
    else:
        assert len(ask.requests) <= MAX_CHOICES
        assert len(ask.requests) % n == 0
