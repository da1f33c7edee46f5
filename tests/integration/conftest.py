"""What the uncut demo model says, for everything that must say the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio

from inference.devices import exact_properties
from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest, SamplingParams
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

SUBJECTS = (
    "a lighthouse",
    "rain",
    "the number seven",
    "bread",
    "a violin",
    "Mars",
    "an old map",
    "bees",
    "ice",
    "a train",
    "glass",
    "the sea",
    "a clock",
    "chess",
    "moss",
    "a bridge",
    "salt",
    "a comet",
    "ink",
    "snow",
)
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child in three sentences.",
    "List five facts about {}.",
    "Write a Python function about {}.",
)


class Uncut:
    """Greedy generation by the runtime's own stateful execution of a whole model."""

    def __init__(self, path: Path, kv_precision: str) -> None:
        properties = {**exact_properties("CPU"), "KV_CACHE_PRECISION": kv_precision}
        compiled = ov.Core().compile_model(path, "CPU", properties)
        self._request = compiled.create_infer_request()
        self._names = {name for port in compiled.inputs for name in port.get_names()}

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], np.ndarray[Any, Any]]:
        """``count`` tokens and the logits, ``[count, vocabulary]``, that they were drawn from."""
        self._request.reset_state()
        tokens, logits, past, fresh = list[int](), [], 0, prompt
        for _ in range(count):
            end = past + len(fresh)
            feed = {
                "input_ids": np.array([fresh], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(past, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            self._request.infer({name: feed[name] for name in feed if name in self._names})
            row = self._request.get_output_tensor(0).data[0, -1].copy()
            logits.append(row)
            tokens.append(int(row.argmax()))
            past, fresh = end, tokens[-1:]
        return tokens, np.stack(logits)


@pytest.fixture(scope="session")
def uncut() -> type[Uncut]:
    return Uncut


@dataclass(frozen=True)
class Reference:
    """Prompts, and what follows each when the uncut model has it alone. ``greedy`` owes nothing to
    the stage engine; ``seeded``, for the first prompts, is drawn by one stage that has all
    layers."""

    prompts: list[list[int]]
    greedy_params: SamplingParams
    tokens: int  # in each of greedy
    greedy: list[list[int]]
    seeded_params: list[SamplingParams]
    seeded_tokens: int
    seeded: list[list[int]]


@pytest.fixture(scope="session")
def reference(demo_model: ModelManifest) -> Reference:
    tokenizer = Tokenizer(demo_model)
    prompts = []
    for number, subject in enumerate(SUBJECTS):
        text = FORMS[number % len(FORMS)].format(subject)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        prompts.append(tokenizer.encode(chat, special=False))
    model = Uncut(demo_model.file("openvino_model.xml"), "f32")
    greedy = [model.greedy(prompt, 128)[0] for prompt in prompts]
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=number) for number in range(8)]

    async def draw() -> list[list[int]]:
        engine = await StageTextEngine.open(demo_model)
        drawn = []
        for prompt, sampling in zip(prompts, params, strict=False):
            request = GenerateRequest(
                model=demo_model.name,
                prompt_tokens=tuple(prompt),
                max_tokens=48,
                ignore_eos=True,
                sampling=sampling,
            )
            events = [event async for event in engine.generate(request)]
            drawn.append([event.token_id for event in events if event.token_id is not None])
        await engine.aclose()
        return drawn

    return Reference(
        prompts=prompts,
        greedy_params=SamplingParams(temperature=0.0),
        tokens=128,
        greedy=greedy,
        seeded_params=params,
        seeded_tokens=48,
        seeded=trio.run(draw),
    )
