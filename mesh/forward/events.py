"""What an answer consists of, for whoever shows it to a client: these two and token events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.generation import TokenEvent


@dataclass(frozen=True)
class Started:
    """A node has taken the request: before its first token, and again when another takes over."""

    node: str  # PeerId


@dataclass(frozen=True)
class Completed:
    """The record of a finished answer: the last item of a successful one, after ``finish``."""

    node: str  # PeerId of who answered
    receipt: bytes  # a bundle of receipts (mesh.receipts.Bundle), already verified by this node
    nodes: Sequence[Mapping[str, Any]]  # who took part, in the order of the chain; JSON-able
    timings: Mapping[str, float]  # seconds
    token_ids: Sequence[int]  # the whole output, what was resumed included


AnswerEvent = Started | TokenEvent | Completed
