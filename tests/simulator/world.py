"""Virtual time, the queue of what happens in it, and the network between the nodes."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mesh.gossip.events import AdvertHeard, LinkDown
from mesh.identity import PeerId
from mesh.transport.backoff import Backoff
from simulator.messages import Mint, Opened

if TYPE_CHECKING:
    from simulator.node import Node
    from simulator.placer import Planned

DEGREE = 8  # of the gossip mesh
OVERHEAD = 150  # bytes of a gossip message around its data: author, key, signature, announcements
DELAY = 0.15  # s until all have a gossip message
ARRIVALS = 0.1  # s; messages arrive at multiples of it
NOTICED = (0.5, 3.0)  # s until a lost link is noticed
DIAL = 0.1  # s


class World:
    """``loss``: the share of gossip messages that get lost between two nodes."""

    def __init__(self, seed: int, loss: float) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.mint = Mint()
        self.nodes: dict[PeerId, Node] = {}
        self.plans: dict[int, Planned] = {}
        self.sent = {"gossip": 0, "anti-entropy": 0}
        self.key = 0  # of the set of nodes that run, see ``Node.known``
        self._sides: dict[PeerId, int] = {}  # while partitioned
        self._cut = False
        self._audiences: dict[int | None, tuple[Node, ...]] = {}  # who runs, by side
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    # -- time -------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.at(self.now + seconds, what)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def run_until(self, holds: Callable[[], bool], limit: float, step: float = 0.5) -> float:
        """Seconds until it holds; raises when it does not within ``limit``."""
        start = self.now
        while not holds():
            if self.now - start > limit:
                raise AssertionError(f"not {holds.__name__} after {limit:g} s")
            self.run(step)
        return self.now - start

    # -- nodes ------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        self.nodes[node.peer] = node
        self.key ^= hash(node.peer)
        self._audiences.clear()

    def kill(self, node: Node) -> None:
        """The process ends. Peers with a link notice after some seconds."""
        del self.nodes[node.peer]
        self.key ^= hash(node.peer)
        self._audiences.clear()
        for peer in sorted(node.links):
            if peer in self.nodes:
                self.after(self.rng.uniform(*NOTICED), lambda p=peer: self._lost(p, node.peer))

    def _lost(self, at: PeerId, peer: PeerId) -> None:
        """``at`` sees that its link to ``peer`` is down, unless there is a new one."""
        node, other = self.nodes.get(at), self.nodes.get(peer)
        if node is not None and (other is None or at not in other.links):
            node.take(LinkDown(peer))

    # -- network ----------------------------------------------------------------------------------

    def connected(self, one: PeerId, other: PeerId) -> bool:
        return not self._cut or self._sides.get(one) == self._sides.get(other)

    def link(self, one: Node, other: Node) -> None:
        """A link comes up. Gossip crosses a partition that has ended from the first one on."""
        if self._sides.get(one.peer) != self._sides.get(other.peer):
            self._sides = {}
            self._audiences.clear()
        one.linked(other)
        other.linked(one)
        caller, callee = sorted((one, other), key=lambda node: node.peer)
        caller.sync_with(callee)

    def split(self, sides: dict[PeerId, int]) -> None:
        self._sides, self._cut = sides, True
        self._audiences.clear()
        for node in list(self.nodes.values()):
            for peer in sorted(node.links):
                if not self.connected(node.peer, peer):
                    noticed = self.rng.uniform(*NOTICED)
                    self.after(noticed, lambda n=node, p=peer: n.runs and n.take(LinkDown(p)))
                    if node.peer < peer:
                        backoff = Backoff(self.rng)
                        self._redial(node, self.nodes[peer], backoff, NOTICED[1] + backoff.failed())

    def _redial(self, one: Node, other: Node, backoff: Backoff, wait: float) -> None:
        def attempt() -> None:
            if not (one.runs and other.runs) or other.peer in one.links:
                return
            if self.connected(one.peer, other.peer):
                self.link(one, other)
            else:
                self._redial(one, other, backoff, backoff.failed())

        self.after(wait, attempt)

    def heal(self) -> None:
        """The network is whole again; links come back as they are dialled again."""
        self._cut = False

    def spread(self, author: Node, opened: Opened) -> None:
        event = AdvertHeard(opened.signed)
        self._spread(author, len(opened.signed.envelope), lambda node: node.hear(event, opened))

    def spread_doubt(self, author: Node, peer: PeerId) -> None:
        self._spread(author, len(peer), lambda node: node.hear_doubt(author.peer, peer))

    def _spread(self, author: Node, size: int, hear: Callable[[Node], object]) -> None:
        """Everyone gets it within some hops, but for those whom loss keeps it from."""
        audience = self._audience(self._sides.get(author.peer))
        ways = min(DEGREE, len(audience) - 1)
        self.sent["gossip"] += (size + OVERHEAD) * max(1, ways - 1) * len(audience)
        # A message has several ways to a node; on each of its two last hops it may be lost.
        missed = {author} | self._some(audience, (1.0 - (1.0 - self.loss) ** 2) ** max(1, ways))

        def arrive() -> None:
            for node in audience:
                if node not in missed and node.runs:
                    hear(node)

        self.at(math.ceil((self.now + DELAY) / ARRIVALS) * ARRIVALS, arrive)

    def _audience(self, side: int | None) -> tuple[Node, ...]:
        """Whoever runs on one side."""
        if side not in self._audiences:
            on_side = [n for n in self.nodes.values() if self._sides.get(n.peer) == side]
            self._audiences[side] = tuple(on_side)
        return self._audiences[side]

    def _some(self, nodes: Sequence[Node], share: float) -> set[Node]:
        """Each of ``nodes`` with a probability of ``share``: mostly none, and found at once."""
        found: set[Node] = set()
        if share > 0.0:
            at = -1
            while True:
                at += 1 + int(math.log(1.0 - self.rng.random()) / math.log1p(-share))
                if at >= len(nodes):
                    break
                found.add(nodes[at])
        return found
