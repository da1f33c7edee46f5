"""The openvino-genai engine on the real demo model, as the rest of the program uses it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from inference.engines import Load
from inference.engines.genai_text import GenaiOptions, GenaiTextEngine
from inference.engines.genai_worker import Job, Outcome
from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from inference.store.manifest import ModelManifest

GREEDY = SamplingParams(temperature=0.0)
QUESTIONS = (
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Name three colors.",
    "What is 2 + 2?",
)


def ask(question: str, **fields: Any) -> GenerateRequest:
    fields = {"sampling": GREEDY, "max_tokens": 24} | fields
    return GenerateRequest(
        model="smollm2-135m-instruct", messages=({"role": "user", "content": question},), **fields
    )


async def collect(engine: GenaiTextEngine, request: GenerateRequest) -> list[TokenEvent]:
    async with contextlib.aclosing(engine.generate(request)) as events:
        return [event async for event in events]


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


@contextlib.asynccontextmanager
async def opened(
    model: ModelManifest, options: GenaiOptions | None = None
) -> AsyncIterator[GenaiTextEngine]:
    engine = await GenaiTextEngine.open(model, "CPU", options)
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest.fixture
def with_engine(
    demo_model: ModelManifest,
) -> Callable[[Callable[[GenaiTextEngine], Awaitable[None]]], None]:
    options = GenaiOptions(sequences=4, waiting=4, kv_bytes=200 << 20)

    def run(body: Callable[[GenaiTextEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            with trio.fail_after(120):
                async with opened(demo_model, options) as engine:
                    await body(engine)

        trio.run(main)

    return run


WithEngine = Callable[[Callable[[GenaiTextEngine], Awaitable[None]]], None]


def test_answers_a_question(with_engine: WithEngine, demo_model: ModelManifest) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        events = await collect(engine, ask(QUESTIONS[0]))
        assert "Paris" in text(events)
        finish = events[-1].finish
        assert finish is not None and finish.reason == "stop"
        assert all(event.finish is None for event in events[:-1])
        assert finish.completion_tokens == len(events) and finish.prompt_tokens > 20
        assert events[-1].token_id in demo_model.eos_token_ids
        assert finish.prefill_seconds > 0 and finish.decode_seconds > 0

    with_engine(body)


@pytest.mark.slow
def test_company_in_the_batch_and_a_resume_change_nothing(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        requests = [
            ask(question, sampling=SamplingParams(temperature=0.0, repetition_penalty=penalty))
            for question, penalty in zip(QUESTIONS, (1.0, 1.0, 1.3, 1.1), strict=True)
        ]
        alone = [await collect(engine, request) for request in requests]
        together: dict[int, list[TokenEvent]] = {}

        async def one(at: int) -> None:
            await trio.sleep(0.02 * at)  # join while others are under way
            together[at] = await collect(engine, requests[at % 4])

        async with trio.open_nursery() as nursery:
            for at in range(8):
                nursery.start_soon(one, at)
        for at in range(8):
            assert ids(together[at]) == ids(alone[at % 4])
            assert text(together[at]) == text(alone[at % 4])

        for request, events in zip(requests, alone, strict=True):
            for cut in (1, 7, len(events) - 1):
                resumed = await collect(
                    engine, request.model_copy(update={"resume": tuple(ids(events)[:cut])})
                )
                assert ids(resumed) == ids(events)[cut:]
                assert [e.text for e in resumed] == [e.text for e in events[cut:]]
                assert resumed[-1].finish is not None and events[-1].finish is not None
                assert resumed[-1].finish.reason == events[-1].finish.reason
                assert resumed[-1].finish.completion_tokens == events[-1].finish.completion_tokens

    with_engine(body)


def test_a_resume_of_what_was_complete_only_says_so(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        request = ask(QUESTIONS[0])
        events = await collect(engine, request)
        resumed = await collect(engine, request.model_copy(update={"resume": tuple(ids(events))}))
        assert [event.token_id for event in resumed] == [None]
        assert resumed[0].finish is not None and resumed[0].finish.reason == "stop"
        assert resumed[0].finish.completion_tokens == len(events)

    with_engine(body)


def test_stop_strings_end_the_text_before_them(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        whole = text(await collect(engine, ask(QUESTIONS[0])))
        for stop in ("Paris", "aris", " is Par", "pital of"):
            events = await collect(engine, ask(QUESTIONS[0], stop=(stop,)))
            assert text(events) == whole[: whole.index(stop)]
            assert events[-1].finish is not None and events[-1].finish.reason == "stop"
            assert events[-1].finish.completion_tokens == len(ids(events))

    with_engine(body)


def test_length_and_ignored_end(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        events = await collect(engine, ask(QUESTIONS[0], max_tokens=3))
        assert len(events) == 3 and events[-1].finish is not None
        assert events[-1].finish.reason == "length"
        events = await collect(engine, ask(QUESTIONS[0], ignore_eos=True, max_tokens=40))
        assert len(events) == 40

    with_engine(body)


def test_log_probability_of_the_chosen_token(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        request = ask(QUESTIONS[0], sampling=SamplingParams(temperature=0.0, logprobs=0))
        events = await collect(engine, request)
        plain = await collect(engine, ask(QUESTIONS[0]))
        assert ids(events) == ids(plain)
        assert all(e.logprob is None for e in plain)
        for event in events:
            assert event.logprob is not None and event.logprob.token_id == event.token_id
            assert -5.0 < event.logprob.logprob < 0.0
        assert "".join(e.logprob.token for e in events[:-1] if e.logprob) == text(events)

    with_engine(body)


def test_what_it_cannot_honour_is_refused_by_name(with_engine: WithEngine) -> None:
    refused: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "presence_penalty": {"presence_penalty": 0.5},
        "frequency_penalty": {"frequency_penalty": -0.5},
        "logit_bias": {"logit_bias": {5: 1.0}},
        "top_logprobs": {"logprobs": 2},
    }

    async def body(engine: GenaiTextEngine) -> None:
        for param, fields in refused.items():
            sampling = SamplingParams(**({"temperature": 0.0} | fields))
            with pytest.raises(GenerationError) as caught:
                await collect(engine, ask("Hi", sampling=sampling))
            assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)

    with_engine(body)


def test_prompts_that_do_not_fit_or_make_no_sense(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        async def refused(request: GenerateRequest) -> tuple[str, str | None]:
            with pytest.raises(GenerationError) as caught:
                await collect(engine, request)
            return caught.value.code, caught.value.param

        assert engine.context_length == 8192
        long = ask("word " * 9000)
        assert await refused(long) == ("context_length_exceeded", "messages")
        room = ask("Hi", max_tokens=8190)
        assert await refused(room) == ("context_length_exceeded", "max_tokens")
        plain = {"model": "m", "sampling": GREEDY, "max_tokens": 4}
        assert await refused(GenerateRequest(prompt="", **plain)) == ("invalid_value", "prompt")
        assert await refused(GenerateRequest(prompt_tokens=(1, 49_152), **plain)) == (
            "invalid_value",
            "prompt",
        )
        assert await refused(ask("Hi", resume=(999_999,))) == ("invalid_value", "resume")
        unreadable = GenerateRequest(model="m", messages=({"role": "robot"},), sampling=GREEDY)
        assert await refused(unreadable) == ("invalid_value", "messages")

    with_engine(body)


def test_a_consumer_that_goes_away_frees_its_place_at_once(
    with_engine: WithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        late = 0  # tokens that came for requests that were gone

        def count(outcomes: Sequence[Outcome], cache_used: float) -> None:
            nonlocal late
            late += sum(outcome.session not in engine._sessions for outcome in outcomes)
            dispatch(outcomes, cache_used)

        dispatch = engine._dispatch
        monkeypatch.setattr(engine, "_dispatch", count)
        endless = ask(QUESTIONS[1], ignore_eos=True, max_tokens=4000)
        loads: list[Load] = []
        together = trio.Event()

        def look(load: Load) -> None:
            loads.append(load)
            if load.active == 4:
                together.set()

        engine.on_load_change(look)

        async def some(number: int) -> None:
            async with contextlib.aclosing(engine.generate(endless)) as events:
                async for _ in events:
                    number -= 1
                    if number <= 0 and together.is_set():
                        return

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(some, 5)
        assert engine.load() == Load(active=0, waiting=0, slots=4, cache_used=0.0)
        assert max(load.active for load in loads) == 4

        with trio.move_on_after(0.3):  # a cancelled task instead of a closed generator
            await some(10_000)
        assert engine.load().active == 0
        await trio.sleep(0.2)
        assert late <= 10  # for each of five at most the token in the making and one more
        # All four places are free again: as many requests run side by side without waiting.
        finishes = []

        async def short() -> None:
            events = await collect(engine, ask(QUESTIONS[0], max_tokens=4))
            finishes.append(events[-1].finish)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(short)
        assert len(finishes) == 4

    with_engine(body)


def test_a_full_queue_says_when_to_come_back(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        endless = ask(QUESTIONS[1], ignore_eos=True, max_tokens=4000)

        async def keep_busy() -> None:
            await collect(engine, endless)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(keep_busy)
            changed = trio.Event()

            def look(load: Load) -> None:
                if (load.active, load.waiting) == (4, 4):
                    changed.set()

            engine.on_load_change(look)
            await changed.wait()
            with pytest.raises(GenerationError) as caught:
                await collect(engine, ask("Hi"))
            assert caught.value.code == "overloaded"
            assert caught.value.retry_after is not None and caught.value.retry_after >= 1
            nursery.cancel_scope.cancel()
        assert engine.load().waiting == 0
        assert "Paris" in text(await collect(engine, ask(QUESTIONS[0])))

    with_engine(body)


def test_closing_ends_what_runs_with_an_error(with_engine: WithEngine) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        errors: list[GenerationError] = []

        async def run() -> None:
            try:
                await collect(engine, ask(QUESTIONS[1], ignore_eos=True, max_tokens=4000))
            except GenerationError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            changed = trio.Event()
            engine.on_load_change(lambda load: changed.set() if load.active else None)
            await changed.wait()
            await engine.aclose()
            await engine.aclose()
        assert [error.code for error in errors] == ["engine_failed"]
        with pytest.raises(GenerationError, match="closed"):
            await collect(engine, ask("Hi"))

    with_engine(body)


def test_a_failure_of_the_runtime_fails_the_requests_and_not_the_engine(
    with_engine: WithEngine,
) -> None:
    async def body(engine: GenaiTextEngine) -> None:
        errors: list[GenerationError] = []

        async def run() -> None:
            try:
                await collect(engine, ask(QUESTIONS[1], ignore_eos=True, max_tokens=4000))
            except GenerationError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            changed = trio.Event()
            engine.on_load_change(lambda load: changed.set() if load.active else None)
            await changed.wait()
            # A token that does not exist makes the runtime's sampler raise within its step. The
            # engine never lets one through, so it is handed to the worker directly.
            worker = engine._worker
            assert worker is not None
            worker.submit(Job(999, [49_160], 5, frozenset(), 1.5, False))
        assert [error.code for error in errors] == ["engine_failed"]
        assert "Paris" in text(await collect(engine, ask(QUESTIONS[0])))

    with_engine(body)


def test_a_device_that_is_not_there(demo_model: ModelManifest) -> None:
    async def main() -> None:
        with pytest.raises(GenerationError, match=r"devices here: .*CPU") as caught:
            await GenaiTextEngine.open(demo_model, "NPU.7")
        assert caught.value.param == "device"

    trio.run(main)


def test_a_model_that_cannot_be_loaded(demo_model: ModelManifest, tmp_path: Path) -> None:
    for file in demo_model.files:
        (tmp_path / file.path).symlink_to(demo_model.path / file.path)
    broken = tmp_path / "openvino_model.xml"
    broken.unlink()
    broken.write_text("<net version='11'><layers/></net>")

    async def main() -> None:
        model = demo_model.model_copy(update={"path": tmp_path})
        with pytest.raises(GenerationError) as caught:
            await GenaiTextEngine.open(model, "CPU")
        assert caught.value.code == "engine_failed"
        assert demo_model.name in caught.value.message

    trio.run(main)
