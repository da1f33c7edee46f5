"""Decode speed of the openvino-genai engine at 1, 4, 8 and 16 sessions, against LLMPipeline.

LLMPipeline is openvino-genai's usual entry point, one request at a time; both run the demo model on
the CPU with the same properties, taking turns, so that a busy machine hits both alike. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path

import openvino
import openvino_genai
import platformdirs
import trio

from inference.devices import exact_properties
from inference.engines.genai_text import GenaiOptions, GenaiTextEngine
from inference.generation import GenerateRequest, SamplingParams
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore

PROMPT = 64  # tokens
SESSIONS = (1, 4, 8, 16)


def prompt_of(session: int) -> list[int]:
    """Each session its own prompt, so that none is served from another's prefix."""
    return [1000 + (session * 7919 + at * 104_729) % 40_000 for at in range(PROMPT)]


def pipeline_speed(pipeline: openvino_genai.LLMPipeline, session: int, tokens: int) -> float:
    """Tokens per second from the first token to the last."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    times: list[float] = []

    class Clock(openvino_genai.StreamerBase):
        def write(self, token: object) -> openvino_genai.StreamingStatus:
            times.append(time.perf_counter())
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    ids = openvino.Tensor(openvino.Type.i64, openvino.Shape([1, PROMPT]))
    ids.data[:] = prompt_of(session)
    pipeline.generate(ids, config, Clock())
    return (len(times) - 1) / (times[-1] - times[0])


async def engine_speed(engine: GenaiTextEngine, first: int, sessions: int, tokens: int) -> float:
    """Tokens per second of all sessions together, from the last one's first token on."""
    times: list[list[float]] = [[] for _ in range(sessions)]

    async def run(at: int) -> None:
        request = GenerateRequest(
            model=engine.model.name,
            prompt_tokens=tuple(prompt_of(first + at)),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            ignore_eos=True,
        )
        async with contextlib.aclosing(engine.generate(request)) as events:
            async for _ in events:
                times[at].append(time.perf_counter())

    async with trio.open_nursery() as nursery:
        for at in range(sessions):
            nursery.start_soon(run, at)
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    made = sum(1 for t in times for at in t if start < at <= end)
    return made / (end - start)


async def measure(model: ModelManifest, tokens: int, runs: int) -> dict[int, list[float]]:
    pipeline = openvino_genai.LLMPipeline(model.path, "CPU", **exact_properties("CPU"))
    engine = await GenaiTextEngine.open(model, "CPU", GenaiOptions(kv_bytes=512 << 20))
    speeds: dict[int, list[float]] = {0: [], **{sessions: [] for sessions in SESSIONS}}
    try:
        fresh = 0
        for run in range(runs + 1):  # the first warms up
            alone = pipeline_speed(pipeline, fresh, tokens)
            if run:
                speeds[0].append(alone)
            for sessions in SESSIONS:
                fresh += sessions
                speed = await engine_speed(engine, fresh, sessions, tokens)
                if run:
                    speeds[sessions].append(speed)
    finally:
        await engine.aclose()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    tokens, runs = (32, 2) if options.quick else (128, 5)

    usual = platformdirs.user_cache_path("meshnode", appauthor=False) / "models"
    store = ModelStore(Path(os.environ.get("MESHNODE_MODELS") or usual))
    speeds = trio.run(measure, pull(store, DEMO_MODEL), tokens, runs)
    reference = statistics.median(speeds.pop(0))
    figures = []
    for sessions, values in speeds.items():
        ours = statistics.median(values)
        target = 0.95 if sessions == 1 else None
        figures.append(
            {
                "figure": f"decode, {sessions} sessions, genai engine",
                "unit": "tokens/s",
                "ours": round(ours, 1),
                "reference": "openvino-genai LLMPipeline, 1 session",
                "reference_value": round(reference, 1),
                "ratio": round(ours / reference, 3),
                "target": target,
                "runs": runs,
            }
        )
        missed = "" if target is None or ours / reference >= target else "  (target missed)"
        print(
            f"{sessions:2} sessions: {ours:7.1f} tok/s, LLMPipeline {reference:.1f}, "
            f"ratio {ours / reference:.2f}{missed}"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
