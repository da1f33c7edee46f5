"""A whole language model on openvino-genai's continuous batching, for greedy generation.

What that runtime can honour decides what this engine takes. It draws random tokens for all requests
from one generator, so what a request gets depends on its company and cannot be resumed: temperature
must be 0. To resume, the tokens that are already out become part of the prompt; the repetition
penalty counts prompt and output alike and survives that, the presence and frequency penalties count
output only and would forget: they are refused. It has no logit bias and gives the log probability
of the chosen token only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import trio

from inference import devices
from inference.engines import Load, LoadListener
from inference.engines.genai_worker import (
    Drawn,
    Failed,
    GenaiWorker,
    Job,
    Outcome,
    PipelineConfig,
    Started,
)
from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from inference.output import Output
from inference.prompt import check_request, prompt_tokens
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

# Tokens per KV block, as the plugins lay them out.
_BLOCK = {"CPU": 32, "GPU": 16}
_MEMORY_SHARE = 4  # by default the KV cache gets this part of the memory that is free: 1/4
_BYTES_PER_ELEMENT = 2  # f16


@dataclass(frozen=True, slots=True)
class GenaiOptions:
    """``sequences`` run in one batch, ``waiting`` more may queue. ``kv_bytes`` bounds the KV cache;
    by default it is enough for all sequences, or a quarter of the free memory if that is less."""

    sequences: int = 16
    waiting: int = 64
    kv_bytes: int | None = None


@dataclass(slots=True)
class _Session:
    """A request under way. Times are in seconds of ``time.monotonic``; 0: not yet."""

    job: Job
    prompt: int
    outcomes: trio.MemorySendChannel[Outcome]
    asked: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    ended: bool = False


class GenaiTextEngine:
    """Implements :class:`inference.engines.LanguageEngine`. Made by :meth:`open`."""

    def __init__(self, model: ModelManifest, tokenizer: Tokenizer, device: str) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._device = device
        self._options = GenaiOptions()
        self._context = model.context_length
        self._worker: GenaiWorker | None = None
        self._ids = itertools.count(1)
        self._sessions: dict[int, _Session] = {}
        self._cache_used = 0.0
        self._usual_seconds = 1.0  # of a request in the batch, lately
        self._listeners: list[LoadListener] = []
        self._token = trio.lowlevel.current_trio_token()

    @classmethod
    async def open(
        cls, model: ModelManifest, device: str = "CPU", options: GenaiOptions | None = None
    ) -> GenaiTextEngine:
        """Load ``model`` on ``device`` (see :func:`inference.devices.resolve`).

        Raises :class:`GenerationError`: ``invalid_value`` for a device that is not there or cannot
        do this, ``engine_failed`` when the model cannot be loaded. When cancelled, waits for the
        loading to end and leaves nothing behind.
        """
        name = await trio.to_thread.run_sync(devices.resolve, device)
        tokenizer = await trio.to_thread.run_sync(Tokenizer, model)
        engine = cls(model, tokenizer, name)
        await engine._start(options or GenaiOptions())
        return engine

    async def _start(self, options: GenaiOptions) -> None:
        kind = self._device.split(".")[0]
        block = _BLOCK.get(kind)
        if block is None:
            raise GenerationError(
                "invalid_value", f"this engine cannot run on {self._device}", param="device"
            )
        per_token = self._model.kv_elements * _BYTES_PER_ELEMENT
        room = options.kv_bytes
        if room is None:
            found = await trio.to_thread.run_sync(devices.list_devices)
            free = next((d.memory_free for d in found if d.name == self._device), 0)
            room = min(
                free // _MEMORY_SHARE, options.sequences * self._model.context_length * per_token
            )
        blocks = room // (per_token * block)
        if blocks < 2:
            raise GenerationError(
                "engine_failed", f"no memory for the KV cache of {self._model.name}"
            )
        self._options = options
        self._context = min(self._model.context_length, blocks * block)
        config = PipelineConfig(
            path=self._model.path,
            device=self._device,
            properties=devices.exact_properties(self._device)
            | devices.cache_properties(self._device, self._model.path.parent / ".compiled"),
            sequences=options.sequences,
            blocks=blocks,
        )
        worker = GenaiWorker(config, self._from_worker)
        try:
            await trio.to_thread.run_sync(worker.start)
        except GenerationError as error:
            raise GenerationError(
                error.code, f"{self._model.name} on {self._device}: {error.message}"
            ) from None
        self._worker = worker

    @property
    def model(self) -> ModelManifest:
        return self._model

    @property
    def device(self) -> str:
        return self._device

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output that fit: the model's context, or less if memory is short."""
        return self._context

    def load(self) -> Load:
        active = sum(1 for session in self._sessions.values() if session.started)
        return Load(
            active=active,
            waiting=len(self._sessions) - active,
            slots=self._options.sequences,
            cache_used=self._cache_used if active else 0.0,
        )

    def on_load_change(self, listener: LoadListener) -> None:
        self._listeners.append(listener)

    async def aclose(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(worker.stop)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See :class:`inference.generation.Generator`."""
        _check_sampling(request.sampling)
        check_request(request, self._model.vocabulary_size)
        output = Output(request, self._tokenizer)
        prompt = await trio.to_thread.run_sync(self._prompt, request)
        session, outcomes = self._open_session(request, prompt, output.ends)
        room = session.job.length + len(request.resume)
        if (reason := output.nothing_left(room)) is not None:
            # The lost generation was complete but for saying so.
            yield output.end(reason, session, time.monotonic())
            return
        self._submit(session)
        try:
            async for outcome in outcomes:
                if isinstance(outcome, Failed):
                    raise outcome.error
                if isinstance(outcome, Drawn):
                    now = time.monotonic()
                    session.first_token = session.first_token or now
                    logprob = outcome.logprob if session.job.logprobs else None
                    event = output.event(
                        outcome.token_id, outcome.reason, session, now, logprob=logprob
                    )
                    yield event
                    if event.finish is not None:
                        return
        finally:
            self._release(session)

    def _prompt(self, request: GenerateRequest) -> list[int]:
        return prompt_tokens(
            request,
            self._tokenizer,
            vocabulary=self._model.vocabulary_size,
            context=self._context,
        )

    def _open_session(
        self, request: GenerateRequest, prompt: list[int], ends: frozenset[int]
    ) -> tuple[_Session, trio.MemoryReceiveChannel[Outcome]]:
        send, receive = trio.open_memory_channel[Outcome](math.inf)  # at most max_tokens of them
        job = Job(
            session=next(self._ids),
            tokens=[*prompt, *request.resume],
            length=(request.max_tokens or self._context - len(prompt)) - len(request.resume),
            ends=ends,
            repetition_penalty=request.sampling.repetition_penalty,
            logprobs=request.sampling.logprobs is not None,
        )
        return _Session(job, len(prompt), send), receive

    def _submit(self, session: _Session) -> None:
        if self._worker is None:
            raise GenerationError("engine_failed", "the engine is closed")
        if len(self._sessions) >= self._options.sequences + self._options.waiting:
            ahead = self._options.waiting / self._options.sequences
            raise GenerationError(
                "overloaded",
                f"{len(self._sessions)} requests are running or waiting",
                retry_after=float(max(1, round(self._usual_seconds * (1 + ahead)))),
            )
        self._sessions[session.job.session] = session
        self._worker.submit(session.job)
        self._tell_load()

    def _release(self, session: _Session) -> None:
        """The consumer is done with a request, or gone."""
        del self._sessions[session.job.session]
        if not session.ended and self._worker is not None:
            self._worker.cancel(session.job.session)
        if session.started:
            taken = time.monotonic() - session.started
            self._usual_seconds += (taken - self._usual_seconds) / 8
        self._tell_load()

    def _from_worker(self, outcomes: Sequence[Outcome], cache_used: float) -> None:
        """In the worker's thread."""
        with contextlib.suppress(trio.RunFinishedError):  # then nobody is left to tell
            self._token.run_sync_soon(self._dispatch, outcomes, cache_used)

    def _dispatch(self, outcomes: Sequence[Outcome], cache_used: float) -> None:
        self._cache_used = cache_used
        began = False
        for outcome in outcomes:
            session = self._sessions.get(outcome.session)
            if session is None:
                continue  # cancelled meanwhile
            if isinstance(outcome, Started):
                session.started = outcome.at
                began = True
            elif isinstance(outcome, Failed) or outcome.reason is not None:
                session.ended = True
            session.outcomes.send_nowait(outcome)
        if began:
            self._tell_load()

    def _tell_load(self) -> None:
        for listener in self._listeners:
            listener(self.load())


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse what the runtime cannot do as asked.

    At temperature 0 top_p, top_k and min_p change nothing, so they are honoured.
    """
    problems = {
        "temperature": sampling.temperature > 0 and "must be 0",
        "presence_penalty": sampling.presence_penalty != 0 and "must be 0",
        "frequency_penalty": sampling.frequency_penalty != 0 and "must be 0",
        "logit_bias": bool(sampling.logit_bias) and "must be empty",
        "top_logprobs": (sampling.logprobs or 0) > 0 and "must be 0",
    }
    for param, problem in problems.items():
        if problem:
            raise GenerationError(
                "unsupported_parameter",
                f"{param} {problem}: the engine of this model generates greedily",
                param=param,
            )
