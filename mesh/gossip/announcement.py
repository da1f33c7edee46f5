"""What a node says of itself in its adverts, as far as the rest of the node decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from mesh.gossip.advert import Device, Holding, MeasuredSpeed, SeenLink, StoredModel, Wanted


@dataclass(frozen=True, slots=True)
class Announcement:
    """What this node says of itself, besides what gossip adds."""

    state: Literal["up", "draining", "left"] = "up"
    software: str = ""
    devices: tuple[Device, ...] = ()
    holdings: tuple[Holding, ...] = ()
    stored: tuple[StoredModel, ...] = ()
    wants: tuple[Wanted, ...] = ()
    speeds: tuple[MeasuredSpeed, ...] = ()
    links: tuple[SeenLink, ...] = ()


class Changes(TypedDict, total=False):
    """Fields of :class:`Announcement` to change."""

    state: Literal["up", "draining"]
    software: str
    devices: tuple[Device, ...]
    holdings: tuple[Holding, ...]
    stored: tuple[StoredModel, ...]
    wants: tuple[Wanted, ...]
    speeds: tuple[MeasuredSpeed, ...]
    links: tuple[SeenLink, ...]
