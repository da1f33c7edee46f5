"""The thread of the stage engine: plans steps, runs them through the stages, draws tokens.

One loop, one thread, no lock: jobs come in by a queue and outcomes go out in one call per step.
The loop sleeps in the queue when there is nothing to compute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.batching import Limits, QueueFull, Scheduler, Step
from inference.errors import GenerationError
from inference.generation import FinishReason
from inference.sampling import Sampler, SamplingError, sample
from inference.stage import Part, Stage, StepBatch


@dataclass(slots=True)
class Job:
    """A sequence to generate. ``tokens`` are the prompt's and those that came by ``resume``;
    ``length`` is the total at which it ends, ``ends`` the tokens that end it earlier."""

    session: int
    tokens: list[int]
    prompt: int
    length: int
    ends: frozenset[int]
    sampler: Sampler
    asked: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    cached: int = 0

    @property
    def produced(self) -> int:
        """Tokens of output so far, those that came by ``resume`` included. The worker may be ahead
        of what has been delivered."""
        return len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a job; the last one has a ``reason``."""

    session: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that ended without its last token."""

    session: int
    error: GenerationError


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Sequences in the batch, and the part of the KV blocks that they hold."""

    active: int = 0
    cache_used: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds spent so far, for profiling: in the runtime and in Python around it."""

    steps: int = 0
    inferring: float = 0.0
    around: float = 0.0


Outcome = Drawn | Failed
Deliver = Callable[[Sequence[Outcome], Occupancy], None]


class StageWorker:
    """Runs a chain of stages that are all in this process; a whole model is a chain of one.

    ``deliver`` is called from the worker's thread, after each step and whenever the occupancy has
    changed. The other methods may be called from any thread.
    """

    def __init__(self, stages: Sequence[Stage], limits: Limits, deliver: Deliver) -> None:
        self._stages = stages
        self._limits = limits
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._scheduler = Scheduler(limits)
        self._outcomes: list[Outcome] = []  # not yet delivered
        self._occupancy = Occupancy()
        self._times = StepTimes()
        self._thread = threading.Thread(target=self._run, name="stage-engine", daemon=True)

    @property
    def times(self) -> StepTimes:
        return self._times

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._inbox.put(job)

    def cancel(self, session: int) -> None:
        """Stop a job before its next token. One that has ended is fine."""
        self._inbox.put(session)

    def stop(self) -> None:
        """Fail all jobs and end the thread; returns when it has ended. Blocks for one step."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            began = time.perf_counter()
            step = self._scheduler.plan()
            if step is None:
                continue
            inferring = 0.0
            try:
                inferring = self._step(step)
            except Exception as error:
                self._fail_all(f"the runtime failed: {error}")
            times = self._times
            self._times = StepTimes(
                times.steps + 1,
                times.inferring + inferring,
                times.around + time.perf_counter() - began - inferring,
            )
        self._fail_all("the engine is closing")
        self._report()

    def _take_in(self) -> bool:
        """Handle what has come in; waits when there is nothing to do. False: stop."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                if not self._scheduler.idle:
                    return True
                self._report()
                item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, Job):
                self._add(item)
            elif self._jobs.pop(item, None) is not None:
                self._scheduler.finish(item)

    def _add(self, job: Job) -> None:
        try:
            self._scheduler.add(job.session, job.tokens, job.prompt)
        except QueueFull:
            error = GenerationError("overloaded", "too many requests are waiting", retry_after=1.0)
            self._outcomes.append(Failed(job.session, error))
            return
        self._jobs[job.session] = job

    def _step(self, step: Step) -> float:
        """Run one step; returns the seconds that it spent in the stages."""
        for command in step.commands:
            for stage in self._stages:
                if command.do == "open":
                    stage.open(command.session, command.prompt)
                elif command.do == "fork":
                    stage.fork(command.source, command.session, command.length, command.prompt)
                elif command.do == "trim":
                    stage.trim(command.session, command.length)
                else:
                    stage.close(command.session)
        if not step.work:
            return 0.0
        parts: list[Part] = []
        tokens: list[int] = []
        sampled: list[int] = []
        jobs: list[Job] = []
        for work in step.work:
            job = self._jobs[work.session]
            if not job.started:
                job.started = time.monotonic()
                job.cached = min(work.past, job.prompt)
            parts.append(Part(work.session, work.past, len(work.tokens)))
            tokens += work.tokens
            if work.samples:
                sampled.append(len(tokens) - 1)
                jobs.append(job)
        rows: NDArray[Any] = np.array(tokens, np.int64)
        began = time.perf_counter()
        for stage in self._stages:
            wanted = sampled if stage.range.is_last else ()
            # What the step before gave goes out only while the runtime computes: whoever takes it
            # does not work then while this thread wants the interpreter.
            meanwhile = self._report if stage is self._stages[0] else None
            rows = stage.step(StepBatch(parts, rows, wanted), meanwhile)
        inferring = time.perf_counter() - began
        drawn = sample(rows, [job.sampler for job in jobs], [job.produced for job in jobs])
        now = time.monotonic()
        for job, result in zip(jobs, drawn, strict=True):
            if isinstance(result, SamplingError):
                self._fail(job, str(result))
                continue
            if not job.first_token:
                job.first_token = now
            token = result.token_id
            job.tokens.append(token)
            job.sampler.count(token)
            reason: FinishReason | None = None
            if token in job.ends:
                reason = "stop"
            elif len(job.tokens) >= job.length:
                reason = "length"
            if reason is None:
                self._scheduler.append(job.session, token)
            else:
                self._end(job)
            self._outcomes.append(Drawn(job.session, token, result.logprob, result.top, reason))
        return inferring

    def _end(self, job: Job, *, keep: bool = True) -> None:
        del self._jobs[job.session]
        self._scheduler.finish(job.session, keep=keep)

    def _fail(self, job: Job, message: str) -> None:
        self._end(job, keep=False)
        self._outcomes.append(Failed(job.session, GenerationError("engine_failed", message)))

    def _fail_all(self, message: str) -> None:
        """End every job and forget all KV: after an error nobody knows what it holds."""
        for session in self._jobs:
            self._outcomes.append(Failed(session, GenerationError("engine_failed", message)))
        self._jobs.clear()
        self._scheduler = Scheduler(self._limits)
        for stage in self._stages:
            stage.clear()

    def _report(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        active = self._scheduler.running
        if outcomes or active != self._occupancy.active:
            self._occupancy = Occupancy(active, self._scheduler.cache_used)
            self._deliver(outcomes, self._occupancy)
