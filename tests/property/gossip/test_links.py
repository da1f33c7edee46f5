"""Which peers are dialled and which are asked whether they are there."""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from ca.certificate import Certificate, Role
from mesh.gossip.advert import Advert, SignedAdvert
from mesh.gossip.checking import CHECK_EVERY, DOUBT_KEPT, MOST_DOUBTS, Checking
from mesh.gossip.dialing import AT_ONCE, FEW_LINKS, FULL_MESH, YIELD, Dialing
from mesh.gossip.events import AdvertHeard, LinkDown, LinkUp, Refused
from mesh.gossip.membership import Table, apply

KEY = Ed25519PrivateKey.generate().public_key()
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def signed(peer, boot=1, addresses=("somewhere",)):
    certificate = Certificate(
        peer, "acme", peer, frozenset({Role.SERVE}), 1, EPOCH, EPOCH, KEY, b"", ()
    )
    advert = Advert(boot=boot, sequence=1, beat=60.0, addresses=addresses)
    return SignedAdvert(advert, certificate, b"")


def table_of(me, peers, links=()):
    table = Table(me, 1)
    for peer in peers:
        table, _ = apply(table, AdvertHeard(signed(peer)), 0.0)
    for peer in links:
        table, _ = apply(table, LinkUp(peer), 0.0)
    return table


def names(count):
    return [f"P{i:04}" for i in range(count)]


def test_of_a_pair_one_dials_at_once_and_the_other_only_if_that_fails():
    low, high = Dialing("A"), Dialing("B")
    low.update(table_of("A", ["B"]), 0.0)
    high.update(table_of("B", ["A"]), 0.0)
    assert low.due(table_of("A", ["B"]), 0.0) == ("B",)
    assert high.due(table_of("B", ["A"]), 0.0) == ()
    assert high.deadline == YIELD
    high.update(table_of("B", ["A"], links=["A"]), 1.0)
    assert high.deadline == math.inf


def test_a_peer_is_dialled_once_for_each_boot():
    dialing, table = Dialing("A"), table_of("A", ["B"])
    dialing.update(table, 0.0)
    assert dialing.due(table, 0.0) == ("B",)
    dialing.finished()
    dialing.update(table, 1.0)
    assert dialing.deadline == math.inf
    table, _ = apply(table, AdvertHeard(signed("B", boot=2)), 2.0)
    dialing.update(table, 2.0)
    assert dialing.due(table, 2.0) == ("B",)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 200))
def test_links_per_node_are_bounded_and_dials_at_once_too(count):
    peers = names(count)
    table = table_of("A", peers)
    dialing = Dialing("A")
    dialing.update(table, 0.0)
    dialled = []
    while dialing.deadline < math.inf:
        now = dialing.due(table, 0.0)
        assert 0 < len(now) <= AT_ONCE
        if len(now) == AT_ONCE:
            assert dialing.deadline == math.inf
        dialled += now
        for _ in now:
            dialing.finished()
    assert len(set(dialled)) == len(dialled)
    assert len(dialled) == (count if count < FULL_MESH else FEW_LINKS)


def test_few_links_keep_a_large_mesh_connected():
    peers = names(100)
    graph = {}
    for peer in peers:
        table = table_of(peer, [p for p in peers if p != peer])
        dialing = Dialing(peer)
        dialing.update(table, 0.0)
        wanted = set()
        while (at := dialing.deadline) < math.inf:
            for other in dialing.due(table, at):
                wanted.add(other)
                dialing.finished()
        graph[peer] = wanted
    for peer, wanted in list(graph.items()):
        for other in wanted:
            graph[other].add(peer)
    seen, frontier = {peers[0]}, [peers[0]]
    while frontier:
        new = graph[frontier.pop()] - seen
        seen |= new
        frontier += new
    assert len(seen) == 100
    assert max(Counter(len(v) for v in graph.values())) < 4 * FEW_LINKS


def test_every_quiet_peer_gets_its_turn():
    table = table_of("A", names(5), links=names(5))
    checking = Checking(random.Random(1))
    asked = []
    for turn in range(10):
        now = turn * CHECK_EVERY
        peer = checking.due(table, now, lambda p: p != "P0002")
        assert checking.due(table, now, lambda _: True) is None
        if peer is not None:
            asked.append(peer)
            checking.finished(peer)
    assert set(asked) == {"P0000", "P0001", "P0003", "P0004"}
    assert max(Counter(asked).values()) <= 3


def test_only_linked_alive_peers_are_asked_and_each_once_at_a_time():
    table = table_of("A", ["B", "C"], links=["B"])
    checking = Checking(random.Random(1))
    assert checking.start(table, "B")
    assert not checking.start(table, "B")
    assert not checking.start(table, "C")
    assert not checking.start(table, "D")
    checking.finished("B")
    table, _ = apply(table, LinkDown("B"), 1.0)
    assert not checking.start(table, "B")
    assert checking.deadline(table) == math.inf


def test_a_doubt_is_news_once():
    checking = Checking(random.Random(1))
    assert checking.doubt("B", 0.0)
    assert not checking.doubt("B", DOUBT_KEPT - 0.1)
    assert checking.doubt("B", DOUBT_KEPT + 0.1)


def test_only_nodes_that_are_admitted_and_there_are_heard_with_doubts():
    table = table_of("A", ["B", "C", "D"])
    table, _ = apply(table, AdvertHeard(signed("E"), expires=5.0), 0.0)
    checking = Checking(random.Random(1))
    assert not checking.hear_doubt(table, "STRANGER", "B", 0.0)
    assert not checking.hear_doubt(table, "C", "NOBODY", 0.0)
    table, _ = apply(table, Refused(frozenset({"D"}), "its certificate is revoked"), 0.0)
    assert not checking.hear_doubt(table, "D", "B", 0.0)
    assert checking.hear_doubt(table, "C", "B", 0.0), "what was not heard is news all the same"
    assert not checking.hear_doubt(table, "C", "B", 1.0)
    assert not checking.hear_doubt(table, "E", "C", 5.0), "its certificate has ended"
    assert checking.hear_doubt(table, "E", "C", 4.0)


def test_who_loses_half_of_a_large_mesh_at_once_does_not_tell_of_each():
    checking = Checking(random.Random(1))
    raised = [p for i, p in enumerate(names(500)) if checking.raise_doubt(p, 0.001 * i)]
    assert raised == names(MOST_DOUBTS)
    assert not checking.raise_doubt("LATER", DOUBT_KEPT - 0.1)
    assert checking.doubt("LATER", DOUBT_KEPT - 0.1), "what others tell is passed on all the same"
    assert checking.raise_doubt("MUCH LATER", DOUBT_KEPT)


def test_nobody_repeats_a_doubt_of_another():
    checking = Checking(random.Random(1))
    assert checking.doubt("B", 0.0)
    assert not checking.raise_doubt("B", 1.0)
    assert all(checking.raise_doubt(p, 2.0) for p in names(MOST_DOUBTS))


@settings(max_examples=50, deadline=None)
@given(times=st.lists(st.floats(0.0, 60.0), max_size=200))
def test_doubts_of_one_node_are_bounded_whenever_it_has_them(times):
    checking = Checking(random.Random(1))
    ordered = sorted(times)
    raised = [at for i, at in enumerate(ordered) if checking.raise_doubt(f"P{i}", at)]
    for at in raised:
        assert sum(0.0 <= other - at < DOUBT_KEPT for other in raised) <= MOST_DOUBTS
    if len(ordered) <= MOST_DOUBTS:
        assert raised == ordered
