"""The official client against the demo model on the real engine, through real HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import openai
import pytest
import trio

from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest
from mesh.api import AnswerEvent, Completed, Health, ModelInfo, Started

MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]


class EngineNode:
    """A node that runs everything on its own engine, and has nobody to vouch for it."""

    def __init__(self, engine: StageTextEngine) -> None:
        self.engine = engine

    async def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        yield Started("here")
        ids: list[int] = []
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                if event.token_id is not None:
                    ids.append(event.token_id)
                yield event
        yield Completed("here", b"", [{"peer": "here"}], {}, ids)

    def models(self) -> Sequence[ModelInfo]:
        model = self.engine.model
        return [ModelInfo(model.name, 0, ["here"], model.digest, model.context_length)]

    def view(self) -> Mapping[str, Any]:
        return {}

    def capabilities(self) -> Mapping[str, Any]:
        return {"devices": [self.engine.device]}

    def health(self) -> Health:
        return Health("here", True)


@asynccontextmanager
async def client_of(serving: Any, engine: StageTextEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(EngineNode(engine)) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.slow
def test_the_demo_model_through_the_official_client(serving: Any, demo_model: Any) -> None:
    """One engine, one test: loading takes longer than everything that is asked of it."""

    async def main() -> None:
        engine = await StageTextEngine.open(demo_model)
        async with client_of(serving, engine) as client:
            name = (await client.models.list()).data[0].id
            await check_chat(client, name)
            await check_seeds(client, name)
            await check_stop_and_logprobs(client, name)
            await check_completions(client, name)
            await check_refusals(client, name, engine)
            await check_leaving(client, name, engine)
        await engine.aclose()

    trio.run(main)


async def check_chat(client: openai.AsyncOpenAI, name: str) -> None:
    """Greedy: plain and streamed say the same, and usage counts what was made."""
    create = client.chat.completions.create
    plain = await create(model=name, messages=MESSAGES, temperature=0, max_tokens=12)
    text = plain.choices[0].message.content
    assert text
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.completion_tokens == 12
    stream = await create(
        model=name,
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == text
    assert chunks[-1].usage.completion_tokens == 12
    ids = plain.model_extra["mesh"]["token_ids"]
    assert chunks[-1].model_extra["mesh"]["token_ids"] == ids
    assert len(ids) == 12


async def check_seeds(client: openai.AsyncOpenAI, name: str) -> None:
    """The same seed says the same; choices differ; the seed that was drawn can be used again."""
    create = client.chat.completions.create
    one = await create(model=name, messages=MESSAGES, seed=5, max_tokens=16)
    again = await create(model=name, messages=MESSAGES, seed=5, max_tokens=16)
    assert one.choices[0].message.content == again.choices[0].message.content
    several = await create(model=name, messages=MESSAGES, seed=5, n=3, max_tokens=16)
    assert len({choice.message.content for choice in several.choices}) == 3
    drawn = await create(model=name, messages=MESSAGES, max_tokens=16)
    seed = drawn.model_extra["mesh"]["seed"]
    same = await create(model=name, messages=MESSAGES, seed=seed, max_tokens=16)
    assert same.choices[0].message.content == drawn.choices[0].message.content


async def check_stop_and_logprobs(client: openai.AsyncOpenAI, name: str) -> None:
    create = client.chat.completions.create
    whole = await create(
        model=name,
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    cut = await create(model=name, messages=MESSAGES, temperature=0, max_tokens=12, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]


async def check_completions(client: openai.AsyncOpenAI, name: str) -> None:
    create = client.completions.create
    prompts = ["Once upon a", "The capital of France is"]
    both = await create(model=name, prompt=prompts, temperature=0, max_tokens=8, logprobs=2)
    assert "time" in both.choices[0].text
    assert "Paris" in both.choices[1].text
    for choice in both.choices:
        assert len(choice.logprobs.tokens) == 8
        assert "".join(choice.logprobs.tokens) == choice.text
    biased = await create(
        model=name, prompt=[1, 2, 3], temperature=0, max_tokens=3, logit_bias={"17": 100}
    )
    assert biased.model_extra["mesh"]["token_ids"] == [17, 17, 17]


async def check_refusals(client: openai.AsyncOpenAI, name: str, engine: StageTextEngine) -> None:
    create = client.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model=name, prompt=[1] * (engine.context_length + 1), stream=True)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model=name, prompt=[(1 << 31) - 1])
    assert refused.value.param is not None


async def check_leaving(client: openai.AsyncOpenAI, name: str, engine: StageTextEngine) -> None:
    """A client that leaves in the middle frees the engine's slot."""
    idle = trio.Event()

    def on_change(load: Any) -> None:
        if load.active + load.waiting == 0:
            idle.set()

    stream = await client.completions.create(
        model=name,
        prompt="Count: 1 2 3",
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(stream)
    engine.on_load_change(on_change)
    await stream.close()
    with trio.fail_after(10):
        await idle.wait()
