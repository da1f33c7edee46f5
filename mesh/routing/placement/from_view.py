"""The facts of placement as a view holds them. Pure, and the same for every node with that view:
nothing here comes from this node's own links."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ca.certificate import Role
from mesh.gossip.advert import Device, MeasuredSpeed, SeenLink, Wanted
from mesh.gossip.anti_entropy import key_of
from mesh.gossip.view import NodeView, View
from mesh.identity import PeerId
from mesh.routing.placement.claims import Claim
from mesh.routing.placement.facts import (
    DEFAULT_BANDWIDTH,
    DEFAULT_DECODE_RATE,
    DEFAULT_PREFILL_RATE,
    Connection,
    Machine,
    ModelShape,
    Network,
    Speed,
    Want,
    runs_fixed_shapes,
)

TENTH_MS = 1e-4  # s
KILOBYTE = 1e3
PROBE_NOISE = 1.5  # times


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a plan is made from."""

    wants: tuple[Want, ...]
    machines: tuple[Machine, ...]
    network: Network
    claims: tuple[Claim, ...]


def facts_in(view: View) -> Facts:
    return Facts(
        tuple(want_of(wanted) for wanted in wants_in(view)),
        machines_in(view),
        network_in(view),
        claims_in(view),
    )


def want_of(wanted: Wanted) -> Want:
    shape = ModelShape(
        name=wanted.name,
        digest=wanted.digest,
        layers=wanted.layers,
        layer_bytes=wanted.layer_bytes,
        embedding_bytes=wanted.embedding_bytes,
        head_bytes=wanted.head_bytes,
        shared_bytes=wanted.shared_bytes,
        kv_bytes=wanted.kv_bytes,
        hidden=wanted.hidden,
        context_length=wanted.context_length,
    )
    context = min(wanted.context, wanted.context_length)
    return Want(shape, wanted.replicas, wanted.max_nodes, context, wanted.sessions)


def newest_wants(view: View) -> tuple[Wanted, ...]:
    """For each name the newest want, withdrawn ones too, in order of names."""
    newest = newest_of(heard_wants(view))
    return tuple(newest[name] for name in sorted(newest))


def heard_wants(view: View) -> Iterator[Wanted]:
    """All that is said, old words too. Only nodes that may serve or administrate are heard."""
    for node in view.nodes.values():
        if node.roles & {Role.SERVE, Role.ADMIN}:
            yield from node.advert.wants


def newest_of(wants: Iterable[Wanted]) -> dict[str, Wanted]:
    """By name."""
    newest: dict[str, Wanted] = {}
    for wanted in wants:
        known = newest.get(wanted.name)
        if known is None or _age(known) < _age(wanted):
            newest[wanted.name] = wanted
    return newest


def _age(wanted: Wanted) -> tuple[int, str, str]:
    return wanted.version, wanted.publisher, wanted.digest


def wants_in(view: View) -> tuple[Wanted, ...]:
    """What the mesh is to serve."""
    return tuple(wanted for wanted in newest_wants(view) if wanted.replicas != 0)


def names_of(view: View, digest: str) -> frozenset[str]:
    """Under which weights are wanted, or held by placement still."""
    wanted = {w.name for w in wants_in(view) if w.digest == digest}
    held = {
        h.model
        for node in view.nodes.values()
        for h in node.holdings
        if h.digest == digest and h.claim is not None
    }
    return frozenset(wanted | held)


def _may_hold(node: NodeView) -> bool:
    # A suspect may be back in a moment: its stages are not given away before it is gone.
    return node.advert.state == "up" and Role.SERVE in node.roles


def machines_in(view: View) -> tuple[Machine, ...]:
    """Nodes that offer memory to placement. Those that peers reject are left out, those that they
    quarantine hold whole models only."""
    verdicts = verdicts_in(view)
    usual = _Usual(view)
    found = []
    for peer, node in view.nodes.items():
        device = offered_device(node)
        state = verdicts[peer].state if peer in verdicts else 0
        if device is None or device.offered is None or not _may_hold(node) or state == 2:
            continue
        found.append(
            Machine(
                peer=peer,
                memory=device.offered,
                speeds=MappingProxyType(
                    {
                        **usual.on(device),
                        **{
                            speed.digest: Speed(speed.prefill, speed.decode)
                            for speed, _ in _measured(node)
                        },
                    }
                ),
                decode_rate=float(device.decode_rate or DEFAULT_DECODE_RATE),
                prefill_rate=float(device.prefill_rate or DEFAULT_PREFILL_RATE),
                stored=frozenset(stored.digest for stored in node.advert.stored),
                alone=state == 1,
                fixed=runs_fixed_shapes(device.name),
            )
        )
    return tuple(found)


class _Usual:
    """Estimates for machines that have not measured a model, from those that have: the median,
    of each taken as much faster or slower as its device is where both were probed."""

    def __init__(self, view: View) -> None:
        self._measured: dict[str, list[tuple[MeasuredSpeed, Device]]] = {}
        for node in view.nodes.values():
            for speed, device in _measured(node):
                self._measured.setdefault(speed.digest, []).append((speed, device))

    def on(self, device: Device) -> dict[str, Speed]:
        """By model."""
        return {
            digest: Speed(
                statistics.median_low(
                    speed.prefill * _ratio(other.prefill_rate, device.prefill_rate)
                    for speed, other in found
                ),
                statistics.median_low(
                    speed.decode * _ratio(other.decode_rate, device.decode_rate)
                    for speed, other in found
                ),
            )
            for digest, found in self._measured.items()
        }


def _measured(node: NodeView) -> list[tuple[MeasuredSpeed, Device]]:
    """What was measured on the device that placement uses there."""
    device = offered_device(node)
    if device is None:
        return []
    return [(speed, device) for speed in node.advert.speeds if speed.device == device.name]


def measured_by(view: View, digest: str) -> frozenset[PeerId]:
    """Who has measured a model; what the others make of it is an estimate."""
    return frozenset(
        peer
        for peer, node in view.nodes.items()
        if any(speed.digest == digest for speed, _ in _measured(node))
    )


def _ratio(one: int | None, other: int | None) -> float:
    ratio = one / other if one and other else 1.0
    # A probe takes a second on a machine that may be busy: small differences say nothing.
    return ratio if not 1 / PROBE_NOISE < ratio < PROBE_NOISE else 1.0


def offered_device(node: NodeView) -> Device | None:
    """The device that placement may use on a node."""
    return next((d for d in node.advert.devices if d.offered is not None), None)


def claims_in(view: View) -> tuple[Claim, ...]:
    return tuple(
        Claim(peer, h.digest, h.first, h.last, h.claim, h.ready)
        for peer, node in view.nodes.items()
        if _may_hold(node)
        for h in node.holdings
    )


def network_in(view: View) -> Network:
    peers = {key_of(peer): peer for peer in view.nodes}
    measured: dict[tuple[PeerId, PeerId], Connection] = {}
    for peer, node in view.nodes.items():
        for link in node.advert.links:
            other = peers.get(link.key)
            if other is not None and other != peer and link.rtt is not None:
                measured[peer, other] = _connection(link)
    return Network(measured)


def _connection(link: SeenLink) -> Connection:
    rates = [rate * KILOBYTE for rate in (link.upload, link.download) if rate]
    delay = (link.rtt or 0) * TENTH_MS / 2
    return Connection(delay, min(rates, default=max(DEFAULT_BANDWIDTH, 1.0)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What peers think of a node: 0 admitted, 1 quarantined, 2 rejected, and how many of them."""

    state: int
    against: int
    of: int


def verdicts_in(view: View) -> Mapping[PeerId, Verdict]:
    """By the half of those who say anything: one node with a bad line does not speak for all."""
    peers = {key_of(peer): peer for peer in view.nodes}
    said: dict[PeerId, list[int]] = {}
    for peer, node in view.nodes.items():
        if node.status != "alive":
            continue
        for link in node.advert.links:
            other = peers.get(link.key)
            if other is not None and other != peer:
                said.setdefault(other, []).append(link.state)
    found = {}
    for peer, states in said.items():
        against = sum(1 for state in states if state)
        rejecting = sum(1 for state in states if state == 2)
        state = 2 if 2 * rejecting >= len(states) else 1 if 2 * against >= len(states) else 0
        found[peer] = Verdict(state, against, len(states))
    return found
