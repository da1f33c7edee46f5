"""What routing is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mesh.identity import PeerId


@dataclass(frozen=True, slots=True)
class Mark:
    """A leading part of a prompt: its digest, and its length in (estimated) tokens."""

    digest: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What matters of a request for where it runs.

    ``prompt_tokens`` counts everything to be prefilled, tokens to resume with included; an estimate
    is enough. ``digest`` pins the exact weights (a resumed request must go on with the same).
    ``exclude`` are peers that this request has lost or that refused it, ``unfit`` those that are
    not to be in chains, ``rejected`` those that get no work at all; ``slow`` is by how much peers
    take longer than they say (see :mod:`mesh.routing.slowness`). ``marks`` describe the
    prompt's leading parts, and ``cached`` is how many leading tokens of it a peer probably still
    holds in its KV cache.
    """

    model: str
    prompt_tokens: int
    max_tokens: int | None = None
    digest: str | None = None
    exclude: frozenset[PeerId] = frozenset()
    unfit: frozenset[PeerId] = frozenset()
    rejected: frozenset[PeerId] = frozenset()
    slow: Mapping[PeerId, float] = field(default_factory=lambda: MappingProxyType({}))
    marks: tuple[Mark, ...] = ()
    cached: Mapping[PeerId, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of one request on one route."""

    wait: float  # for a slot
    prefill: float
    decode: float
    link: float  # request there and first token back; for a chain also every token's hops

    @property
    def total(self) -> float:
        return self.wait + self.prefill + self.decode + self.link

    def __str__(self) -> str:
        return (
            f"{self.total:.3f} s (wait {self.wait:.3f}, prefill {self.prefill:.3f}, "
            f"decode {self.decode:.3f}, link {self.link:.3f})"
        )


@dataclass(frozen=True, slots=True)
class Hop:
    """A holding on the way: layers ``[first, last)`` at ``peer``. ``busy``: as routing saw it."""

    peer: PeerId
    name: str
    holding: int
    first: int
    last: int
    device: str
    busy: int


@dataclass(frozen=True, slots=True)
class Considered:
    """An alternative that was priced, for explanations."""

    peers: tuple[PeerId, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A holder of the model that was not priced, and why."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class _Route:
    model: str
    digest: str
    hops: tuple[Hop, ...]
    cost: Cost
    reason: str
    considered: tuple[Considered, ...]
    passed_over: tuple[PassedOver, ...]

    @property
    def peer(self) -> PeerId:
        """The node that runs the request, or rank 0 of the chain that does."""
        return self.hops[0].peer


@dataclass(frozen=True, slots=True)
class Local(_Route):
    """This node's own replica."""


@dataclass(frozen=True, slots=True)
class Replica(_Route):
    """A whole replica at another node."""


@dataclass(frozen=True, slots=True)
class Chain(_Route):
    """Stages in order of their layers; rank 0 may be this node."""


Route = Local | Replica | Chain
"""Where a request goes, what that should cost and why it was chosen."""
