"""A chain as a :class:`inference.generation.Generator`: text in, token events out.

What is asked and answered is what the whole model's engine would ask and answer: the same checks,
the same tokens, the same text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import trio

from inference.engines import Load
from inference.generation import GenerateRequest, TokenEvent
from inference.output import Output
from inference.prompt import check_request, prompt_tokens
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.relay.chain import ChainHead
from mesh.relay.ring import Hop, Route
from mesh.relay.session_state import HeadSession


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
        self.tokenizer = tokenizer
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

    async def prompt(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises :class:`GenerationError` for what cannot be run."""
        check_request(request, self.model.vocabulary_size)
        return await trio.to_thread.run_sync(self._tokenize, request)

    def _tokenize(self, request: GenerateRequest) -> list[int]:
        return prompt_tokens(
            request,
            self.tokenizer,
            vocabulary=self.model.vocabulary_size,
            context=self.context_length,
        )


@dataclass(slots=True)
class Course:
    """What becomes of one generation. It refers to nothing of the chain, and may outlive it."""

    session: HeadSession | None = None  # once it has a place in the chain

    @property
    def seconds(self) -> tuple[tuple[Hop, float], ...]:
        """Each stage with the compute seconds of the steps that this generation was part of.

        Steps are shared with other sessions, and counted in full.
        """
        if self.session is None:
            return ()
        route = self.session.routes[-1][1]
        return tuple(zip(route, self.session.spent, strict=True))


class ChainRun:
    """One generation on a chain, and who did what for it."""

    def __init__(self, chain: ChainGenerator) -> None:
        self._chain = chain
        self.course = Course()
        self._resumed = 0

    @property
    def seconds(self) -> tuple[tuple[Hop, float], ...]:
        return self.course.seconds

    def shares(self) -> list[StageShare]:
        """Who ran which layers for which output tokens, those that were resumed from left out.

        Each layer of each token occurs once, although a stage that took over has also computed the
        tokens before.
        """
        session = self.course.session
        if session is None:
            return []
        found: list[StageShare] = []
        for hop, begin, end in _spans(session.routes, self._resumed, session.produced):
            found.append(StageShare(hop, session.serials[hop.peer], (begin, end)))
        return found

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See :class:`inference.generation.Generator`."""
        chain = self._chain
        output = Output(request, chain.tokenizer)
        with chain.head.expecting():  # the prompt takes a while, and the chain was chosen already
            prompt = await chain.prompt(request)
            room = chain.context_length - len(prompt)
            length = len(prompt) + (request.max_tokens or room)
            session = HeadSession(
                [*prompt, *request.resume], len(prompt), length, output.ends, request.sampling
            )
            self._resumed = len(request.resume)
            reason = output.nothing_left(length - len(prompt))
            if reason is None:
                await chain.head.start(session)
        if reason is not None:
            yield output.end(reason, session, trio.current_time())
            return
        self.course.session = session
        try:
            while True:
                drawn = await session.get()
                event = output.event(
                    drawn.token,
                    drawn.reason,
                    session,
                    trio.current_time(),
                    logprob=drawn.logprob,
                    top=drawn.top,
                )
                yield event
                if event.finish is not None:
                    return
        finally:
            chain.head.end(session)


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
