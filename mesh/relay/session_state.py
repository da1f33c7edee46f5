"""One generation as the head of its chain sees it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from inference.errors import GenerationError
from inference.generation import FinishReason, SamplingParams

if TYPE_CHECKING:
    from mesh.identity import PeerId
    from mesh.relay.ring import Route


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a session; the last one has a ``reason``."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    reason: FinishReason | None


@dataclass(slots=True, eq=False)
class HeadSession:
    """One generation in a chain. ``tokens`` are prompt and output; it ends at ``length`` tokens or
    with a token of ``ends``."""

    tokens: list[int]
    prompt: int
    length: int
    ends: frozenset[int]
    sampling: SamplingParams
    number: int = -1  # its name on the stages; another one after a restart
    capacity: int = 0
    outcomes: deque[Drawn | GenerationError] = field(default_factory=deque)
    changed: trio.Event = field(default_factory=trio.Event)
    ended: bool = False  # it has given up its place in the chain
    growing: bool = False
    starved: bool = False  # waits for KV blocks
    repairs: int = 0
    asked: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    # Who runs it, and from which output token on.
    routes: list[tuple[int, Route]] = field(default_factory=list)
    serials: dict[PeerId, int | None] = field(default_factory=dict)  # of their certificates
    spent: list[float] = field(default_factory=list)  # compute seconds by rank

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt

    def put(self, outcome: Drawn | GenerationError) -> None:
        self.outcomes.append(outcome)
        self.changed.set()

    async def get(self) -> Drawn:
        """The next token. Raises :class:`GenerationError`. Cancelling it loses nothing."""
        while not self.outcomes:
            self.changed = trio.Event()
            await self.changed.wait()
        outcome = self.outcomes.popleft()
        if isinstance(outcome, GenerationError):
            raise outcome
        return outcome
