"""The official client reads everything that this server says."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import openai
import pytest
import trio

from inference.errors import GenerationError

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def with_client(serving: Any, node: Any, use: Callable[[openai.OpenAI], None]) -> None:
    """Run the synchronous client in a thread beside the server."""

    async def main() -> None:
        async with serving(node) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            with client:
                await trio.to_thread.run_sync(use, client)

    trio.run(main)


def test_models(serving: Any, node: Any) -> None:
    def use(client: openai.OpenAI) -> None:
        names = [model.id for model in client.models.list()]
        assert "demo" in names
        for name in names:
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nope")

    with_client(serving, node, use)


def test_chat_plain(serving: Any, node: Any) -> None:
    def use(client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(
            model="demo", messages=MESSAGES, n=2, seed=3, logprobs=True, top_logprobs=1
        )
        assert raw.headers["x-mesh-node"] == node.peer
        answer = raw.parse()
        assert [choice.message.content for choice in answer.choices] == ["Hello world!"] * 2
        assert [choice.index for choice in answer.choices] == [0, 1]
        first = answer.choices[0].logprobs.content[0]
        assert (first.token, first.logprob, bytes(first.bytes)) == ("Hello", -0.25, b"Hello")
        assert first.top_logprobs[0].token == "Hello"
        assert answer.usage.total_tokens == 11
        assert base64.b64decode(answer.model_extra["mesh"]["receipt"]) == b"\x00receipt"
        # What was answered can be sent back as history.
        history = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
        client.chat.completions.create(model="demo", messages=history)

    with_client(serving, node, use)


def test_chat_streamed(serving: Any, node: Any) -> None:
    def use(client: openai.OpenAI) -> None:
        chunks = list(client.chat.completions.create(model="demo", messages=MESSAGES, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "Hello world!"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].model_extra["mesh"]["token_ids"] == [0, 1, 2]
        *_, last = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert last.usage.completion_tokens == 3
        # The client's own way to put chunks together, which is strict about their shapes.
        with client.chat.completions.stream(model="demo", messages=MESSAGES, n=2) as stream:
            stream.until_done()
            final = stream.get_final_completion()
        assert [c.message.content for c in final.choices] == ["Hello world!"] * 2

    with_client(serving, node, use)


def test_completions(serving: Any, node: Any) -> None:
    def use(client: openai.OpenAI) -> None:
        answer = client.completions.create(model="demo", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == ["Hello world!"] * 2
        assert answer.choices[1].logprobs.tokens == ["Hello", " world", "!"]
        chunks = list(client.completions.create(model="demo", prompt=[1, 2], stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world!"

    with_client(serving, node, use)


def test_errors_are_the_exceptions_that_users_expect(serving: Any, node: Any) -> None:
    def use(client: openai.OpenAI) -> None:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            create(model="demo", messages=MESSAGES, extra_body={"frobnicate": 1})
        assert refused.value.param == "frobnicate"
        node.script = node.fail(GenerationError("context_length_exceeded", "too long"))
        with pytest.raises(openai.BadRequestError) as refused:
            create(model="demo", messages=MESSAGES)
        assert refused.value.code == "context_length_exceeded"
        node.script = node.fail(GenerationError("model_not_found", "nobody"))
        with pytest.raises(openai.NotFoundError):
            create(model="demo", messages=MESSAGES, stream=True)
        node.script = node.fail(GenerationError("overloaded", "full"))
        with pytest.raises(openai.InternalServerError) as failed:
            create(model="demo", messages=MESSAGES)
        assert failed.value.response.headers["retry-after"] == "1"
        node.script = node.fail(GenerationError("node_lost", "gone"), after=2)
        with pytest.raises(openai.APIError, match="gone"):
            list(create(model="demo", messages=MESSAGES, stream=True))

    with_client(serving, node, use)


def test_the_asynchronous_client(serving: Any, node: Any) -> None:
    async def main() -> None:
        async with serving(node, api_key="a-key-of-some-length") as server:
            url = f"{server.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="a-key-of-some-length") as client:
                create = client.chat.completions.create
                answer = await create(model="demo", messages=MESSAGES)
                assert answer.choices[0].message.content == "Hello world!"
                stream = await create(model="demo", messages=MESSAGES, stream=True)
                text = [chunk.choices[0].delta.content or "" async for chunk in stream]
                assert "".join(text) == "Hello world!"
                node.script = node.say_for_ever()
                async with await create(model="demo", messages=MESSAGES, stream=True) as endless:
                    await anext(endless)
                    await node.until(running=1)
                await node.until(running=0)
            async with openai.AsyncOpenAI(base_url=url, api_key="wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()

    trio.run(main)
