"""A generator that carries on elsewhere: the I/O around :class:`mesh.forward.recovery.Recovery`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, Generator, TokenEvent
from mesh.forward.liveness import FIRST_TOKEN_SECONDS, NEXT_TOKEN_SECONDS
from mesh.forward.recovery import MAX_ATTEMPTS, Continuation, Recovery, SignedCut, Worker

_log = logging.getLogger(__name__)


class Attempt(Generator, Protocol):
    """A generator that is ready to do one continuation."""

    @property
    def node(self) -> str:
        """PeerId of the replica or of rank 0."""
        ...

    def worker(self) -> Worker:
        """Who works on it, as far as this node knows."""
        ...

    def cut(self, recovery: Recovery) -> SignedCut | None:
        """After it has ended early: a receipt for its tokens, checked, if there is one."""
        ...


# Chooses who does a continuation, and gets it ready. Raises GenerationError when there is nobody.
Begin = Callable[[Continuation], Awaitable[Attempt]]


@dataclass(frozen=True)
class Patience:
    """Seconds without a token after which a node that says it is alive counts as lost."""

    first_token: float = FIRST_TOKEN_SECONDS
    next_token: float = NEXT_TOKEN_SECONDS


PATIENCE = Patience()


class ResumingGenerator:
    """One response, whatever becomes of the nodes that make it. Use it for one request.

    :attr:`attempt` is the one that the latest event came from; after the last event
    :attr:`recovery` says how it all went.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        patience: Patience = PATIENCE,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._begin = begin
        self._patience = patience
        self._max_attempts = max_attempts
        self.recovery: Recovery | None = None
        self.attempt: Attempt | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        recovery = self.recovery = Recovery(request, self._max_attempts)
        while True:
            continuation = recovery.begin()
            epoch = continuation.epoch
            try:
                attempt = self.attempt = await self._begin(continuation)
            except GenerationError as error:
                raise recovery.no_route(epoch, error) from error
            position = len(continuation.request.resume)
            budget = self._patience.first_token
            try:
                async with aclosing(attempt.generate(continuation.request)) as events:
                    while True:
                        event = await _next(events, budget, attempt.node)
                        fresh = recovery.event(epoch, position, event)
                        position += event.token_id is not None
                        budget = self._patience.next_token
                        if fresh is not None:
                            yield fresh
                        if recovery.state == "done":
                            return
            except GenerationError as error:
                failure = recovery.lost(epoch, attempt.worker(), error, attempt.cut(recovery))
                _log.info(
                    "%s gave up a response after %d tokens: %s",
                    attempt.node,
                    len(recovery.token_ids),
                    error,
                )
                if failure is not None:
                    raise failure from error


async def _next(events: AsyncGenerator[TokenEvent, None], budget: float, node: str) -> TokenEvent:
    with trio.move_on_after(budget):
        try:
            return await anext(events)
        except StopAsyncIteration:
            raise GenerationError("engine_failed", "the output ended without an end") from None
    raise GenerationError("node_lost", f"{node} has made no token for {budget:.0f} s")
