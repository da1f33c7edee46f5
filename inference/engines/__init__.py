"""Engines: a model on a device of this machine, ready to generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from inference.generation import Generator
from inference.store.manifest import ModelManifest


@dataclass(frozen=True)
class Load:
    """How busy an engine is.

    ``active`` requests are being computed and ``waiting`` ones queue for a place; the engine takes
    up to ``slots`` requests into one batch. ``cache_used`` is the part of the KV cache that is in
    use, from 0 to 1.
    """

    active: int
    waiting: int
    slots: int
    cache_used: float


LoadListener = Callable[[Load], None]


class LanguageEngine(Generator, Protocol):
    """A whole language model on one device.

    Opening and closing are the implementation's affair; whoever composes a node sees this much.
    """

    @property
    def model(self) -> ModelManifest: ...

    @property
    def device(self) -> str:
        """The OpenVINO device that computes, ``CPU`` or ``GPU.1`` for instance."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output that fit: the model's context, or less if memory is short."""
        ...

    def load(self) -> Load:
        """The load at this moment; cheap, callable from any task of the trio thread."""
        ...

    def on_load_change(self, listener: LoadListener) -> None:
        """Call ``listener`` in the trio thread whenever a request comes, starts or ends."""
        ...

    async def aclose(self) -> None:
        """End all requests, stop the engine's thread and free the device. Idempotent."""
        ...
