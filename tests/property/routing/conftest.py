"""Views made up for the router: what adverts and load reports would have made of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import Certificate, Role
from mesh.gossip.advert import Advert, Holding, HoldingLoad, SignedAdvert
from mesh.gossip.events import AdvertHeard, LinkDown, Mine
from mesh.gossip.membership import Table, apply
from mesh.gossip.view import LinkView, View, build_view

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MODEL, DIGEST, LAYERS = "m", "ab" * 32, 30


def _holding(id_: int, spec: dict[str, Any]) -> Holding:
    first, last = spec.get("first", 0), spec.get("last", LAYERS)
    return Holding(
        id=id_,
        model=spec.get("model", MODEL),
        digest=spec.get("digest", DIGEST),
        kind=spec.get("kind", "replica" if (first, last) == (0, LAYERS) else "stage"),
        first=first,
        last=last,
        layers=LAYERS,
        context_length=8192,
        device="CPU",
        ready=spec.get("ready", True),
        slots=spec.get("slots", 8),
        queue=spec.get("queue", 1000),
        prefill_seconds=spec.get("prefill", 0.002),
        decode_seconds=spec.get("decode", 0.02),
    )


@pytest.fixture(scope="session")
def make_view() -> Callable[..., View]:
    """``make_view(me, A=[{...}, ...], ...)``: each peer with its holdings.

    A holding's keys: first, last, slots, queue, decode, prefill, active, waiting, ready, free_kv.
    A peer given as a dict has ``holdings`` and may have ``rtt``, ``roles``, ``state``, ``suspect``.
    """

    def make(me: str, **peers: Any) -> View:
        table = Table(me, 1)
        links: dict[str, LinkView] = {}
        suspects = []
        for peer, given in {me: [], **peers}.items():
            node = given if isinstance(given, dict) else {"holdings": given}
            holdings = node["holdings"]
            advert = Advert(
                boot=1,
                sequence=1,
                beat=10.0,
                state=node.get("state", "up"),
                holdings=tuple(_holding(i, h) for i, h in enumerate(holdings)),
                load=tuple(
                    HoldingLoad(
                        id=i,
                        active=h.get("active", 0),
                        waiting=h.get("waiting", 0),
                        free_kv=h.get("free_kv"),
                    )
                    for i, h in enumerate(holdings)
                ),
            )
            certificate = Certificate(
                peer.lower(),
                "acme",
                peer,
                frozenset(node.get("roles", (Role.SERVE, Role.USE))),
                1,
                EPOCH,
                EPOCH,
                KEY,
                b"",
                (),
            )
            signed = SignedAdvert(advert, certificate, b"")
            event = Mine(signed) if peer == me else AdvertHeard(signed)
            table, _ = apply(table, event, 100.0)
            if node.get("rtt", 0.001) is not None:
                links[peer] = LinkView(node.get("rtt", 0.001), "direct")
            if node.get("suspect"):
                suspects.append(peer)
        for peer in suspects:
            table, _ = apply(table, LinkDown(peer), 100.0)
        links.pop(me)
        return build_view(table, links, 100.0)

    return make
