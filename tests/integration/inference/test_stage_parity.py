"""The real demo model cut into unequal stages, alone and in batches, against the uncut model."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from inference.batching import Limits
from inference.engines.stage_worker import Drawn, Failed, Job, StageWorker
from inference.generation import SamplingParams
from inference.paged import StageConfig
from inference.sampling import Sampler
from inference.split import Splittable, read_splittable
from inference.stage import Stage
from inference.store.manifest import ModelManifest

CUTS = {2: (0, 11, 30), 3: (0, 4, 21, 30), 5: (0, 1, 9, 14, 27, 30)}


@dataclass
class Chain:
    """Stages with their worker; runs jobs and hands back tokens."""

    stages: list[Stage]
    sequences: int = 16
    done: threading.Condition = field(default_factory=threading.Condition)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    failed: list[Failed] = field(default_factory=list)
    sessions: int = 0

    def __post_init__(self) -> None:
        first = self.stages[0]
        limits = Limits(
            blocks=min(stage.blocks for stage in self.stages),
            block_size=first.block_size,
            context_length=first.context_length,
            sequences=self.sequences,
        )
        self.worker = StageWorker(self.stages, limits, self._deliver)
        self.worker.start()

    def _deliver(self, outcomes: Sequence[Drawn | Failed], _: Any) -> None:
        with self.done:
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    self.failed.append(outcome)
                    self.ended.add(outcome.session)
                    continue
                self.drawn[outcome.session].append(outcome.token_id)
                if outcome.reason is not None:
                    self.ended.add(outcome.session)
            self.done.notify_all()

    def start(self, prompt: list[int], count: int, params: SamplingParams) -> int:
        self.sessions += 1
        session = self.sessions
        self.drawn[session] = []
        length = len(prompt) + count
        sampler = Sampler(params, prompt)
        self.worker.submit(Job(session, list(prompt), len(prompt), length, frozenset(), sampler))
        return session

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.done:
            assert self.done.wait_for(condition, timeout=250)
        assert not self.failed

    def alone(self, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
        session = self.start(prompt, count, params)
        self.wait(lambda: session in self.ended)
        return self.drawn[session]

    def mixed(
        self, prompts: list[list[int]], count: int, params: list[SamplingParams]
    ) -> list[list[int]]:
        """All prompts, joining while others run; between them some that leave early."""
        sessions: list[int] = []
        guests: list[int] = []
        for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            if number >= 6:  # the first six together, each later one some tokens after another
                behind = sessions[number // 2]
                self.wait(lambda at=behind: len(self.drawn[at]) > 3 or at in self.ended)
            sessions.append(self.start(prompt, count, asked))
            if number % 3 == 0:
                guests.append(self.start(prompt[3:] + prompt, 5 + number, SamplingParams(seed=9)))
            if number % 5 == 4:
                self.worker.cancel(guests.pop())
        self.wait(lambda: self.ended.issuperset([*sessions, *guests]))
        return [self.drawn[session] for session in sessions]


@pytest.fixture(scope="module")
def whole(demo_model: ModelManifest) -> Splittable:
    return read_splittable(demo_model.file("openvino_model.xml"))


@pytest.fixture(params=CUTS, scope="module")
def chain(request: pytest.FixtureRequest, whole: Splittable) -> Iterator[Chain]:
    bounds = CUTS[request.param]
    config = StageConfig(kv_bytes=1 << 28)
    stages = [
        Stage(whole.cut(first, last), config, context_length=2048)
        for first, last in itertools.pairwise(bounds)
    ]
    chain = Chain(stages)
    yield chain
    chain.worker.stop()


@pytest.mark.slow
def test_greedy_alone(chain: Chain, reference: Any) -> None:
    """Five stages run all prompts alone, and two and three every second one, to save a minute."""
    stages = len(chain.stages)
    which = slice(None) if stages == 5 else slice(stages % 2, None, 2)
    greedy = reference.greedy_params
    got = [chain.alone(prompt, reference.tokens, greedy) for prompt in reference.prompts[which]]
    assert got == reference.greedy[which]


@pytest.mark.slow
def test_greedy_in_a_mixed_batch(chain: Chain, reference: Any) -> None:
    params = [reference.greedy_params] * len(reference.prompts)
    assert chain.mixed(reference.prompts, reference.tokens, params) == reference.greedy


@pytest.mark.slow
def test_seeded_sampling(chain: Chain, reference: Any) -> None:
    seeded, params, count = reference.seeded, reference.seeded_params, reference.seeded_tokens
    assert len({tuple(tokens) for tokens in seeded}) == len(seeded)
    assert chain.mixed(reference.prompts[: len(params)], count, params) == seeded
    assert chain.alone(reference.prompts[3], count, params[3]) == seeded[3]
    other_seed = params[3].model_copy(update={"seed": 1000})
    assert chain.alone(reference.prompts[3], count, other_seed) != seeded[3]


RESIDENT = """
import gc, sys
import psutil
from pathlib import Path
from inference.paged import StageConfig
from inference.split import read_splittable
from inference.stage import Stage

before = psutil.Process().memory_info().rss
whole = read_splittable(Path(sys.argv[1]))
config = StageConfig(kv_bytes=1 << 24)
stage = Stage(whole.cut(int(sys.argv[2]), int(sys.argv[3])), config, context_length=128)
stage.warm_up()
del whole
gc.collect()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.slow
def test_a_stage_takes_the_memory_of_its_range(demo_model: ModelManifest) -> None:
    def resident(first: int, last: int) -> int:
        path = demo_model.file("openvino_model.xml")
        command = [sys.executable, "-c", RESIDENT, str(path), str(first), str(last)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert resident(10, 20) < 0.55 * resident(0, 30)
