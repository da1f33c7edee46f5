"""What the HTTP layer needs from the node, and nothing more.

The composition root passes one object that has these methods. The HTTP layer never learns which
node, engine or chain did the work, except from what arrives here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference.generation import GenerateRequest
from mesh.forward.events import AnswerEvent


@dataclass(frozen=True)
class ModelInfo:
    """A model that somebody in the mesh serves now."""

    name: str
    created: int  # seconds since 1970
    nodes: Sequence[str]  # PeerIds of those that serve it, as replica or as a stage of a chain
    digest: str | None = None
    context_length: int | None = None  # tokens


@dataclass(frozen=True)
class Health:
    """Whether this node can take requests. ``waiting_for`` says in words what is missing."""

    peer: str
    ready: bool
    waiting_for: Sequence[str] = field(default=())


class Kept(Protocol):
    """The rest of a response whose entry node was lost; ``request`` is what began it."""

    @property
    def request(self) -> GenerateRequest: ...

    def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """As of :meth:`Node.answer`."""
        ...


class Node(Protocol):
    """The node behind the HTTP layer."""

    def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        """``Started``, one or more ``TokenEvent`` of which the last has ``finish``, ``Completed``.

        Raises :class:`inference.errors.GenerationError` at any point. Closing the generator or
        cancelling its consumer stops the work, wherever it runs. ``request_id`` is unique per
        generation (several choices of one HTTP request have different ones). With ``keep``, a key
        of :func:`mesh.forward.kept.key_of`, the rest can be had at another node when this one is
        lost.
        """
        ...

    async def kept(self, response: str, key: bytes, after: int) -> Kept:
        """What comes after ``after`` tokens of a response that began with ``keep=key``.

        Raises :class:`mesh.forward.following.NotKept` and GenerationError.
        """
        ...

    def models(self) -> Sequence[ModelInfo]:
        """Every model of the mesh."""
        ...

    def view(self) -> Mapping[str, Any]:
        """This node's picture of the mesh, JSON-able."""
        ...

    def capabilities(self) -> Mapping[str, Any]:
        """What this node itself is and holds (devices, holdings, software), JSON-able."""
        ...

    def plan(self) -> Mapping[str, Any]:
        """Where the layers of wanted models go and what that should give, JSON-able."""
        ...

    def health(self) -> Health: ...
