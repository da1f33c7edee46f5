"""Every supported architecture, cut with one stage per layer, against the uncut model.

The models are tiny, with random weights; `tests/data/zoo/make.py` made them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.paged import StageConfig
from inference.split import SplitError, read_splittable
from inference.stage import Part, Stage, StepBatch

ARCHITECTURES = [
    "bitnet",
    "bloom",
    "cohere",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
]
TOKENS = 40
PROMPTS = [[(7 * i * (s + 3) + s) % 250 + 3 for i in range(n)] for s, n in enumerate((40, 5, 33))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_stage_per_layer_equals_the_uncut_model(
    architecture: str, zoo: Callable[[str], Path], uncut: Any
) -> None:
    path = zoo(architecture)
    reference = uncut(path, "f32")
    whole = read_splittable(path)
    assert whole.layers == 3
    config = StageConfig(kv_bytes=1 << 22, threads=1)
    stages = [
        Stage(whole.cut(layer, layer + 1), config, context_length=256)
        for layer in range(whole.layers)
    ]
    expected = [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]
    tokens = [list(prompt) for prompt in PROMPTS]
    past = [0] * len(PROMPTS)
    for stage in stages:
        for session in range(len(PROMPTS)):
            stage.open(session)
    for number in range(TOKENS):
        fresh = [t[p:] for t, p in zip(tokens, past, strict=True)]
        parts = [Part(session, past[session], len(fresh[session])) for session in range(3)]
        rows: Any = np.concatenate([np.array(f, np.int64) for f in fresh])
        ends = (np.cumsum([len(f) for f in fresh]) - 1).tolist()
        for stage in stages:
            rows = stage.step(StepBatch(parts, rows, ends if stage.range.is_last else ()))
        for session, (_, logits) in enumerate(expected):
            past[session] = len(tokens[session])
            np.testing.assert_allclose(rows[session], logits[number], rtol=1e-4, atol=1e-4)
            tokens[session].append(int(rows[session].argmax()))
    for prompt, got, (wanted, _) in zip(PROMPTS, tokens, expected, strict=True):
        assert got[len(prompt) :] == wanted


def test_state_beside_the_kv_cache_is_refused(zoo: Callable[[str], Path]) -> None:
    with pytest.raises(SplitError, match="whole only") as refused:
        read_splittable(zoo("lfm2"))
    assert refused.value.reason == "state_not_kv"
