"""The stage engine with the real demo model: what clients of a Generator rely on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from inference.engines import Load
from inference.engines.stage_text import MODEL_FILE, EngineOptions, StageTextEngine
from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, SamplingParams, TokenEvent
from inference.paged import StageConfig
from inference.stage import Stage
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

WithEngine = Callable[..., None]
GREEDY = SamplingParams(temperature=0)
# 40 blocks of 32 tokens.
SMALL = StageConfig(kv_bytes=40 * 32 * 11520 * 4)


def ask(text: str, max_tokens: int | None = 24, **fields: Any) -> GenerateRequest:
    fields.setdefault("sampling", GREEDY)
    messages = ({"role": "user", "content": text},)
    return GenerateRequest(model="demo", messages=messages, max_tokens=max_tokens, **fields)


@dataclass
class Answer:
    events: list[TokenEvent]

    @property
    def ids(self) -> list[int]:
        return [event.token_id for event in self.events if event.token_id is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> Finish:
        finish = self.events[-1].finish
        assert finish is not None
        assert all(event.finish is None for event in self.events[:-1])
        return finish


async def answer(engine: StageTextEngine, request: GenerateRequest) -> Answer:
    async with aclosing(engine.generate(request)) as events:
        return Answer([event async for event in events])


async def together(engine: StageTextEngine, requests: list[GenerateRequest]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def run(number: int) -> None:
        answers[number] = await answer(engine, requests[number])

    async with trio.open_nursery() as nursery:
        for number in range(len(requests)):
            nursery.start_soon(run, number)
    return [answers[number] for number in range(len(requests))]


@pytest.fixture(scope="module")
def loaded(demo_model: ModelManifest) -> tuple[Tokenizer, Stage]:
    """The model for all tests here: compiling it takes longer than most of them."""
    path = demo_model.file(MODEL_FILE)
    return Tokenizer(demo_model), Stage.read(path, SMALL, context_length=demo_model.context_length)


@pytest.fixture
def with_engine(demo_model: ModelManifest, loaded: tuple[Tokenizer, Stage]) -> WithEngine:
    def run(
        test: Callable[[StageTextEngine], Awaitable[None]], options: EngineOptions | None = None
    ) -> None:
        async def main() -> None:
            tokenizer, stage = loaded
            stage.clear()
            engine = StageTextEngine(demo_model, tokenizer, [stage], options or EngineOptions())
            with trio.fail_after(200):
                try:
                    await test(engine)
                finally:
                    await engine.aclose()

        trio.run(main)

    return run


def test_text_tokens_and_usage(
    demo_model: ModelManifest, uncut: Any, with_engine: WithEngine
) -> None:
    tokenizer = Tokenizer(demo_model)

    async def test(engine: StageTextEngine) -> None:
        request = ask("Name three colours of autumn leaves.", 32)
        got = await answer(engine, request)
        assert request.messages is not None
        chat = tokenizer.apply_chat_template(request.messages)
        prompt = tokenizer.encode(chat, special=False)
        expected, _ = uncut(demo_model.file("openvino_model.xml"), "f32").greedy(prompt, 32)
        assert got.ids == expected[: len(got.ids)]
        assert got.text == tokenizer.decode(got.ids)
        assert got.finish.prompt_tokens == len(prompt)
        assert got.finish.completion_tokens == len(got.ids)
        assert got.finish.cached_tokens == 0
        again = await answer(engine, request)
        assert again.ids == got.ids
        assert again.finish.cached_tokens == len(prompt) // 32 * 32 > 0
        raw = await answer(
            engine,
            GenerateRequest(model="demo", prompt_tokens=prompt, max_tokens=5, sampling=GREEDY),
        )
        assert raw.ids == expected[:5] and raw.finish.reason == "length"

    with_engine(test)


SEEDED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=12345,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logprobs=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_resumed_anywhere_it_goes_on_as_if_nothing_had_happened(
    with_engine: WithEngine, sampling: SamplingParams
) -> None:
    async def test(engine: StageTextEngine) -> None:
        free = await answer(
            engine, ask("Write a limerick with an emoji 🙂.", 40, sampling=sampling)
        )
        # A stop string that begins in one token and ends in another.
        middle = len(free.text) * 3 // 4
        stop = (free.text[middle : middle + 6],)
        request = ask("Write a limerick with an emoji 🙂.", 40, sampling=sampling, stop=stop)
        unbroken = await answer(engine, request)
        assert unbroken.finish.reason == "stop"
        assert unbroken.text == free.text[: free.text.index(stop[0])]
        cuts = range(1, len(unbroken.ids), 3)
        resumed = await together(
            engine, [request.model_copy(update={"resume": tuple(unbroken.ids[:k])}) for k in cuts]
        )
        for k, rest in zip(cuts, resumed, strict=True):
            owed = unbroken.events[k:]
            assert [e.token_id for e in rest.events] == [e.token_id for e in owed]
            assert [e.text for e in rest.events] == [e.text for e in owed]
            assert rest.finish.reason == "stop"
            assert rest.finish.completion_tokens == unbroken.finish.completion_tokens
            for mine, theirs in zip(rest.events, owed, strict=True):
                assert (mine.logprob is None) == (theirs.logprob is None) == (sampling is GREEDY)
                for a, b in zip(mine.top_logprobs, theirs.top_logprobs, strict=True):
                    assert a.token_id == b.token_id
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-2)
        complete = request.model_copy(update={"resume": tuple(unbroken.ids)})
        nothing = await answer(engine, complete)
        assert [e.token_id for e in nothing.events] == [None] and nothing.text == ""
        assert nothing.finish.reason == "stop"

    with_engine(test)


@pytest.mark.slow
def test_many_at_once_equal_each_alone_even_when_memory_is_short(
    with_engine: WithEngine,
) -> None:
    async def test(engine: StageTextEngine) -> None:
        requests = [
            ask(
                f"Tell me about the number {n}. " * (1 + n % 4),
                100,
                ignore_eos=True,
                sampling=SamplingParams(temperature=0.7 * (n % 2), top_k=40, seed=n),
            )
            for n in range(10)
        ]
        # 10 sequences of up to 200 tokens need 60 blocks and there are 40: some are preempted.
        got = await together(engine, requests)
        assert [len(each.ids) for each in got] == [100] * 10
        for n in (3, 8, 9):
            assert (await answer(engine, requests[n])).ids == got[n].ids
        assert engine.load() == Load(active=0, waiting=0, slots=32, cache_used=0.0)

    with_engine(test)


def test_closing_the_iterator_stops_the_work(with_engine: WithEngine) -> None:
    async def test(engine: StageTextEngine) -> None:
        seen: list[Load] = []
        engine.on_load_change(seen.append)
        with trio.move_on_after(100) as scope:
            async with trio.open_nursery() as nursery:

                async def cancelled() -> None:
                    await answer(engine, ask("Count to a million.", 1000, ignore_eos=True))

                nursery.start_soon(cancelled)
                async with aclosing(
                    engine.generate(ask("Count.", 1000, ignore_eos=True))
                ) as events:
                    async for event in events:
                        if event.token_id is not None and engine.load().active == 2:
                            break
                assert engine.load().active + engine.load().waiting == 1
                assert (await answer(engine, ask("Hello.", 4))).finish.completion_tokens
                scope.cancel()
        await answer(engine, ask("Hello.", 2))
        assert engine.load() == Load(active=0, waiting=0, slots=32, cache_used=0.0)
        steps = engine.worker.times.steps
        await trio.sleep(0.3)
        assert engine.worker.times.steps == steps  # nothing runs for those who left
        assert max(load.active for load in seen) >= 2
        assert seen[0].active + seen[0].waiting == 1 and seen[-1].active == 0

    with_engine(test)


def test_what_is_refused(with_engine: WithEngine) -> None:
    async def refused(engine: StageTextEngine, request: GenerateRequest) -> GenerationError:
        with pytest.raises(GenerationError) as caught:
            await answer(engine, request)
        return caught.value

    async def test(engine: StageTextEngine) -> None:
        assert engine.context_length == 40 * 32
        too_long = await refused(engine, ask("a " * 1300))
        assert too_long.code == "context_length_exceeded"
        too_many = await refused(engine, ask("a", 1270))
        assert (too_many.code, too_many.param) == ("context_length_exceeded", "max_tokens")
        bias = SamplingParams(logit_bias={49152: 1.0})
        assert (await refused(engine, ask("a", sampling=bias))).param == "logit_bias"
        assert (await refused(engine, ask("a", resume=(49152,)))).param == "resume"
        async with aclosing(engine.generate(ask("Count.", 500, ignore_eos=True))) as events:
            await anext(events)
            async with trio.open_nursery() as nursery:
                queued = trio.Event()
                engine.on_load_change(lambda load: load.waiting == 1 and queued.set())
                nursery.start_soon(answer, engine, ask("Hello.", 2))
                await queued.wait()
                overloaded = await refused(engine, ask("Hello.", 2))
                assert overloaded.code == "overloaded" and overloaded.retry_after
                await events.aclose()

        failing = engine.worker._stages[0]  # the runtime under the model breaks once
        step, failing.step = failing.step, None  # type: ignore[assignment,method-assign]
        assert (await refused(engine, ask("Hello."))).code == "engine_failed"
        failing.step = step  # type: ignore[method-assign]
        assert (await answer(engine, ask("Hello.", 3))).finish.completion_tokens == 3
        async with aclosing(engine.generate(ask("Count.", 500, ignore_eos=True))) as events:
            await anext(events)
            await engine.aclose()
            with pytest.raises(GenerationError, match="closing"):
                async for _ in events:
                    pass
        assert (await refused(engine, ask("Hello."))).code == "engine_failed"

    with_engine(test, options=EngineOptions(sequences=1, waiting=1))


def test_sampling_parameters_reach_the_model(with_engine: WithEngine) -> None:
    async def test(engine: StageTextEngine) -> None:
        plain = await answer(engine, ask("Say yes.", 8, sampling=GREEDY))
        first = plain.ids[0]
        biased = SamplingParams(temperature=0, logit_bias={first: -100.0}, logprobs=5)
        other = await answer(engine, ask("Say yes.", 8, sampling=biased))
        assert other.ids[0] != first
        # Log probabilities are the model's own, before the bias.
        event = other.events[0]
        assert event.logprob is not None and len(event.top_logprobs) == 5
        assert event.top_logprobs[0].token_id == first
        assert event.logprob.logprob < event.top_logprobs[0].logprob <= 0
        assert event.logprob.token.strip() == other.events[0].text.strip()
        repeat = ask("Repeat: tick tick tick tick tick", 40, ignore_eos=True)
        penalised = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
        a, b = await together(engine, [repeat, repeat.model_copy(update={"sampling": penalised})])
        assert len(set(b.ids)) > len(set(a.ids))

    with_engine(test)
