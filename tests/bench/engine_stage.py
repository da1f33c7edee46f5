"""The stage engine against openvino-genai: decode, prefill, many sessions, more stages.

Everything runs the demo model on the CPU in this process. Contenders take turns within a round, so
that a busy machine hits all alike; figures are medians over rounds, ratios are those of the ratios
of each round, since the machine is another one a minute later. Two references each time:
openvino-genai with the properties that make a token independent of its company (f32 arithmetic, f16
KV, no dynamic quantization; ours differs by f32 KV), and as it ships (u8 KV, dynamic quantization).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openvino
import openvino_genai
import platformdirs
import trio

from inference.devices import exact_properties
from inference.engines.stage_text import MODEL_FILE, EngineOptions, StageTextEngine
from inference.generation import GenerateRequest, SamplingParams
from inference.paged import StageConfig
from inference.split import read_splittable
from inference.stage import Stage
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from inference.tokenizer import Tokenizer

PROMPT = 64  # tokens, where decoding is measured
LONG_PROMPT = 512  # where prefill is
SESSIONS = (1, 4, 8, 16)
CUTS = {2: (0, 15, 30), 3: (0, 10, 20, 30)}
KV_BYTES = 1 << 29

_numbers = itertools.count()


def fresh_prompt(length: int) -> list[int]:
    """Never the same twice, so that nothing comes from a prefix cache."""
    number = next(_numbers)
    return [1000 + (number * 7919 + at * 104_729) % 40_000 for at in range(length)]


def tensor(ids: list[int]) -> openvino.Tensor:
    made = openvino.Tensor(openvino.Type.i64, openvino.Shape([1, len(ids)]))
    made.data[:] = ids
    return made


def greedy(tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.apply_chat_template = False
    return config


class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: object) -> openvino_genai.StreamingStatus:
        self.times.append(time.perf_counter())
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def pipeline_decode(pipeline: openvino_genai.LLMPipeline, tokens: int) -> float:
    """Tokens per second from the first token to the last."""
    clock = Clock()
    pipeline.generate(tensor(fresh_prompt(PROMPT)), greedy(tokens), clock)
    return (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])


def pipeline_prefill(pipeline: openvino_genai.LLMPipeline) -> float:
    """Prompt tokens per second up to the first token."""
    clock = Clock()
    ids = tensor(fresh_prompt(LONG_PROMPT))
    began = time.perf_counter()
    pipeline.generate(ids, greedy(2), clock)
    return LONG_PROMPT / (clock.times[0] - began)


def batching_decode(
    pipeline: openvino_genai.ContinuousBatchingPipeline, sessions: int, tokens: int
) -> float:
    """Tokens per second of all sessions while all of them decode."""
    handles = [  # a request without a handle is dropped
        pipeline.add_request(next(_numbers), tensor(fresh_prompt(PROMPT)), greedy(tokens))
        for _ in range(sessions)
    ]
    for _ in range(4):  # the prompts, and the first tokens
        pipeline.step()
    began = time.perf_counter()
    for _ in range(tokens - 8):
        pipeline.step()
    taken = time.perf_counter() - began
    while pipeline.has_non_finished_requests():
        pipeline.step()
    handles.clear()
    return sessions * (tokens - 8) / taken


async def engine_times(
    engine: StageTextEngine, sessions: int, prompt: int, tokens: int
) -> list[list[float]]:
    """When each session's tokens came, the time of asking first."""
    times: list[list[float]] = [[] for _ in range(sessions)]

    async def run(at: int) -> None:
        request = GenerateRequest(
            model=engine.model.name,
            prompt_tokens=tuple(fresh_prompt(prompt)),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            ignore_eos=True,
        )
        times[at].append(time.perf_counter())
        async with contextlib.aclosing(engine.generate(request)) as events:
            async for _ in events:
                times[at].append(time.perf_counter())

    async with trio.open_nursery() as nursery:
        for at in range(sessions):
            nursery.start_soon(run, at)
    return times


async def engine_decode(engine: StageTextEngine, sessions: int, tokens: int) -> float:
    """Tokens per second of all sessions while all of them decode."""
    times = await engine_times(engine, sessions, PROMPT, tokens)
    start, end = max(t[2] for t in times), min(t[-2] for t in times)
    return sum(1 for t in times for at in t if start < at <= end) / (end - start)


async def engine_prefill(engine: StageTextEngine) -> float:
    ((asked, first, *_),) = await engine_times(engine, 1, LONG_PROMPT, 2)
    return LONG_PROMPT / (first - asked)


async def python_time(engine: StageTextEngine, sessions: int, tokens: int) -> float:
    """Milliseconds per step that the worker spends outside the runtime."""
    before = engine.worker.times
    await engine_times(engine, sessions, PROMPT, tokens)
    after = engine.worker.times
    return (after.around - before.around) / (after.steps - before.steps) * 1e3


class Contest:
    """Collects values of contenders over rounds and makes figures of their medians."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.turns: list[tuple[str, Callable[[], Coroutine[Any, Any, float]]]] = []

    def enter(self, name: str, run: Callable[[], Coroutine[Any, Any, float]]) -> None:
        self.turns.append((name, run))

    async def hold(self, rounds: int) -> None:
        for _, run in self.turns:
            await run()  # warms up
        for _ in range(rounds):
            for name, run in self.turns:
                self.values[name].append(await run())

    def figure(
        self, text: str, unit: str, ours: str, reference: str, target: float | None
    ) -> dict[str, Any]:
        own, other = (statistics.median(self.values[name]) for name in (ours, reference))
        rounds = zip(self.values[ours], self.values[reference], strict=True)
        ratio = statistics.median(a / b for a, b in rounds)
        return {
            "figure": text,
            "unit": unit,
            "ours": round(own, 2),
            "reference": reference,
            "reference_value": round(other, 2),
            "ratio": round(ratio, 3),
            "target": target,
            "runs": len(self.values[ours]),
        }


async def measure(model: ModelManifest, *, quick: bool) -> list[dict[str, Any]]:
    tokens, rounds = (40, 2) if quick else (96, 5)
    contest = Contest()
    config = StageConfig(kv_bytes=KV_BYTES)
    whole = read_splittable(model.file(MODEL_FILE))

    def load(bounds: tuple[int, ...]) -> StageTextEngine:
        stages = [
            Stage(whole.cut(first, last), config, context_length=2048)
            for first, last in itertools.pairwise(bounds)
        ]
        return StageTextEngine(model, Tokenizer(model), stages, EngineOptions())

    engine = load((0, whole.layers))
    chains = {count: load(bounds) for count, bounds in CUTS.items()}
    references = {"exact properties": exact_properties("CPU"), "as shipped": {}}

    def coroutine(function: Callable[..., float], *args: Any) -> Any:
        async def run() -> float:
            return await trio.to_thread.run_sync(function, *args)

        return run

    pipelines: dict[str, openvino_genai.LLMPipeline] = {}
    batchings: dict[str, openvino_genai.ContinuousBatchingPipeline] = {}
    for label, properties in references.items():
        pipelines[label] = openvino_genai.LLMPipeline(model.path, "CPU", **properties)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = 512
        batchings[label] = openvino_genai.ContinuousBatchingPipeline(
            model.path, scheduler, "CPU", properties
        )

    def enter(name: str, function: Callable[..., Any], *args: Any) -> None:
        contest.enter(name, lambda: function(*args))

    # What is compared runs one after the other, within seconds.
    for label, pipeline in pipelines.items():
        contest.enter(f"LLMPipeline prefill, {label}", coroutine(pipeline_prefill, pipeline))
    enter("prefill", engine_prefill, engine)
    for label, pipeline in pipelines.items():
        contest.enter(f"LLMPipeline decode, {label}", coroutine(pipeline_decode, pipeline, tokens))
    for sessions in SESSIONS:
        enter(f"1 stage, {sessions}", engine_decode, engine, sessions, tokens)
        for label, batching in batchings.items():
            contest.enter(
                f"ContinuousBatchingPipeline {sessions}, {label}",
                coroutine(batching_decode, batching, sessions, tokens),
            )
        for count, chain in chains.items():
            enter(f"{count} stages, {sessions}", engine_decode, chain, sessions, tokens)
    for sessions in (1, 16):
        enter(f"python {sessions}", python_time, engine, sessions, tokens)
    await contest.hold(rounds)
    figures = []
    for label in references:
        exact = label == "exact properties"
        figures.append(
            contest.figure(
                "decode, 1 session",
                "tokens/s",
                "1 stage, 1",
                f"LLMPipeline decode, {label}",
                0.95 if exact else None,
            )
        )
        figures.append(
            contest.figure(
                f"prefill of {LONG_PROMPT} tokens",
                "tokens/s",
                "prefill",
                f"LLMPipeline prefill, {label}",
                None,
            )
        )
        figures += [
            contest.figure(
                f"decode, {sessions} sessions",
                "tokens/s",
                f"1 stage, {sessions}",
                f"ContinuousBatchingPipeline {sessions}, {label}",
                0.9 if exact else None,
            )
            for sessions in SESSIONS
        ]
    figures += [
        contest.figure(
            f"decode, {sessions} sessions, {count} stages in one process",
            "tokens/s",
            f"{count} stages, {sessions}",
            f"1 stage, {sessions}",
            0.95 if count == 2 else None,
        )
        for sessions in SESSIONS
        for count in CUTS
    ]
    for sessions in (1, 16):
        spent = statistics.median(contest.values[f"python {sessions}"])
        step = 1e3 * sessions / statistics.median(contest.values[f"1 stage, {sessions}"])
        figures.append(
            {
                "figure": f"Python time per step, {sessions} sessions",
                "unit": "ms",
                "ours": round(spent, 3),
                "reference": "the whole step",
                "reference_value": round(step, 3),
                "ratio": round(step / spent, 2),
                "target": None,
                "runs": rounds,
            }
        )
    for each in (engine, *chains.values()):
        await each.aclose()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    usual = platformdirs.user_cache_path("meshnode", appauthor=False) / "models"
    store = ModelStore(Path(os.environ.get("MESHNODE_MODELS") or usual))
    figures = trio.run(lambda: measure(pull(store, DEMO_MODEL), quick=args.quick))
    for figure in figures:
        missed = figure["target"] is not None and figure["ratio"] < figure["target"]
        print(
            f"{figure['figure']:48} {figure['ours']:8.1f} {figure['unit']:9}"
            f"{figure['ratio']:6.2f}x of {figure['reference']} ({figure['reference_value']:.1f})"
            + (f"; target {figure['target']} missed" if missed else "")
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
