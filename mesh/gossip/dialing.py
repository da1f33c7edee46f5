"""Which peers this node should open links to, and when. Pure.

Up to :data:`FULL_MESH` nodes every pair keeps a link. Beyond, a node keeps :data:`FEW_LINKS` to
peers that a hash picks, different ones for every node, which leaves the mesh connected; other links
open when work needs them. Of a pair, the lower PeerId dials at once and the other waits a moment,
so that the two do not dial each other at once, yet a peer that nobody can reach can reach us.

This is about the first attempt after a peer's advert was heard; to try again is for the transport.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from functools import lru_cache

from mesh.gossip.membership import MAX_NODES, Table
from mesh.identity import PeerId

FULL_MESH = 64
FEW_LINKS = 16
YIELD = 5.0  # s that the higher PeerId leaves to the lower
AT_ONCE = 8  # dials under way


class Dialing:
    """When to dial whom. A peer is dialled once for each of its boots."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._due: dict[PeerId, float] = {}
        self._dialled: dict[PeerId, int] = {}
        self._under_way = 0

    def update(self, table: Table, now: float) -> None:
        """Note who is wanted now; call after every change of the table."""
        wanted = self._wanted(table)
        self._dialled = {peer: boot for peer, boot in self._dialled.items() if peer in wanted}
        self._due = {peer: at for peer, at in self._due.items() if peer in wanted}
        for peer, boot in wanted.items():
            if peer in table.links:
                self._dialled[peer] = boot
                self._due.pop(peer, None)
            elif self._dialled.get(peer) != boot and peer not in self._due:
                self._due[peer] = now if self._me < peer else now + YIELD

    def _wanted(self, table: Table) -> dict[PeerId, int]:
        known = {
            peer: entry.boot
            for peer, entry in table.entries.items()
            if peer != self._me and entry.status != "gone" and entry.signed.advert.addresses
        }
        if len(known) < FULL_MESH:
            return known
        few = heapq.nsmallest(FEW_LINKS, known, key=lambda peer: _rank(self._me, peer))
        return {peer: known[peer] for peer in few}

    @property
    def deadline(self) -> float:
        if self._under_way >= AT_ONCE:
            return math.inf
        return min(self._due.values(), default=math.inf)

    def due(self, table: Table, now: float) -> tuple[PeerId, ...]:
        """Peers to dial now; tell :meth:`finished` after each, however it went."""
        ready = sorted((at, peer) for peer, at in self._due.items() if at <= now)
        chosen = [peer for _, peer in ready[: AT_ONCE - self._under_way]]
        for peer in chosen:
            del self._due[peer]
            self._dialled[peer] = table.entries[peer].boot
        self._under_way += len(chosen)
        return tuple(chosen)

    def finished(self) -> None:
        self._under_way -= 1


@lru_cache(maxsize=2 * MAX_NODES)
def _rank(me: PeerId, peer: PeerId) -> bytes:
    return hashlib.sha256(f"{me} {peer}".encode()).digest()
