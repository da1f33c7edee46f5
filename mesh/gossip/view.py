"""The mesh as this node sees it at one moment: what routing and the API read.

A view is immutable. It is built from the membership table and from what this node measures on its
own links, and it already leaves out what does not count: capacity that a peer without the role
``serve`` claims, and load of holdings that are no longer there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ca.certificate import Role
from mesh.gossip.advert import Advert, Holding, HoldingLoad
from mesh.gossip.events import Status
from mesh.gossip.membership import Entry, Table
from mesh.identity import PeerId

_IDLE: Mapping[int, HoldingLoad] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LinkView:
    """An open link of this node. ``rtt`` in seconds, None while unmeasured."""

    rtt: float | None
    path: str  # direct, punched or relayed


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. ``link`` is None for this node itself and for peers without an open link."""

    peer: PeerId
    name: str
    roles: frozenset[Role]
    serial: int
    advert: Advert
    status: Status
    reason: str
    since: float  # of the status, on this node's monotonic clock
    heard: float
    holdings: tuple[Holding, ...]  # those that count, loading ones too
    load: Mapping[int, HoldingLoad]
    load_at: float
    link: LinkView | None

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        return self.status == "alive" and self.advert.state == "up"

    def load_of(self, holding: Holding) -> HoldingLoad:
        """Its last known load; idle when it has said nothing."""
        known = self.load.get(holding.id)
        return known if known is not None else HoldingLoad(id=holding.id, active=0, waiting=0)


@dataclass(frozen=True, slots=True)
class Place:
    """A holding and the node that has it."""

    node: NodeView
    holding: Holding


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model, by digest, with where it is ready.

    Two nodes can hold different weights under one name: those are two models. ``chains`` is how
    many complete chains can stand side by side without sharing a stage.
    """

    name: str
    digest: str
    layers: int
    context_length: int  # the longest that one of its places takes
    replicas: tuple[Place, ...]
    stages: tuple[Place, ...]
    chains: int
    loading: int  # holdings that are not ready yet

    @property
    def available(self) -> bool:
        return bool(self.replicas) or self.chains > 0


@dataclass(frozen=True, slots=True)
class View:
    """``nodes`` are all that are alive or suspect, this node included once it has an advert."""

    me: PeerId
    at: float  # seconds on this node's monotonic clock
    nodes: Mapping[PeerId, NodeView]
    models: tuple[ModelView, ...] = field(default=())  # by name, then digest

    @property
    def alive(self) -> tuple[NodeView, ...]:
        """The other nodes that are alive."""
        return tuple(n for p, n in self.nodes.items() if p != self.me and n.status == "alive")

    def models_named(self, name: str) -> tuple[ModelView, ...]:
        return tuple(m for m in self.models if m.name == name)

    def can_use(self, name: str) -> bool:
        """Whether a request for this model could be run now."""
        return any(m.available for m in self.models_named(name))


def build_view(table: Table, links: Mapping[PeerId, LinkView], now: float) -> View:
    nodes = {
        peer: _node(peer, entry, links.get(peer))
        for peer, entry in sorted(table.entries.items())
        if entry.status != "gone"
    }
    return View(table.me, now, MappingProxyType(nodes), _models(nodes.values()))


def _node(peer: PeerId, entry: Entry, link: LinkView | None) -> NodeView:
    certificate = entry.signed.certificate
    advert = entry.signed.advert
    holdings = advert.holdings if Role.SERVE in certificate.roles else ()
    return NodeView(
        peer=peer,
        name=certificate.name,
        roles=certificate.roles,
        serial=certificate.serial,
        advert=advert,
        status=entry.status,
        reason=entry.reason,
        since=entry.since,
        heard=entry.heard,
        holdings=holdings,
        load=entry.load if holdings else _IDLE,
        load_at=entry.load_at,
        link=link,
    )


def _models(nodes: Iterable[NodeView]) -> tuple[ModelView, ...]:
    places: dict[tuple[str, str, int], list[Place]] = {}
    for node in nodes:
        if node.usable:
            for holding in node.holdings:
                key = (holding.model, holding.digest, holding.layers)
                places.setdefault(key, []).append(Place(node, holding))
    return tuple(
        _model(name, digest, layers, found)
        for (name, digest, layers), found in sorted(places.items())
    )


def _model(name: str, digest: str, layers: int, places: list[Place]) -> ModelView:
    ready = [p for p in places if p.holding.ready]
    stages = tuple(p for p in ready if p.holding.kind == "stage")
    return ModelView(
        name=name,
        digest=digest,
        layers=layers,
        context_length=max(p.holding.context_length for p in ready or places),
        replicas=tuple(p for p in ready if p.holding.kind == "replica"),
        stages=stages,
        chains=count_chains(stages, layers),
        loading=len(places) - len(ready),
    )


def count_chains(stages: Iterable[Place], layers: int) -> int:
    """How many complete chains exist at once: stages meet exactly where one ends and one begins.

    This is a maximum flow from layer 0 to ``layers`` in which each stage is an edge that carries
    one chain, found by augmenting paths.
    """
    ranges = [(p.holding.first, p.holding.last) for p in stages]
    used = [False] * len(ranges)
    count = 0
    while True:
        # Search from boundary 0; a used stage can be walked backwards, which gives it up.
        came: dict[int, tuple[int, int]] = {0: (-1, -1)}
        frontier = [0]
        while frontier and layers not in came:
            boundary = frontier.pop()
            for index, (first, last) in enumerate(ranges):
                origin, target = (last, first) if used[index] else (first, last)
                if origin == boundary and target not in came:
                    came[target] = (index, boundary)
                    frontier.append(target)
        if layers not in came:
            return count
        boundary = layers
        while boundary != 0:
            index, boundary = came[boundary]
            used[index] = not used[index]
        count += 1
