"""A chain as a :class:`inference.generation.Generator`: text in, token events out.

What is asked and answered is what the whole model's engine would ask and answer: the same checks,
the same tokens, the same text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import trio

from inference.engines import Load
from inference.errors import GenerationError
from inference.generation import (
    Finish,
    FinishReason,
    GenerateRequest,
    TokenEvent,
    TokenLogprob,
)
from inference.store.manifest import ModelManifest
from inference.text import TextStream
from inference.tokenizer import Tokenizer
from mesh.relay.chain import ChainHead
from mesh.relay.ring import Hop, Route
from mesh.relay.session_state import Drawn, HeadSession

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class StageShare:
    """What one node has done for a generation: layers ``[first, last)`` of the output tokens
    ``[tokens[0], tokens[1])``. ``serial`` is of the certificate that it had then."""

    hop: Hop
    serial: int | None
    tokens: tuple[int, int]


class ChainGenerator:
    """Runs requests on one chain, of which this node is rank 0."""

    def __init__(self, head: ChainHead, model: ModelManifest, tokenizer: Tokenizer) -> None:
        self.head = head
        self.model = model
        self._tokenizer = tokenizer
        self.context_length = min(model.context_length, head.context_length)

    def load(self) -> Load:
        return Load(
            active=self.head.active,
            waiting=self.head.waiting,
            slots=self.head.slots,
            cache_used=self.head.cache_used,
        )

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See :class:`inference.generation.Generator`."""
        return self.run().generate(request)

    def run(self) -> ChainRun:
        """One generation whose course can be asked for afterwards."""
        return ChainRun(self)

    async def prepare(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises :class:`GenerationError` for what cannot be run."""
        prompt = await trio.to_thread.run_sync(self._tokenize, request)
        self._check_ids(prompt, "prompt_tokens")
        self._check_ids(request.resume, "resume")
        self._check_ids(list(request.sampling.logit_bias), "logit_bias")
        if not prompt:
            raise GenerationError("invalid_value", "the prompt has no tokens", param="prompt")
        wanted = request.max_tokens or 1
        if len(prompt) + wanted > self.context_length:
            raise GenerationError(
                "context_length_exceeded",
                f"this model's context is {self.context_length} tokens here; the prompt has "
                f"{len(prompt)} and max_tokens asks for {wanted}",
                param="max_tokens" if request.max_tokens else "messages",
            )
        return prompt

    def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.prompt_tokens is not None:
            return list(request.prompt_tokens)
        if request.messages is not None:
            # The template writes what the model expects around a chat.
            chat = self._tokenizer.apply_chat_template(request.messages)
            return self._tokenizer.encode(chat, special=False)
        return self._tokenizer.encode(request.prompt or "")

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and max(ids) >= self.model.vocabulary_size:
            raise GenerationError(
                "invalid_value",
                f"{param} has token {max(ids)}; the vocabulary has {self.model.vocabulary_size}",
                param=param,
            )

    def text(self, stop: Sequence[str]) -> TextStream:
        return TextStream(self._tokenizer.decode, stop)

    def ends(self, request: GenerateRequest) -> frozenset[int]:
        """Token ids that end the output."""
        return frozenset() if request.ignore_eos else self._tokenizer.eos_token_ids

    def token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        piece = self._tokenizer.piece(token_id).decode("utf-8", "replace")
        return TokenLogprob(
            token_id=token_id, token=piece[:4096], logprob=max(logprob, _LEAST_LOGPROB)
        )


class ChainRun:
    """One generation on a chain, and who did what for it."""

    def __init__(self, chain: ChainGenerator) -> None:
        self._chain = chain
        self._session: HeadSession | None = None
        self._resumed = 0

    @property
    def seconds(self) -> tuple[tuple[Hop, float], ...]:
        """Each stage with the compute seconds of the steps that this generation was part of.

        Steps are shared with other sessions, and counted in full.
        """
        if self._session is None:
            return ()
        route = self._session.routes[-1][1]
        return tuple(zip(route, self._session.spent, strict=True))

    def shares(self) -> list[StageShare]:
        """Who ran which layers for which output tokens, those that were resumed from left out.

        Each layer of each token occurs once, although a stage that took over has also computed the
        tokens before.
        """
        session = self._session
        if session is None:
            return []
        found: list[StageShare] = []
        for hop, begin, end in _spans(session.routes, self._resumed, session.produced):
            found.append(StageShare(hop, session.serials[hop.peer], (begin, end)))
        return found

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See :class:`inference.generation.Generator`."""
        chain = self._chain
        prompt = await chain.prepare(request)
        ends = chain.ends(request)
        text = chain.text(request.stop)
        for token in request.resume:
            if token in ends:
                break
            text.feed(token)  # its text is already with the client
        length = len(prompt) + request.max_tokens if request.max_tokens else chain.context_length
        session = HeadSession(
            [*prompt, *request.resume], len(prompt), length, ends, request.sampling
        )
        self._resumed = len(request.resume)
        done = _done_already(session, text)
        if done is not None:
            rest = "" if text.stopped else text.finish()
            yield TokenEvent(token_id=None, text=rest, finish=_finish(session, done, self._resumed))
            return
        await chain.head.start(session)
        self._session = session
        produced = self._resumed
        try:
            while True:
                drawn = await session.get()
                produced += 1
                event = _event(chain, session, drawn, text, produced)
                yield event
                if event.finish is not None:
                    return
        finally:
            chain.head.end(session)


def _done_already(session: HeadSession, text: TextStream) -> FinishReason | None:
    """Why a resumed generation has nothing left to do, if so."""
    if text.stopped or not session.ends.isdisjoint(session.tokens[session.prompt :]):
        return "stop"
    return "length" if len(session.tokens) >= session.length else None


def _event(
    chain: ChainGenerator, session: HeadSession, drawn: Drawn, text: TextStream, produced: int
) -> TokenEvent:
    reason = drawn.reason
    # A token that ends the output is none of its text.
    fresh = "" if reason == "stop" else text.feed(drawn.token)
    if reason is not None and not text.stopped:
        fresh += text.finish()
    if text.stopped:
        reason = "stop"
    return TokenEvent(
        token_id=drawn.token,
        text=fresh,
        logprob=(
            None if drawn.logprob is None else chain.token_logprob(drawn.token, drawn.logprob)
        ),
        top_logprobs=tuple(chain.token_logprob(*pair) for pair in drawn.top),
        finish=None if reason is None else _finish(session, reason, produced),
    )


def _finish(session: HeadSession, reason: FinishReason, produced: int) -> Finish:
    now = trio.current_time()
    asked = session.asked or now
    started = session.started or now
    first_token = session.first_token or now
    return Finish(
        reason=reason,
        prompt_tokens=session.prompt,
        completion_tokens=produced,
        queue_seconds=max(0.0, started - asked),
        prefill_seconds=max(0.0, first_token - started),
        decode_seconds=max(0.0, now - first_token),
    )


def _spans(routes: Sequence[tuple[int, Route]], begin: int, end: int) -> list[tuple[Hop, int, int]]:
    """Each hop of each route with its tokens; neighbouring spans of one hop are one."""
    spans: list[tuple[Hop, int, int]] = []
    for rank in range(len(routes[0][1])):
        current: Hop | None = None
        start = begin
        for at, route in routes:
            if route[rank] != current:
                if current is not None and at > start:
                    spans.append((current, start, at))
                current, start = route[rank], max(at, begin)
        if current is not None and end > start:
            spans.append((current, start, end))
    return spans
