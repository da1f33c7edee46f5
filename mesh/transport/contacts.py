"""Where peers were seen, kept on disk, so that a node finds its mesh again after a restart."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.identity import PeerId
from mesh.transport.addresses import MAX_ADDRESS, parse_address
from mesh.transport.errors import DialError

logger = logging.getLogger(__name__)

MAX_ADDRESSES = 8  # of one peer
MAX_PEERS = 1024
_MAX_FILE = 4 << 20  # bytes

AddressText = Annotated[str, Field(min_length=1, max_length=MAX_ADDRESS)]


class _Contact(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    addresses: list[AddressText] = Field(max_length=MAX_ADDRESSES)
    seen: float = Field(ge=0, allow_inf_nan=False)  # seconds since the epoch


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    version: int = Field(1, ge=1, le=1)
    peers: dict[AddressText, _Contact] = Field(max_length=MAX_PEERS)


class Contacts:
    """Addresses by peer, the most useful first. With ``path`` None nothing is kept on disk."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there. A file that cannot be read is as good as none, and is logged."""
        self._path = path
        self._peers: dict[str, _Contact] = {}
        if path is None:
            return
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE + 1)
            if len(data) > _MAX_FILE:
                raise ValueError("the file is too large")
            self._peers = dict(_File.model_validate_json(data).peers)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            reason = "not in this form" if isinstance(error, ValidationError) else error
            logger.warning("remembered peers in %s are ignored: %s", path, reason)

    def addresses(self, peer: PeerId) -> list[str]:
        contact = self._peers.get(peer)
        return list(contact.addresses) if contact is not None else []

    def all(self) -> Mapping[PeerId, list[str]]:
        return {PeerId(peer): list(contact.addresses) for peer, contact in self._peers.items()}

    def add(self, peer: PeerId, addresses: Iterable[str], *, now: float) -> bool:
        """Put ``addresses`` before those known already. True when that changed anything but time.

        What is not a full address of ``peer`` is left out. ``now`` in seconds since the epoch.
        """
        usable = [text for text in addresses if _names(text, peer)]
        old = self._peers.get(peer)
        known = list(old.addresses) if old is not None else []
        merged = list(dict.fromkeys([*usable, *known]))[:MAX_ADDRESSES]
        if not merged:
            return False
        if old is None and len(self._peers) >= MAX_PEERS:
            oldest = min(self._peers, key=lambda each: self._peers[each].seen)
            del self._peers[oldest]
        self._peers[peer] = _Contact(addresses=merged, seen=max(now, 0.0))
        return merged != known

    def remove(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)

    async def save(self) -> None:
        """Write the file whole or not at all. What goes wrong is logged: a node runs without."""
        if self._path is None:
            return
        peers = {peer: contact.model_dump() for peer, contact in self._peers.items()}
        content = json.dumps({"version": 1, "peers": peers}, indent=1)
        await trio.to_thread.run_sync(_write, self._path, content)


def _write(path: Path, content: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        logger.warning("peers cannot be remembered in %s: %s", path, error)


def _names(text: str, peer: PeerId) -> bool:
    try:
        named, _ = parse_address(text)
    except DialError:
        return False
    return named == peer
