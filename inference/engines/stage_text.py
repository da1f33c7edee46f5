"""A whole language model as a chain of one stage: the default engine for text.

Requests of all clients share one batch per step. What a request gives depends on the request alone:
tokens are drawn by (seed, position) and text is derived from token ids, so a generation that starts
with ``resume`` goes on as the lost one would have.

The model runs on the worker's thread; text is made here, in the consumer's task, while the worker
computes the next step. A consumer that is slow holds up nobody: its tokens wait, at most as many as
its request may produce.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import trio

from inference.batching import Limits
from inference.engines import Load, LoadListener
from inference.engines.stage_worker import Failed, Job, Occupancy, Outcome, StageWorker
from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from inference.output import Output
from inference.paged import StageConfig, UnsupportedModel
from inference.prompt import check_request, prompt_tokens
from inference.sampling import Sampler
from inference.stage import Stage
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

MODEL_FILE = "openvino_model.xml"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``sequences`` run in one batch, ``waiting`` more may queue. ``cached`` finished sequences
    stay for prompts that begin like them."""

    sequences: int = 32
    waiting: int = 64
    cached: int = 64


@dataclass(slots=True)
class _Client:
    """A request that the worker has."""

    job: Job
    outcomes: trio.MemorySendChannel[Outcome]
    ended: bool = False


class StageTextEngine:
    """Implements :class:`inference.engines.LanguageEngine`. Made by :meth:`open`."""

    def __init__(
        self,
        model: ModelManifest,
        tokenizer: Tokenizer,
        stages: Sequence[Stage],
        options: EngineOptions,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._device = stages[0].config.device
        self._vocabulary = model.vocabulary_size
        self._context = min(stage.context_length for stage in stages)
        self._sessions = itertools.count(1)
        self._clients: dict[int, _Client] = {}
        self._occupancy = Occupancy()
        self._listeners: list[LoadListener] = []
        self._closed = False
        self._token = trio.lowlevel.current_trio_token()
        block_size = max(stage.block_size for stage in stages)
        limits = Limits(
            blocks=min(stage.blocks * stage.block_size // block_size for stage in stages),
            block_size=block_size,
            context_length=self._context,
            sequences=options.sequences,
            waiting=options.sequences + options.waiting,  # preempted ones go back to the queue
            cached=options.cached,
        )
        self._worker = StageWorker(stages, limits, self._from_worker)
        self._worker.start()

    @classmethod
    async def open(
        cls,
        model: ModelManifest,
        config: StageConfig | None = None,
        options: EngineOptions | None = None,
    ) -> StageTextEngine:
        """Load the model. Raises :class:`GenerationError` (``engine_failed``) with the reason."""

        def load() -> tuple[Tokenizer, Stage]:
            stage = Stage.read(
                model.file(MODEL_FILE), config or StageConfig(), context_length=model.context_length
            )
            stage.warm_up()
            return Tokenizer(model), stage

        try:
            tokenizer, stage = await trio.to_thread.run_sync(load)
        except (UnsupportedModel, RuntimeError) as error:
            raise GenerationError("engine_failed", f"{model.name}: {error}") from error
        return cls(model, tokenizer, [stage], options or EngineOptions())

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

    @property
    def worker(self) -> StageWorker:
        """For profiling."""
        return self._worker

    def load(self) -> Load:
        active = min(self._occupancy.active, len(self._clients))
        return Load(
            active=active,
            waiting=len(self._clients) - active,
            slots=self._options.sequences,
            cache_used=self._occupancy.cache_used,
        )

    def on_load_change(self, listener: LoadListener) -> None:
        self._listeners.append(listener)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._worker.stop)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See :class:`inference.generation.Generator`."""
        output = Output(request, self._tokenizer)
        job = await self._prepare(request, output.ends)
        if (reason := output.nothing_left(job.length - job.prompt)) is not None:
            yield output.end(reason, job, time.monotonic())
            return
        outcomes = self._submit(job)
        try:
            async for outcome in outcomes:
                if isinstance(outcome, Failed):
                    raise outcome.error
                event = output.event(
                    outcome.token_id,
                    outcome.reason,
                    job,
                    time.monotonic(),
                    logprob=outcome.logprob,
                    top=outcome.top,
                    cached=job.cached,
                )
                yield event
                if event.finish is not None:
                    return
        finally:
            self._release(job.session)

    async def _prepare(self, request: GenerateRequest, ends: frozenset[int]) -> Job:
        """Check the request and turn it into tokens. Raises :class:`GenerationError`."""
        check_request(request, self._vocabulary)
        prompt = await trio.to_thread.run_sync(self._tokenize, request)
        length = len(prompt) + request.max_tokens if request.max_tokens else self._context
        sampler = Sampler(request.sampling, prompt)
        for token in request.resume:
            sampler.count(token)
        return Job(
            session=next(self._sessions),
            tokens=[*prompt, *request.resume],
            prompt=len(prompt),
            length=length,
            ends=ends,
            sampler=sampler,
        )

    def _tokenize(self, request: GenerateRequest) -> list[int]:
        return prompt_tokens(
            request, self._tokenizer, vocabulary=self._vocabulary, context=self._context
        )

    def _submit(self, job: Job) -> trio.MemoryReceiveChannel[Outcome]:
        if self._closed:
            raise GenerationError("engine_failed", "the engine is closed")
        if len(self._clients) >= self._options.sequences + self._options.waiting:
            raise GenerationError(
                "overloaded",
                f"{len(self._clients)} requests are running or waiting",
                retry_after=1.0,
            )
        send, receive = trio.open_memory_channel[Outcome](math.inf)
        self._clients[job.session] = _Client(job, send)
        self._worker.submit(job)
        self._tell_load()
        return receive

    def _release(self, session: int) -> None:
        """The consumer is done with a job, or gone."""
        client = self._clients.pop(session)
        if not client.ended:
            self._worker.cancel(session)
        self._tell_load()

    def _from_worker(self, outcomes: Sequence[Outcome], occupancy: Occupancy) -> None:
        """In the worker's thread."""
        try:
            self._token.run_sync_soon(self._dispatch, outcomes, occupancy)
        except trio.RunFinishedError:
            for outcome in outcomes:  # nobody is left to take it
                self._worker.cancel(outcome.session)

    def _dispatch(self, outcomes: Sequence[Outcome], occupancy: Occupancy) -> None:
        for outcome in outcomes:
            client = self._clients.get(outcome.session)
            if client is not None:
                client.ended = isinstance(outcome, Failed) or outcome.reason is not None
                client.outcomes.send_nowait(outcome)
        changed = occupancy.active != self._occupancy.active
        self._occupancy = occupancy
        if changed:
            self._tell_load()

    def _tell_load(self) -> None:
        for listener in self._listeners:
            listener(self.load())
