"""What happens to a mesh, what must hold of it afterwards, and what is measured.

Each of these raises AssertionError when something does not hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mesh.routing import InFlight, RequestFacts, choose
from mesh.routing.placement.claims import complete_chains
from mesh.routing.placement.from_view import claims_in
from simulator.node import Node
from simulator.placer import CHAINS, LAYERS, MODEL, WANTED_BY
from simulator.world import World

LIMIT = 240.0  # s within which a mesh comes to rest


class Mesh:
    """A world and what holds of the whole of it."""

    def __init__(self, seed: int, loss: float) -> None:
        self.world = World(seed, loss)

    @property
    def nodes(self) -> list[Node]:
        return list(self.world.nodes.values())

    def agrees(self) -> bool:
        """Every node knows exactly the nodes that run."""
        return all(node.known_key == self.world.key for node in self.nodes)

    def arranged(self) -> bool:
        """All nodes have the same view and layout, it is what they hold, and it is loaded."""
        if not self.agrees():
            return False
        nodes = self.nodes
        first = nodes[0]
        for node in nodes:
            placer = node.placer
            # Those who have just heard something have not planned with it yet.
            if placer.due is not None or any(not h.ready or h.draining for h, _ in placer.held):
                return False
            if node.view_key != first.view_key or placer.plan != first.placer.plan:
                return False
        return self.held() == {
            (stage.peer, stage.first, stage.last)
            for model in first.placer.plan.models
            for stage in model.stages
        }

    def held(self) -> set[tuple[str, int, int]]:
        return {
            (node.peer, held.first, held.last)
            for node in self.nodes
            for held, _ in node.placer.held
        }

    def settle(self) -> float:
        """Seconds until all is in place; then no claim may be split or too many."""
        seconds = self.world.run_until(self.arranged, LIMIT)
        names = set(self.world.nodes)
        claims = None
        for node in self.nodes:
            # What was compared by keys on the way is compared in full here.
            assert set(node.known) == names, f"{node.name} does not know who runs"
            found = {
                (peer, h.first, h.last, h.claim, h.ready)
                for peer, entry in node.table.entries.items()
                if entry.status != "gone"
                for h in entry.signed.advert.holdings
            }
            assert claims is None or claims == found, "two nodes see different claims"
            claims = found
        view = self.nodes[0].view
        chains = complete_chains([c for c in claims_in(view) if c.ready], LAYERS)
        assert len(chains) == CHAINS, f"{len(chains)} chains where {CHAINS} are wanted"
        used = {(c.peer, c.first, c.last) for chain in chains for c in chain}
        assert used == self.held(), "layers are held that no chain needs: a split claim"
        return seconds

    # -- what happens -----------------------------------------------------------------------------

    def churn(self, turns: int, first: int) -> float:
        """Some nodes that hold layers are killed; new ones join, and killed ones start again.

        ``first``: the number of the first new one. Seconds after the last of it until all is in
        place again.
        """
        world = self.world
        for turn in range(turns):
            holders = [n for n in self.nodes if n.placer.held and n.number != WANTED_BY]
            victim = world.rng.choice(holders or self.nodes[1:])
            world.kill(victim)
            Node(world, first + turn)
            if turn % 2:
                again = (victim.number, victim.boot + 1)
                world.after(2.0, lambda again=again: Node(world, *again))
            world.run(1.0)
        world.run(2.0)
        return self.settle()

    def partition(self, seconds: float = 60.0) -> tuple[int, float]:
        """Cut the mesh in two halves for a while; chains that both had then, and the time from the
        end of it until there is one layout again."""
        world = self.world
        sides = {peer: i % 2 for i, peer in enumerate(sorted(world.nodes))}
        world.split(sides)
        world.run(seconds)
        chains = 0
        for side in (0, 1):
            node = next(node for node in self.nodes if sides[node.peer] == side)
            chains += len(complete_chains([c for c in claims_in(node.view) if c.ready], LAYERS))
        world.heal()
        return chains, self.settle()

    # -- what is measured -------------------------------------------------------------------------

    def rates(self, seconds: float) -> dict[str, float]:
        """Bytes that a node sends per second when nothing happens, by kind."""
        self.world.sent = dict.fromkeys(self.world.sent, 0)
        self.world.run(seconds)
        return {
            kind: sent / len(self.world.nodes) / seconds for kind, sent in self.world.sent.items()
        }

    def routes(self, entries: int = 20, each: int = 10) -> int:
        """Requests from some entry nodes all find a way; how many first nodes share them."""
        rng = random.Random(1)
        first: set[str] = set()
        for node in rng.sample(self.nodes, min(entries, len(self.nodes))):
            in_flight = InFlight()
            view = node.view
            for _ in range(each):
                route = choose(view, RequestFacts(MODEL, 100, 100), rng=rng, in_flight=in_flight)
                in_flight.started(route, self.world.now)
                lost = [hop.name for hop in route.hops if hop.peer not in self.world.nodes]
                assert not lost, f"a request was sent to {lost}, which do not run"
                first.add(route.peer)
        return len(first)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds until all know each other, and until what is wanted is served as planned."""

    mesh: Mesh
    known: float
    arranged: float


def cold_start(count: int, seed: int = 1, loss: float = 0.1) -> ColdStart:
    """All nodes start within two seconds."""
    mesh = Mesh(seed, loss)
    world = mesh.world
    for number in range(count):
        world.after(2.0 * number / count, lambda number=number: Node(world, number))
    world.run(2.0)
    known = world.run_until(mesh.agrees, LIMIT)
    return ColdStart(mesh, known, known + mesh.settle())
