"""Exactly one link per pair of peers, whoever dials. Pure.

Each side may dial at any time, so two connections can come up at once, and a connection can be dead
on one side while the other still believes in it. The side that *receives* an offer of lanes
decides, from what the offer says about its sender:

* ``boot``: a number drawn when the peer's process started;
* ``last``: the link to us that the sender had most recently, if any;
* ``moves``: the offer is to carry on the link ``link`` over this connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mesh.identity import PeerId

LinkId = Annotated[bytes, Field(min_length=16, max_length=16)]


class Hello(BaseModel):
    """The body of the first frame on each lane of an offer."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    link: LinkId
    lane: int = Field(ge=0, le=2)
    boot: Annotated[bytes, Field(min_length=8, max_length=8)]
    last: LinkId | None = None
    moves: bool = False


class Welcome(BaseModel):
    """The body of the answer that accepts a lane."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    boot: Annotated[bytes, Field(min_length=8, max_length=8)]


@dataclass(frozen=True)
class Existing:
    """The link that there is already. ``offered_here``: its lanes were opened by this side."""

    link_id: bytes
    peer_boot: bytes
    offered_here: bool


class Verdict(Enum):
    ACCEPT = "accept"  # a new link, in place of the existing one if there is one
    MOVE = "move"  # the existing link goes on over this connection
    WAIT = "wait"  # until our own offer is answered, then ask again
    DUPLICATE = "duplicate"  # the link that there is stays; the sender will see it
    UNKNOWN = "unknown"  # there is no such link to move


def decide(
    offer: Hello, *, me: PeerId, peer: PeerId, existing: Existing | None, offering: bool
) -> Verdict:
    """What to do with an offer. ``offering``: one of our own to this peer is on its way. A dial
    that has not come as far does not count: it may never be answered, and this peer is here."""
    if offer.moves:
        known = existing is not None and existing.link_id == offer.link
        return Verdict.MOVE if known else Verdict.UNKNOWN
    if existing is None:
        # Two offers crossing: that of the smaller PeerId goes first. Both sides see it so.
        return Verdict.WAIT if offering and me < peer else Verdict.ACCEPT
    if existing.peer_boot != offer.boot or not existing.offered_here:
        return Verdict.ACCEPT  # the peer began anew, or dialled again because its link was lost
    # We offered the existing link and the peer accepted it. If it says so it has lost it since;
    # otherwise this offer left before that and crossed ours.
    return Verdict.ACCEPT if offer.last == existing.link_id else Verdict.DUPLICATE
