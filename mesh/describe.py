"""The mesh in plain JSON values, for the HTTP endpoints and the command line."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from mesh.admission.policy import Standing
from mesh.api import ModelInfo
from mesh.gossip.advert import Holding
from mesh.gossip.view import ModelView, NodeView, View
from mesh.identity import Identity, PeerId


def api_models(view: View, *, created: int) -> list[ModelInfo]:
    """One entry per name: the weights that most nodes serve."""
    best: dict[str, tuple[int, ModelInfo]] = {}
    for model in view.models:
        if not model.available:
            continue
        nodes = _servers(model)
        info = ModelInfo(
            name=model.name,
            created=created,
            nodes=nodes,
            digest=model.digest,
            context_length=model.context_length,
        )
        if model.name not in best or best[model.name][0] < len(nodes):
            best[model.name] = len(nodes), info
    return [info for _, info in best.values()]


def models(view: View) -> list[dict[str, Any]]:
    """Every model that is held anywhere, ready or not."""
    return [
        {
            "model": model.name,
            "ready": "yes" if model.available else "loading" if model.loading else "incomplete",
            "served_by": [_place(view, peer) for peer in _servers(model)],
            "replicas": len(model.replicas),
            "chains": model.chains,
            "digest": model.digest,
            "layers": model.layers,
            "context_length": model.context_length,
        }
        for model in view.models
    ]


def peers(view: View, standings: Mapping[PeerId, Standing]) -> list[dict[str, Any]]:
    """The other nodes, those that are alive first, with what this node's tests say of them."""
    untested = Standing()
    return [
        {
            "peer": entry.peer,
            "name": entry.name,
            "status": entry.status,
            "reason": entry.reason,
            "admission": standings.get(entry.peer, untested).state,
            "why": standings.get(entry.peer, untested).reason,
            "roles": sorted(entry.roles),
            "path": entry.link.path if entry.link else None,
            "rtt_ms": _milliseconds(entry.link.rtt if entry.link else None),
            "holds": [_holding_text(holding) for holding in entry.holdings],
            "addresses": list(entry.advert.addresses),
        }
        for entry in sorted(view.nodes.values(), key=lambda n: (n.status != "alive", n.name))
        if entry.peer != view.me
    ]


def sightings(
    seen: Mapping[PeerId, Sequence[str]], linked: Container[PeerId]
) -> list[dict[str, Any]]:
    """Nodes of the network that announced themselves on the local network."""
    return [
        {"peer": peer, "connected": "yes" if peer in linked else "no", "addresses": list(addresses)}
        for peer, addresses in sorted(seen.items())
    ]


def status(
    view: View, identity: Identity, *, listen: Sequence[str], api: str, home: str, uptime: float
) -> dict[str, Any]:
    me = view.nodes.get(view.me)
    certificate = identity.certificate
    return {
        "name": certificate.name,
        "peer": certificate.peer_id,
        "network": certificate.network,
        "roles": sorted(certificate.roles),
        "serial": f"{certificate.serial:040x}",
        "valid_until": f"{certificate.not_after:%Y-%m-%d %H:%M} UTC",
        "version": version("meshnode"),
        "home": home,
        "api": api,
        "listen": list(listen),
        "uptime": f"{uptime:.0f} s",
        "holds": [_holding_text(holding) for holding in me.holdings] if me else [],
        "peers": f"{len(view.alive)} alive, {len(view.nodes) - 1 - len(view.alive)} suspect",
    }


def view(view: View) -> dict[str, Any]:
    """All of a view: ``GET /v1/mesh/view``."""
    return {
        "me": view.me,
        "nodes": [node(entry) for entry in view.nodes.values()],
        "models": models(view),
    }


def node(entry: NodeView) -> dict[str, Any]:
    return {
        "peer": entry.peer,
        "name": entry.name,
        "roles": sorted(entry.roles),
        "status": entry.status,
        "reason": entry.reason,
        "state": entry.advert.state,
        "software": entry.advert.software,
        "advert": {
            "boot": datetime.fromtimestamp(entry.advert.boot / 1000, UTC).isoformat(),
            "sequence": entry.advert.sequence,
        },
        "addresses": list(entry.advert.addresses),
        "path": entry.link.path if entry.link else None,
        "rtt_ms": _milliseconds(entry.link.rtt if entry.link else None),
        "devices": [device.model_dump() for device in entry.advert.devices],
        "holdings": [_holding(entry, holding) for holding in entry.holdings],
        "stored": [stored.model_dump() for stored in entry.advert.stored],
    }


def _holding(entry: NodeView, holding: Holding) -> dict[str, Any]:
    load = entry.load_of(holding)
    return {**holding.model_dump(exclude={"id"}), "active": load.active, "waiting": load.waiting}


def _holding_text(holding: Holding) -> str:
    layers = "" if holding.kind == "replica" else f":{holding.first}-{holding.last}"
    return f"{holding.model}{layers} on {holding.device}{'' if holding.ready else ' (loading)'}"


def _servers(model: ModelView) -> list[str]:
    places = (*model.replicas, *(model.stages if model.chains else ()))
    return list(dict.fromkeys(place.node.peer for place in places))


def _place(view: View, peer: str) -> str:
    return next((n.name for n in view.nodes.values() if n.peer == peer), peer)


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
