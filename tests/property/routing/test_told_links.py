"""Chains are priced by the links that their nodes tell of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mesh.gossip.advert import SeenLink
from mesh.gossip.anti_entropy import key_of
from mesh.routing.cost import FORWARD, hop_delay
from mesh.routing.placement.predict import HOP


def telling(node, peer, rtt):
    links = (SeenLink(key=key_of(peer), rtt=rtt),)
    return replace(node, advert=node.advert.model_copy(update={"links": links}))


def test_the_link_between_two_nodes_counts_and_not_the_way_over_us(make_view):
    view = make_view("ME", A={"holdings": [{}], "rtt": 0.1}, B={"holdings": [{}], "rtt": 0.1})
    a, b = view.nodes["A"], view.nodes["B"]
    over_us = hop_delay(a, b, "ME")
    assert over_us == pytest.approx(FORWARD + 0.1)
    near = telling(a, "B", 10)
    assert hop_delay(near, b, "ME") == hop_delay(b, near, "ME") == pytest.approx(HOP + 0.0005)
    assert hop_delay(near, telling(b, "A", 400), "ME") == pytest.approx(HOP + 0.02)
    assert hop_delay(telling(a, "C", 10), b, "ME") == over_us
    assert hop_delay(a, a, "ME") == 0.0
