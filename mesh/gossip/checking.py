"""Which peer to ask next whether it still answers. Pure.

An idle mesh is quiet, and a machine that loses power says nothing. So each node asks one of its
peers every two seconds, in turn; in a mesh of any size every node is then asked about every two
seconds by somebody. Whoever gets no answer tells the others of its *doubt*. Each of them that has a
link asks for itself, the others wait for the peer to speak up: a doubt alone harms nobody.

Who loses many at once is itself what was cut off, or the part of the mesh that it is in. Then every
node there could tell of everyone on the other side, and all of it would be passed on by all: so a
node tells of some only. Its neighbours have lost others, and tell of those.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from mesh.gossip.membership import Table
from mesh.identity import PeerId

CHECK_EVERY = 2.0  # s
ANSWER_TIME = 2.0  # s; a busy machine may pause for one
DOUBT_KEPT = 5.0  # s in which nobody repeats what somebody has said
MOST_DOUBTS = 16  # that one node raises in that time


class Checking:
    """Whose turn it is, and which doubts are known already."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turn: list[PeerId] = []
        self._next = -math.inf
        self._under_way: set[PeerId] = set()
        self._doubts: dict[PeerId, float] = {}
        self._raised: deque[float] = deque(maxlen=MOST_DOUBTS)

    def deadline(self, table: Table) -> float:
        return self._next if table.links else math.inf

    def due(self, table: Table, now: float, is_quiet: Callable[[PeerId], bool]) -> PeerId | None:
        """The peer to ask now. ``is_quiet``: nothing came over its link for a while."""
        if now < self.deadline(table):
            return None
        self._next = now + CHECK_EVERY
        if not self._turn:
            self._turn = sorted(table.links)
            self._rng.shuffle(self._turn)
        while self._turn:
            peer = self._turn.pop()
            if is_quiet(peer) and self.start(table, peer):
                return peer
        return None

    def start(self, table: Table, peer: PeerId) -> bool:
        """Whether to ask this peer now: it is alive, linked and not being asked."""
        entry = table.entries.get(peer)
        if entry is None or entry.status != "alive" or peer not in table.links:
            return False
        if peer in self._under_way:
            return False
        self._under_way.add(peer)
        return True

    def finished(self, peer: PeerId) -> None:
        self._under_way.discard(peer)

    def hear_doubt(self, table: Table, author: PeerId, peer: PeerId, now: float) -> bool:
        """Whether to do something about what another node says, and to pass it on.

        A message is signed by its author, which says nothing of who that is: a peer may have made
        any number of keys. Who counts is known by an advert, and so by a certificate that holds.
        """
        known = table.entries.get(author)
        if known is None or known.status == "gone" or known.expires <= now:
            return False
        return peer in table.entries and self.doubt(peer, now)

    def doubt(self, peer: PeerId, now: float) -> bool:
        """Whether a doubt, our own or another's, is news."""
        # The oldest come first. There are many when half of a large mesh is out of reach.
        while self._doubts and now - next(iter(self._doubts.values())) >= DOUBT_KEPT:
            del self._doubts[next(iter(self._doubts))]
        if peer in self._doubts:
            return False
        self._doubts[peer] = now
        return True

    def raise_doubt(self, peer: PeerId, now: float) -> bool:
        """Whether to tell the others that this node doubts ``peer``."""
        if len(self._raised) == MOST_DOUBTS and now - self._raised[0] < DOUBT_KEPT:
            return False
        if not self.doubt(peer, now):
            return False
        self._raised.append(now)
        return True
