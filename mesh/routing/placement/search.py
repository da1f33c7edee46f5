"""Which machines make which chains. Pure.

What is looked for, for one model: as many chains as are wanted, without a machine in two of them;
of those, the ones with the fewest stages in all; of those, the fastest. A chain has no machine that
it could do without. A chain that is slower than a machine which can hold the whole model is none.

Up to :data:`EXACT` machines all possibilities are searched. Above, chains are taken one after the
other: each is the best within some neighbourhoods of machines that are close to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from mesh.identity import PeerId
from mesh.routing.placement.chains import ChainFinder
from mesh.routing.placement.facts import Machine, Network, Want
from mesh.routing.placement.predict import ChainPlan

EXACT = 8
AUTO_CHAINS = 16  # the most that a want without a number of replicas gets
_SEEDS = 6
_POOL = 8
_CONSIDERED = 96  # machines of a large mesh that are looked at
_IMPROVED = 48  # machines; up to so many the chains that were found are worked over
_WINDOWS = 60  # windows that are laid out again, at most
_WINDOW = 9  # machines in one


@dataclass(frozen=True, slots=True)
class Found:
    """``chains`` are the best first. ``faster_alone``: chains that would have been possible were
    left out because this machine alone is faster."""

    chains: tuple[ChainPlan, ...]
    faster_alone: ChainPlan | None = None

    @property
    def order(self) -> tuple[int, int, float]:
        """Less is better."""
        return (
            -len(self.chains),
            sum(len(chain.stages) for chain in self.chains),
            sum(chain.prediction.cost for chain in self.chains),
        )


def find_chains(
    want: Want,
    machines: Sequence[Machine],
    network: Network,
    *,
    exact: int = EXACT,
    alone: ChainPlan | None = None,
) -> Found:
    """The chains for ``want`` over ``machines``; the same arguments in any order give the same.

    ``alone``: the fastest that serves the model whole already, if any.
    """
    finder = ChainFinder(want, _considered(want, machines, network), network)
    wholes = [plan for machine in finder.machines if (plan := finder.whole(machine)) is not None]
    if alone is not None:
        wholes.append(alone)
    fastest = min(wholes, key=lambda plan: plan.order, default=None)
    limit = AUTO_CHAINS if want.replicas is None else want.replicas
    nodes = len(machines) if want.max_nodes is None else want.max_nodes
    if len(finder.machines) <= exact:
        return _exact(finder, limit, nodes, fastest)
    return _heuristic(finder, limit, nodes, fastest)


def _considered(want: Want, machines: Sequence[Machine], network: Network) -> Sequence[Machine]:
    """Of very many machines those that could matter: the fastest for the whole model, the fastest
    for a part of it, and the roomiest."""
    if len(machines) <= _CONSIDERED:
        return machines
    finder = ChainFinder(want, machines, network)
    share = _CONSIDERED // 3

    def cost(machine: Machine) -> tuple[float, PeerId]:
        return finder.seat(machine, first=True, last=True).cost, machine.peer

    layers = want.model.layers
    wholes = [m for m in machines if finder.seat(m, first=True, last=True).capacity >= layers]
    useful = [m for m in machines if finder.room(m) > 0]
    chosen = [
        *sorted(wholes, key=cost)[:share],
        *sorted(useful, key=cost)[:share],
        *sorted(useful, key=lambda m: (-finder.room(m), cost(m)))[:share],
    ]
    return list({machine.peer: machine for machine in chosen}.values())


def _slower(chain: ChainPlan, whole: ChainPlan | None) -> bool:
    return (
        whole is not None
        and len(chain.stages) > 1
        and (chain.prediction.step > whole.prediction.step or chain.order[1] > whole.order[1])
    )


# -- exact ----------------------------------------------------------------------------------------


def _exact(finder: ChainFinder, limit: int, nodes: int, fastest: ChainPlan | None) -> Found:
    candidates: list[tuple[int, ChainPlan]] = []
    left_out = False
    for mask, chain in _minimal_chains(finder, min(nodes, len(finder.machines))):
        if _slower(chain, fastest):
            left_out = True
        else:
            candidates.append((mask, chain))
    chains = _most_disjoint(candidates, len(finder.machines), limit, nodes)
    refused = fastest if left_out and len(chains) < limit else None
    return Found(tuple(sorted(chains, key=lambda c: c.order)), refused)


def _minimal_chains(finder: ChainFinder, most: int) -> list[tuple[int, ChainPlan]]:
    """The best chain over each set of machines of which no part would do, as a bit mask."""
    found: list[tuple[int, ChainPlan]] = []
    rooms = [finder.room(machine) for machine in finder.machines]
    for size in range(1, most + 1):
        fresh = []
        for indices in combinations(range(len(finder.machines)), size):
            mask = sum(1 << i for i in indices)
            if any(mask & smaller == smaller for smaller, _ in found):
                continue
            if sum(rooms[i] for i in indices) < finder.want.model.layers:
                continue
            chain = finder.best([finder.machines[i] for i in indices])
            if chain is not None:
                fresh.append((mask, chain))
        found += fresh
    return found


_Packing = tuple[int, float, tuple[int, ...]]  # stages, cost, indices of candidates


def _most_disjoint(
    candidates: Sequence[tuple[int, ChainPlan]], machines: int, limit: int, nodes: int
) -> list[ChainPlan]:
    """As many chains as possible without a machine in two; of those the fewest stages, then the
    least cost. Dynamic programming over the sets of machines that are still free."""
    by_lowest: dict[int, list[int]] = {}
    for index, (mask, _) in enumerate(candidates):
        by_lowest.setdefault(mask & -mask, []).append(index)
    memory: dict[int, dict[int, _Packing]] = {}

    def packings(free: int) -> dict[int, _Packing]:
        """By number of chains."""
        if not free:
            return {0: (0, 0.0, ())}
        if free in memory:
            return memory[free]
        lowest = free & -free
        best = dict(packings(free & ~lowest))
        for index in by_lowest.get(lowest, ()):
            mask, chain = candidates[index]
            if mask & free != mask:
                continue
            for count, (stages, cost, chosen) in packings(free & ~mask).items():
                stages += len(chain.stages)
                if count + 1 > limit or stages > nodes:
                    continue
                found = stages, cost + chain.prediction.cost, (index, *chosen)
                if count + 1 not in best or found < best[count + 1]:
                    best[count + 1] = found
        memory[free] = best
        return best

    found = packings((1 << machines) - 1)
    return [candidates[index][1] for index in found[max(found)][2]]


# -- heuristic ------------------------------------------------------------------------------------


def _heuristic(finder: ChainFinder, limit: int, nodes: int, fastest: ChainPlan | None) -> Found:
    plans = [_one_by_one(finder, limit, nodes, fastest, tight=tight) for tight in (False, True)]
    return min(
        (_improved(finder, plan, limit, nodes, fastest) for plan in plans),
        key=lambda found: found.order,
    )


def _one_by_one(
    finder: ChainFinder, limit: int, nodes: int, fastest: ChainPlan | None, *, tight: bool
) -> Found:
    """Take the best chain that is found among the free machines, again and again.

    ``tight``: prefer chains that leave little memory of their machines unused, so that more chains
    fit into a mesh that is short of it.
    """
    free = list(finder.machines)
    chains: list[ChainPlan] = []
    while len(chains) < limit and nodes > 0:
        found = [chain for chain in _neighbourhoods(finder, free) if len(chain.stages) <= nodes]
        allowed = [chain for chain in found if not _slower(chain, fastest)]
        if not allowed:
            return Found(_sorted(chains), fastest if found else None)
        if tight:
            chain = min(allowed, key=lambda c: (len(c.stages), _waste(finder, c), c.order))
        else:
            chain = min(allowed, key=lambda c: c.order)
        chains.append(chain)
        nodes -= len(chain.stages)
        free = [machine for machine in free if machine.peer not in chain.peers]
    return Found(_sorted(chains))


def _sorted(chains: Sequence[ChainPlan]) -> tuple[ChainPlan, ...]:
    return tuple(sorted(chains, key=lambda chain: chain.order))


def _waste(finder: ChainFinder, chain: ChainPlan) -> int:
    rooms = sum(finder.room(finder.by_peer[peer]) for peer in chain.peers)
    return max(0, rooms - finder.want.model.layers)


def _neighbourhoods(finder: ChainFinder, free: Sequence[Machine]) -> list[ChainPlan]:
    """The best chains of some groups of machines that are near each other and can do it."""
    wholes = [plan for machine in free if (plan := finder.whole(machine)) is not None]
    if wholes:
        return wholes  # fewest stages: no chain of several can be better
    useful = [machine for machine in free if finder.room(machine) > 0]
    layers = finder.want.model.layers
    rooms = sorted((finder.room(machine) for machine in useful), reverse=True)
    least = next((n for n in range(1, len(rooms) + 1) if sum(rooms[:n]) >= layers), None)
    if least is None:
        return []
    found: dict[tuple[str, ...], ChainPlan] = {}
    for pool in _pools(finder, useful, least):
        chain = _fewest(finder, pool)
        if chain is not None:
            found[chain.peers] = chain
    return list(found.values())


def _pools(finder: ChainFinder, useful: Sequence[Machine], least: int) -> list[tuple[Machine, ...]]:
    """Groups of machines around some that look good, each large enough for a chain."""

    def alone(machine: Machine) -> float:
        return finder.seat(machine, first=False, last=False).cost

    by_speed = sorted(useful, key=lambda m: (alone(m), m.peer))
    by_room = sorted(useful, key=lambda m: (-finder.room(m), alone(m), m.peer))
    seeds = {m.peer: m for m in [*by_speed[:_SEEDS], *by_room[:_SEEDS]]}
    pools: dict[tuple[str, ...], tuple[Machine, ...]] = {}
    size = max(_POOL, least + 2)
    for seed in seeds.values():

        def per_layer(machine: Machine, seed: Machine = seed) -> float:
            hop = finder.distance(seed.peer, machine.peer) if machine is not seed else 0.0
            return alone(machine) + hop / max(1, finder.room(machine))

        near = sorted(useful, key=lambda m: (per_layer(m), m.peer))
        roomy = [m for m in near if finder.room(m) >= finder.want.model.layers / (least + 1)]
        for ranked in (near, roomy, [*roomy[: size // 2], *by_room]):
            pool = _pool(seed, ranked, size)
            pools[tuple(machine.peer for machine in pool)] = pool
    return list(pools.values())


def _pool(seed: Machine, ranked: Sequence[Machine], size: int) -> tuple[Machine, ...]:
    chosen = list({machine.peer: machine for machine in (seed, *ranked)}.values())[:size]
    return tuple(sorted(chosen, key=lambda m: m.peer))


def _fewest(finder: ChainFinder, pool: Sequence[Machine]) -> ChainPlan | None:
    """The best chain of the fewest machines of the pool."""
    rooms = {m.peer: finder.room(m) for m in pool}
    layers = finder.want.model.layers
    for size in range(1, len(pool) + 1):
        if size > EXACT:
            return _long(finder, pool)
        best: ChainPlan | None = None
        for group in combinations(pool, size):
            if sum(rooms[m.peer] for m in group) < layers:
                continue
            chain = finder.best(group)
            if chain is not None and (best is None or chain.order < best.order):
                best = chain
        if best is not None:
            return best
    return None


def _long(finder: ChainFinder, pool: Sequence[Machine]) -> ChainPlan | None:
    """A chain of more machines than all orders of can be tried: the roomiest, each next to the
    nearest, layers in proportion to nothing but what fits."""
    layers = finder.want.model.layers
    ranked = sorted(pool, key=lambda m: (-finder.room(m), m.peer))
    for count in range(EXACT + 1, len(ranked) + 1):
        rest = ranked[1:count]
        order = [ranked[0]]
        while rest:
            near = min(rest, key=lambda m: (finder.distance(order[-1].peer, m.peer), m.peer))
            rest.remove(near)
            order.append(near)
        stages = []
        start = 0
        for index, machine in enumerate(order):
            last = index == len(order) - 1
            room = finder.seat(machine, first=index == 0, last=last).capacity
            take = min(room, layers - start - (len(order) - 1 - index))
            stages.append((machine, start, start + take))
            start += take
        if start == layers and all(first < last for _, first, last in stages):
            return finder.plan(stages)
    return None


def _improved(
    finder: ChainFinder, found: Found, limit: int, nodes: int, fastest: ChainPlan | None
) -> Found:
    """Lay out some of it again exactly, a window of machines at a time, while that makes it better.

    A window holds up to three chains and some free machines.
    """
    if len(finder.machines) > _IMPROVED:
        return found  # in a large mesh the neighbourhoods have enough to choose from
    best = found
    tried: set[tuple[str, ...]] = set()
    for _ in range(_WINDOWS):
        window = next((w for w in _windows(finder, best) if _names(w) not in tried), None)
        if window is None:
            break
        tried.add(_names(window))
        inside = set(_names(window))
        kept = [chain for chain in best.chains if not inside & set(chain.peers)]
        bound = nodes - sum(len(chain.stages) for chain in kept)
        small = ChainFinder(finder.want, window, finder.network)
        again = _exact(small, limit - len(kept), bound, fastest)
        candidate = Found(_sorted([*kept, *again.chains]), best.faster_alone)
        if candidate.order < best.order:
            best = candidate
            tried.clear()
    return best


def _names(machines: Sequence[Machine]) -> tuple[str, ...]:
    return tuple(machine.peer for machine in machines)


def _windows(finder: ChainFinder, found: Found) -> Iterator[list[Machine]]:
    used = {peer for chain in found.chains for peer in chain.peers}
    free = [m for m in finder.machines if m.peer not in used and finder.room(m)]
    free.sort(key=lambda m: (-finder.room(m), m.peer))
    for count in (3, 2, 1):
        for group in combinations(found.chains, count):
            inside = [finder.by_peer[peer] for chain in group for peer in chain.peers]
            room = _WINDOW - len(inside)
            for start in range(0, max(1, len(free)), max(1, room)):
                if room >= 0:
                    window = [*inside, *free[start : start + room]]
                    yield sorted(window, key=lambda m: m.peer)
