"""Which peers this node should open links to, and when to try again. Pure.

Up to :data:`FULL_MESH` nodes every pair keeps a link. Beyond, a node keeps :data:`FEW_LINKS` to
peers that a hash picks, different ones for every node, which leaves the mesh connected; other links
open when work needs them. Of a pair, the lower PeerId dials at once and the other waits a moment,
so that the two do not dial each other at once, yet a peer that nobody can reach can reach us.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from mesh.gossip.membership import Table
from mesh.identity import PeerId

FULL_MESH = 64
FEW_LINKS = 16
YIELD = 1.5  # s that the higher PeerId leaves to the lower
FIRST_RETRY = 1.0  # s, doubled with each failure
LAST_RETRY = 60.0
AT_ONCE = 8  # dials under way


class Dialing:
    """State per peer that is wanted and not linked: when to dial it, and how often it failed."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._due: dict[PeerId, float] = {}
        self._failures: dict[PeerId, int] = {}
        self._under_way: set[PeerId] = set()

    def update(self, table: Table, now: float) -> None:
        """Note who is wanted now; call after every change of the table."""
        wanted = self._wanted(table)
        for peer in [p for p in self._due if p not in wanted]:
            del self._due[peer]
        for peer in [p for p in self._failures if p not in wanted or p in table.links]:
            del self._failures[peer]
        for peer in wanted - table.links - self._due.keys() - self._under_way:
            self._due[peer] = now if self._me < peer else now + YIELD
        for peer in table.links & self._due.keys():
            del self._due[peer]

    def _wanted(self, table: Table) -> set[PeerId]:
        known = [
            peer
            for peer, entry in table.entries.items()
            if peer != self._me and entry.status != "gone" and entry.signed.advert.addresses
        ]
        if len(known) < FULL_MESH:
            return set(known)
        return set(sorted(known, key=self._rank)[:FEW_LINKS])

    def _rank(self, peer: PeerId) -> bytes:
        return hashlib.sha256(f"{self._me} {peer}".encode()).digest()

    @property
    def deadline(self) -> float:
        if len(self._under_way) >= AT_ONCE:
            return math.inf
        return min(self._due.values(), default=math.inf)

    def due(self, now: float) -> tuple[PeerId, ...]:
        """Peers to dial now; each is under way until :meth:`finished` is told how it went."""
        ready = sorted((at, peer) for peer, at in self._due.items() if at <= now)
        chosen = [peer for _, peer in ready[: AT_ONCE - len(self._under_way)]]
        self._start(chosen)
        return tuple(chosen)

    def _start(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            del self._due[peer]
            self._under_way.add(peer)

    def finished(self, peer: PeerId, linked: bool, now: float, jitter: float) -> None:
        """``jitter`` in [0, 1) spreads retries of many nodes."""
        self._under_way.discard(peer)
        if linked:
            self._failures.pop(peer, None)
            return
        failures = self._failures.get(peer, 0) + 1
        self._failures[peer] = failures
        wait = min(FIRST_RETRY * 2.0 ** min(failures - 1, 16), LAST_RETRY)
        self._due[peer] = now + wait * (0.75 + 0.5 * jitter)
