"""What can happen to the table of peers, and what may then have to be done.

The events are what :func:`mesh.gossip.membership.apply` takes, the effects what it gives back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mesh.gossip.advert import HoldingLoad, LoadReport, SignedAdvert
from mesh.identity import PeerId

Status = Literal["alive", "suspect", "gone"]

# Events


@dataclass(frozen=True, slots=True)
class Mine:
    """This node's own new advert."""

    signed: SignedAdvert


@dataclass(frozen=True, slots=True)
class MyLoad:
    """This node's own load; sequence as published, or of the advert it belongs to."""

    load: tuple[HoldingLoad, ...]


@dataclass(frozen=True, slots=True)
class AdvertHeard:
    """A verified advert. ``age``: seconds since whoever passed it on heard its author.

    ``expires``: when its certificate ends, on this node's monotonic clock.
    """

    signed: SignedAdvert
    age: float = 0.0
    expires: float = math.inf


@dataclass(frozen=True, slots=True)
class LoadHeard:
    peer: PeerId
    report: LoadReport


@dataclass(frozen=True, slots=True)
class LinkUp:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: PeerId
    reason: str = "link lost"


@dataclass(frozen=True, slots=True)
class Unreachable:
    """None of the peer's addresses answered."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Asked over its link whether it is there, the peer did not answer in time."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Doubted:
    """Another node got no answer from the peer, and this one has nothing to say against that."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ProofOfLife:
    """The peer just signed a nonce of ours, or spoke over its own link, in this boot."""

    peer: PeerId
    boot: int


@dataclass(frozen=True, slots=True)
class Refused:
    """These peers' certificates no longer hold."""

    peers: frozenset[PeerId]
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: due at :attr:`Table.deadline`."""


Event = (
    Mine
    | MyLoad
    | AdvertHeard
    | LoadHeard
    | LinkUp
    | LinkDown
    | Unreachable
    | NoAnswer
    | Doubted
    | ProofOfLife
    | Refused
    | Tick
)

# Effects


@dataclass(frozen=True, slots=True)
class Became:
    """A peer changed status. ``was`` is None for one that was unknown or forgotten."""

    peer: PeerId
    was: Status | None
    now: Status
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask this suspect for a proof of life, directly and through others."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Doubt:
    """Others should see for themselves whether this peer, which is silent, is there."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Fetch:
    """This peer has said something that needs an advert of its which we lack."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Reboot:
    """Others know this node by a newer boot: go on with this one, and advertise."""

    boot: int


@dataclass(frozen=True, slots=True)
class Clash:
    """Another node runs with this node's key."""


Effect = Became | Probe | Doubt | Fetch | Reboot | Clash
