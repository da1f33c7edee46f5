"""What callers and handlers hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ca.certificate import Certificate
from mesh.identity import PeerId
from mesh.transport.frames import Buffer

if TYPE_CHECKING:
    from mesh.transport.link import Link


@dataclass(frozen=True, slots=True)
class Message:
    """A body and a payload.

    ``body`` is anything CBOR carries plainly (None, bool, int, float, str, bytes, list, dict with
    text keys), at most 16 deep and 8 MiB. ``payload`` travels raw beside it, at most 32 MiB; as
    received it is a view of bytes that nothing else changes.
    """

    body: Any = None
    payload: Buffer = b""


@dataclass(frozen=True, slots=True)
class Request:
    """A message that wants an answer, as its handler sees it."""

    message: Message
    link: Link

    @property
    def peer(self) -> PeerId:
        """Who asks; proven by the connection."""
        return self.link.peer

    @property
    def certificate(self) -> Certificate:
        """What admits the peer now, with its roles."""
        return self.link.certificate
