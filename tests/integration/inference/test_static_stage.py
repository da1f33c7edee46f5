"""Stages of fixed shapes against paged ones: the same tokens, whatever happens to a session."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from inference import static_stage
from inference.paged import StageConfig, UnsupportedModel
from inference.split import Splittable, read_splittable
from inference.stage import Part, Stage, StageRefusal, StepBatch
from inference.static_stage import StaticConfig, StaticStage
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

FAMILIES = (
    "bitnet", "bloom", "cohere", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
TINY = StaticConfig("CPU", context=128, chunk=16, kv_bytes=1 << 22)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old woman who had three sons, and "
    "the youngest of them was so quiet that nobody in the village knew his name. One day",
)
Stages = Sequence[Stage | StaticStage]


class Session:
    """One session on a row of stages; ``tokens`` are those that the stages have seen."""

    def __init__(self, stages: Stages, number: int, prompt: list[int]) -> None:
        self.stages, self.number, self.prompt = stages, number, prompt
        self.tokens: list[int] = []
        for stage in stages:
            stage.open(number, len(prompt))

    def feed(self, fresh: list[int], past: int | None = None) -> np.ndarray[Any, Any]:
        """Logits behind the last of ``fresh``."""
        past = len(self.tokens) if past is None else past
        values: Any = np.array(fresh, np.int64)
        for stage in self.stages:
            sampled = (len(fresh) - 1,) if stage.range.is_last else ()
            part = Part(self.number, past, len(fresh))
            values = stage.step(StepBatch([part], values, sampled)).copy()
        self.tokens[past:] = fresh
        return values[0]

    def greedy(self, count: int) -> list[int]:
        found = [int(self.feed(self.prompt).argmax())]
        while len(found) < count:
            found.append(int(self.feed(found[-1:]).argmax()))
        return found

    def close(self) -> None:
        for stage in self.stages:
            stage.close(self.number)


def static(cut: Splittable, bounds: Sequence[int], config: StaticConfig) -> list[StaticStage]:
    return [StaticStage(cut.cut(a, b), config) for a, b in itertools.pairwise(bounds)]


def paged(cut: Splittable, bounds: Sequence[int], context: int) -> list[Stage]:
    config = StageConfig(kv_bytes=64 << 20)
    return [
        Stage(cut.cut(a, b), config, context_length=context) for a, b in itertools.pairwise(bounds)
    ]


@pytest.fixture(scope="module")
def tiny(zoo: Callable[[str], Path]) -> Splittable:
    return read_splittable(zoo("mistral"))


@pytest.mark.slow
def test_the_demo_model_in_two_stages_gives_the_tokens_of_paged_ones(
    demo_model: ModelManifest,
) -> None:
    cut = read_splittable(demo_model.file("openvino_model.xml"))
    bounds = (0, 13, demo_model.layers)
    tokenizer = Tokenizer(demo_model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]  # the last is more than a chunk
    reference = paged(cut, bounds, 128)
    expected = [Session(reference, n, prompt).greedy(32) for n, prompt in enumerate(prompts)]
    stages = static(cut, bounds, StaticConfig("CPU", context=128, chunk=32, kv_bytes=1 << 26))
    assert [Session(stages, n, prompt).greedy(32) for n, prompt in enumerate(prompts)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(zoo: Callable[[str], Path], family: str) -> None:
    cut = read_splittable(zoo(family))
    prompt = np.random.default_rng(0).integers(3, 250, 45).tolist()
    expected = Session(paged(cut, (0, 2, 3), 128), 1, prompt).greedy(24)
    assert Session(static(cut, (0, 2, 3), TINY), 1, prompt).greedy(24) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_through_the_wrapper_of_the_npu_plugin(
    zoo: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path that an NPU takes, with the CPU under the plugin's wrapper."""
    monkeypatch.setattr(static_stage, "check_device", lambda device: None)
    monkeypatch.setattr(
        static_stage, "npu_properties", lambda: {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU"}
    )
    cut = read_splittable(zoo(family))
    prompt = np.random.default_rng(0).integers(3, 250, 45).tolist()
    expected = Session(paged(cut, (0, 2, 3), 128), 1, prompt).greedy(16)
    config = StaticConfig("NPU", context=128, chunk=16, kv_bytes=1 << 22)
    assert Session(static(cut, (0, 2, 3), config), 1, prompt).greedy(16) == expected


@pytest.mark.skipif("NPU" in ov.Core().available_devices, reason="there is an NPU here")
def test_without_an_npu_it_says_so(tiny: Splittable) -> None:
    with pytest.raises(UnsupportedModel, match=r"no NPU that .*driver.*devices here: CPU"):
        StaticStage(tiny.cut(0, 3), StaticConfig())


def test_sessions_take_turns_and_can_be_cut_back(tiny: Splittable) -> None:
    stages = static(tiny, (0, 1, 3), TINY)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 250, size).tolist() for size in (5, 16, 33)]
    alone = []
    for prompt in prompts:
        session = Session(stages, 9, prompt)
        alone.append(session.greedy(20))
        session.close()
    together = [Session(stages, n, prompt) for n, prompt in enumerate(prompts)]
    found = [[int(s.feed(s.prompt).argmax())] for s in together]
    for _ in range(19):
        for session, tokens in zip(together, found, strict=True):
            tokens.append(int(session.feed(tokens[-1:]).argmax()))
    assert found == alone
    # Back to the middle of the output, to the middle of the prompt, and to nothing.
    session, tokens = together[2], [*prompts[2], *alone[2]]
    for past in (40, 20, 0):
        session.feed(tokens[past:33], past) if past < 33 else None
        past = max(past, 33)
        again = [int(session.feed([tokens[past]], past).argmax())]
        while past + len(again) + 1 < len(tokens):
            again.append(int(session.feed(again[-1:]).argmax()))
        assert again == tokens[past + 1 :]


def test_one_batch_with_prompts_and_output(tiny: Splittable) -> None:
    (stage,) = static(tiny, (0, 3), TINY)
    (reference,) = paged(tiny, (0, 3), 128)
    rng = np.random.default_rng(2)
    rows = rng.integers(3, 250, 64)
    for one in (stage, reference):
        for session, prompt in ((1, 20), (2, 8), (3, 30)):
            one.open(session, prompt)
        one.step(StepBatch([Part(2, 0, 8)], rows[:8]))
    batch = StepBatch([Part(1, 0, 20), Part(2, 8, 3), Part(3, 0, 25)], rows[:48], (4, 19, 22, 47))
    found, wanted = stage.step(batch), reference.step(batch)
    assert found.shape == (4, stage.width)
    assert np.abs(found - wanted).max() < 1e-4
    assert [stage.length(n) for n in (1, 2, 3)] == [20, 11, 25]
    assert stage.step(StepBatch([Part(1, 20, 1)], rows[:1])).shape == (0, stage.width)


def test_what_it_refuses_changes_nothing(tiny: Splittable) -> None:
    first, last = static(tiny, (0, 1, 3), StaticConfig("CPU", 32, 8, kv_bytes=40_000))
    assert (first.blocks, last.blocks) == (4, 2)
    for number in range(3):
        last.open(number)
    rows = np.ones((4, last.hidden), np.float32)
    last.step(StepBatch([Part(0, 0, 4)], rows, (3,)))

    def reason(parts: list[Part], values: Any = rows, sampled: Sequence[int] = ()) -> str:
        with pytest.raises(StageRefusal) as caught:
            last.step(StepBatch(parts, values, sampled))
        return caught.value.reason

    assert reason([]) == "bad_count"
    assert reason([Part(7, 0, 4)]) == "unknown_session"
    assert reason([Part(0, 5, 4)]) == "bad_past"
    assert reason([Part(0, -1, 4)]) == "bad_past"
    assert reason([Part(0, 4, 0)]) == "bad_count"
    assert reason([Part(0, 4, 2), Part(0, 6, 2)]) == "bad_count"
    assert reason([Part(0, 4, 29)], np.ones((29, last.hidden), np.float32)) == "context_exceeded"
    assert reason([Part(1, 0, 2), Part(2, 0, 2)]) == "out_of_blocks"
    assert reason([Part(0, 4, 4)], rows[:, 1:]) == "bad_input"
    assert reason([Part(0, 4, 4)], rows * np.nan) == "bad_input"
    assert reason([Part(0, 4, 4)], rows, (4,)) == "bad_rows"
    assert reason([Part(0, 4, 4)], rows, (2, 1)) == "bad_rows"
    assert (last.length(0), last.length(1), last.free_blocks) == (4, 0, 1)
    last.close(0)
    last.close(0)
    assert 0 not in last and last.free_blocks == 2
