"""Giving back the KV of a chain's sessions, and telling those who wait for it."""

from __future__ import annotations

from functools import partial

import trio

from mesh.relay.links import at_once
from mesh.relay.messages import Close
from mesh.relay.repair import close_at
from mesh.relay.ring import Ring
from mesh.relay.service import Relay


class Room:
    """Each event is set once and replaced: take it before looking, then wait for it.

    ``ended``: a session has ended and its KV is free, or one has come in. ``freed``: stages have
    freed KV of this chain for whatever reason. ``ending`` counts sessions on the way to ``ended``.
    """

    def __init__(self, relay: Relay, ring: Ring) -> None:
        self._relay = relay
        self._ring = ring
        self.ended = trio.Event()
        self.freed = trio.Event()
        self.ending = 0

    def give_back(self, number: int, *, tell: bool) -> trio.Event:
        """Free a session on all stages; with ``tell``, who waits for room may try again then.
        The event comes when that is done."""
        self.ending += tell
        done = trio.Event()
        self._relay.spawn(self._close_everywhere, number, tell, done)
        return done

    def give_back_all(self) -> None:
        """The chain is of no use any more: free whatever stages hold of it, what a mending that did
        not come to its end has opened included."""
        self._relay.spawn(self._close, Close(chain=self._ring.id, epoch=self._ring.epoch))

    def tell_ended(self) -> None:
        ended, self.ended = self.ended, trio.Event()
        ended.set()

    async def _close_everywhere(self, number: int, tell: bool, done: trio.Event) -> None:
        await self._close(Close(chain=self._ring.id, epoch=self._ring.epoch, sessions=(number,)))
        freed, self.freed = self.freed, trio.Event()
        freed.set()
        done.set()
        if tell:
            self.ending -= 1
            self.tell_ended()

    async def _close(self, message: Close) -> None:
        await at_once(partial(close_at, self._relay, hop.peer, message) for hop in self._ring.route)
