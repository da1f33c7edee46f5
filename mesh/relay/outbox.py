"""What waits for a peer whose link does not take it at once, within a bound."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import trio

from mesh.relay.kept import DEFAULT_BYTES
from mesh.relay.links import Buffer

# Bytes that may wait, of bulky things (more than a stage keeps to send again) and of others.
MOST_BULKY = 2 * DEFAULT_BYTES
MOST = 16 << 20
_ITEM = 1024  # bytes: more than any session's or token's part of a message takes


@dataclass(frozen=True, slots=True)
class Parcel:
    kind: str
    body: dict[str, Any]
    payload: Buffer

    @property
    def size(self) -> int:
        """About what it takes in memory."""
        items = (*self.body.get("sessions", ()), *self.body.get("sampled", ()))
        return _ITEM * (1 + len(items)) + len(self.payload)


class Outbox:
    """Parcels for one peer, in order. ``scope`` is cancelled when there are too many: who leaves so
    much unread is taken for lost, with all of it."""

    def __init__(self, bulky: bool) -> None:
        self.scope = trio.CancelScope()
        self._most = MOST_BULKY if bulky else MOST
        self._size = 0
        self._parcels: deque[Parcel] = deque()

    @property
    def first(self) -> Parcel | None:
        return self._parcels[0] if self._parcels else None

    def put(self, parcel: Parcel) -> None:
        if self._size + parcel.size > self._most:
            self.scope.cancel()
        else:
            self._parcels.append(parcel)
            self._size += parcel.size

    def sent(self) -> None:
        """The first of them is on its way."""
        self._size -= self._parcels.popleft().size
