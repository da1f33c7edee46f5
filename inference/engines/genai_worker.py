"""The thread under the openvino-genai engine: owns the pipeline and steps it.

All calls into the pipeline are made here. Jobs come in by a queue, in which the thread sleeps when
there is nothing to compute; what a step gave goes out in one call.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from inference.errors import GenerationError
from inference.generation import FinishReason


@dataclass(frozen=True, slots=True)
class Job:
    """A sequence to generate greedily: at most ``length`` tokens after ``tokens``, until one of
    ``ends`` comes."""

    session: int
    tokens: Sequence[int]
    length: int
    ends: frozenset[int]
    repetition_penalty: float
    logprobs: bool


@dataclass(frozen=True, slots=True)
class Started:
    """The job has a place in the batch. ``at`` is in seconds of ``time.monotonic``."""

    session: int
    at: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a job; the last one has a ``reason``."""

    session: int
    token_id: int
    logprob: float
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A job that ended without its last token."""

    session: int
    error: GenerationError


Outcome = Started | Drawn | Failed
Deliver = Callable[[Sequence[Outcome], float], None]


@dataclass(frozen=True)
class PipelineConfig:
    """What the pipeline is made with: ``blocks`` of KV for up to ``sequences`` at once."""

    path: Path
    device: str
    properties: Mapping[str, Any]
    sequences: int
    blocks: int


class GenaiWorker:
    """Runs one continuous batching pipeline.

    ``deliver(outcomes, cache_used)`` is called in the worker's thread. The methods may be called
    from any thread.
    """

    def __init__(self, config: PipelineConfig, deliver: Deliver) -> None:
        self._config = config
        self._deliver = deliver
        self._pipeline: genai.ContinuousBatchingPipeline | None = None
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, genai.GenerationHandle] = {}
        self._outcomes: list[Outcome] = []
        self._loaded = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="genai-engine", daemon=True)

    def start(self) -> None:
        """Load the model; returns when it is loaded. Raises :class:`GenerationError`."""
        self._thread.start()
        self._loaded.wait()
        if self._problem is not None:
            raise GenerationError("engine_failed", self._problem)

    def submit(self, job: Job) -> None:
        self._inbox.put(job)

    def cancel(self, session: int) -> None:
        """Stop a job before its next token. One that has ended is fine."""
        self._inbox.put(session)

    def stop(self) -> None:
        """Fail all jobs, free the model and end the thread. Blocks for a step at most."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._problem = runtime_message(error)
            return
        finally:
            self._loaded.set()
        while self._take_in():
            try:
                self._step()
            except Exception as error:  # whatever it is, nobody else can tell those who wait
                self._recover(f"the runtime failed: {runtime_message(error)}")
            self._report()
        self._fail_all("the engine is closing")
        self._report()
        self._drop()

    def _load(self) -> genai.ContinuousBatchingPipeline:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = self._config.blocks
        scheduler.max_num_seqs = self._config.sequences
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            self._config.path, scheduler, self._config.device, dict(self._config.properties)
        )
        return self._pipeline

    def _take_in(self) -> bool:
        """Handle what has come in; waits when there is nothing to do. False: stop."""
        while True:
            idle = not self._waiting and not self._running
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Job):
                self._waiting.append(item)
            elif (handle := self._running.pop(item, None)) is not None:
                handle.stop()
            else:
                self._waiting = deque(job for job in self._waiting if job.session != item)

    def _step(self) -> None:
        pipeline = self._pipeline or self._load()
        while self._waiting and len(self._running) < self._config.sequences:
            job = self._waiting.popleft()
            tokens = openvino.Tensor(np.array([job.tokens], np.int64))
            handle = pipeline.add_request(job.session, tokens, _config(job))
            self._running[job.session] = handle
            self._outcomes.append(Started(job.session, time.monotonic()))
        pipeline.step()
        for session, handle in list(self._running.items()):
            if not self._collect(session, handle):
                del self._running[session]

    def _collect(self, session: int, handle: genai.GenerationHandle) -> bool:
        """Take what a handle has; False when that was the last."""
        while handle.can_read():
            for output in handle.read().values():
                reason = _REASONS.get(output.finish_reason)
                ids, logprobs = output.generated_ids, output.generated_log_probs
                for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
                    last = reason if at == len(ids) else None
                    self._outcomes.append(Drawn(session, token, logprob, last))
                if reason is not None:
                    return False
        if handle.get_status() == genai.GenerationStatus.RUNNING:
            return True
        error = GenerationError(
            "overloaded", "there is no room in the KV cache to go on", retry_after=1.0
        )
        self._outcomes.append(Failed(session, error))
        return False

    def _recover(self, problem: str) -> None:
        """After an error nobody knows what the pipeline holds: fail all and begin afresh."""
        self._fail_all(problem)
        self._pipeline = None  # the next job loads it again

    def _fail_all(self, problem: str) -> None:
        for session in (*self._running, *(job.session for job in self._waiting)):
            self._outcomes.append(Failed(session, GenerationError("engine_failed", problem)))
        for handle in self._running.values():
            handle.stop()
        self._running.clear()
        self._waiting.clear()

    def _drop(self) -> None:
        """Free the pipeline; it complains when requests still hold KV blocks."""
        if self._pipeline is not None and self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._pipeline = None

    def _report(self) -> None:
        if self._outcomes:
            used = 0.0
            if self._pipeline is not None and self._running:
                used = min(1.0, max(0.0, self._pipeline.get_metrics().cache_usage / 100))
            outcomes, self._outcomes = self._outcomes, []
            self._deliver(outcomes, used)


_REASONS: dict[Any, FinishReason] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


def _config(job: Job) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = job.length
    config.ignore_eos = not job.ends
    config.stop_token_ids = set(job.ends)
    config.repetition_penalty = job.repetition_penalty
    config.logprobs = int(job.logprobs)
    return config


def runtime_message(error: Exception) -> str:
    """The line of a runtime error that says something: the last that is no source position."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (telling or lines or [type(error).__name__])[-1][:300]
