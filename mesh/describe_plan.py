"""Layouts in plain JSON values, and what-if questions about them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mesh.config import parse_size
from mesh.gossip.view import View
from mesh.identity import PeerId
from mesh.routing.placement.claims import Claim
from mesh.routing.placement.facts import Machine, Speed
from mesh.routing.placement.from_view import Facts, claims_in, measured_by
from mesh.routing.placement.plan import ModelPlan, Plan
from mesh.routing.placement.predict import PROMPT, ChainPlan, StagePlan

MAX_CHANGES = 16


def plan(view: View, layout: Plan, only: str | None = None) -> dict[str, Any]:
    """``GET /v1/mesh/plan``: every wanted model with its chains, and what nodes have loaded."""
    claims = claims_in(view)
    return {
        "me": view.me,
        "prompt_tokens": PROMPT,  # that the time to the first token is predicted for
        "models": [
            _model(view, model, claims)
            for model in layout.models
            if only in (None, model.want.model.name)
        ],
    }


def _model(view: View, model: ModelPlan, claims: Sequence[Claim]) -> dict[str, Any]:
    want = model.want
    shape = want.model
    ready = {(c.peer, c.first, c.last) for c in claims if c.digest == shape.digest and c.ready}
    measured = measured_by(view, shape.digest)

    def stage(one: StagePlan) -> dict[str, Any]:
        return {
            "peer": one.peer,
            "name": _name(view, one.peer),
            "first": one.first,
            "last": one.last,
            "bytes": one.bytes,
            "loaded": (one.peer, one.first, one.last) in ready,
            "speed": "measured" if one.peer in measured else "estimated",
        }

    def chain(one: ChainPlan) -> dict[str, Any]:
        hops = one.prediction.hops or (0.0,)
        stages = [
            {**stage(s), "step_ms": _ms(seconds), "hop_ms": _ms(hop)}
            for s, seconds, hop in zip(one.stages, one.prediction.stages, hops, strict=True)
        ]
        return {
            "stages": stages,
            "tokens_per_second": round(one.prediction.tokens_per_second, 2),
            "first_token_ms": _ms(one.prediction.first_token),
            "loaded": all(s["loaded"] for s in stages),
        }

    return {
        "model": shape.name,
        "digest": shape.digest,
        "layers": shape.layers,
        "replicas": want.replicas,
        "max_nodes": want.max_nodes,
        "context": want.context,
        "sessions": want.sessions,
        "chains": [chain(one) for one in model.chains],
        "spares": [stage(one) for one in model.spares],
        "notes": [_named(view, note) for note in model.notes],
    }


def _name(view: View, peer: PeerId) -> str:
    node = view.nodes.get(peer)
    return node.name if node is not None else str(peer)


def _named(view: View, note: str) -> str:
    for peer, node in view.nodes.items():
        note = note.replace(peer, node.name)
    return note


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def what_if(view: View, text: str, facts: Facts) -> Facts:
    """``facts`` changed as in ``add:16GB,remove:desk-7``. Raises ValueError.

    A machine that is added is as fast as the usual one here. Nodes are named by name or PeerId.
    """
    changes = [part.strip() for part in text.split(",") if part.strip()]
    if len(changes) > MAX_CHANGES:
        raise ValueError(f"at most {MAX_CHANGES} changes at a time")
    for number, change in enumerate(changes, 1):
        verb, _, value = change.partition(":")
        if verb == "add":
            added = _usual(facts, PeerId(f"added-{number}"), parse_size(value))
            facts = replace(facts, machines=(*facts.machines, added))
        elif verb == "remove":
            gone = {p for p, node in view.nodes.items() if value in (node.name, p)}
            if not gone:
                raise ValueError(f"no node is called {value!r}")
            facts = replace(
                facts,
                machines=tuple(m for m in facts.machines if m.peer not in gone),
                claims=tuple(c for c in facts.claims if c.peer not in gone),
            )
        else:
            raise ValueError(f"{change!r} is neither add:SIZE nor remove:NODE")
    return facts


def _usual(facts: Facts, peer: PeerId, memory: int) -> Machine:
    machines = facts.machines
    if not machines:
        return Machine(peer, memory)
    digests = {digest for machine in machines for digest in machine.speeds}
    speeds = {}
    for digest in sorted(digests):
        known = [m.speeds[digest] for m in machines if digest in m.speeds]
        speeds[digest] = Speed(
            statistics.median(speed.prefill for speed in known),
            statistics.median(speed.decode for speed in known),
        )
    return Machine(
        peer,
        memory,
        speeds,
        statistics.median(m.decode_rate for m in machines),
        statistics.median(m.prefill_rate for m in machines),
    )
