"""Nothing is said too often, and no promise of when to speak next is broken."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.gossip.advert import HoldingLoad
from mesh.gossip.publishing import (
    ADVERT_EVERY,
    ADVERT_GAP,
    BUSY_BEAT,
    LOAD_GAP,
    Publishing,
    rounded,
)


def load(active, free_kv=None):
    return HoldingLoad(id=1, active=active, waiting=0, free_kv=free_kv)


STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),  # seconds later
        st.one_of(st.just("change"), st.integers(0, 3)),  # the advert, or the load
    ),
    max_size=30,
)


def play(steps):
    """(time, kind, beat, load) of all that is sent when the service follows the deadlines."""
    publishing, now, sent = Publishing(), 0.0, []

    def follow(until):
        nonlocal now
        while publishing.deadline <= until:
            now = max(now, publishing.deadline)
            kind = publishing.due(now)
            assert kind is not None, "a deadline at which nothing is due"
            sent.append((now, kind, publishing.beat, publishing.load))
            if kind == "advert":
                publishing.sent_advert(now, 0.5)
            else:
                publishing.sent_load(now)
        now = until

    for later, what in steps:
        follow(now + later)
        if what == "change":
            publishing.advert_changed(now)
        else:
            publishing.load_changed({1: load(what)})
    follow(now + 30.0)
    return publishing, sent


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_what_is_said_when(steps):
    publishing, sent = play(steps)
    assert sent[0][:2] == (0.0, "advert")
    for (at, _, beat, _), (after, kind, _, _) in itertools.pairwise(sent):
        assert after - at <= beat + 1e-9, "a promise was broken"
        if kind == "load":
            assert after - at >= LOAD_GAP - 1e-9
        else:
            adverts = [t for t, k, _, _ in sent if k == "advert" and t < after]
            assert after - adverts[-1] >= ADVERT_GAP - 1e-9
    # What was reported last has been said, and an idle node is quiet between adverts.
    assert sent[-1][3] == publishing.load
    if publishing.beat == ADVERT_EVERY:
        assert all(kind == "advert" for at, kind, _, _ in sent if at > sent[-1][0] - 20.0)


def test_a_change_is_said_at_once():
    publishing = Publishing()
    assert publishing.due(0.0) == "advert"
    publishing.sent_advert(0.0, 0.0)
    assert publishing.due(3.0) is None
    publishing.advert_changed(3.0)
    assert publishing.due(3.0) == "advert"


def test_a_busy_node_repeats_itself_and_promises_so():
    publishing = Publishing()
    publishing.sent_advert(0.0, 0.0)
    publishing.load_changed({1: load(2)})
    assert publishing.beat == BUSY_BEAT
    publishing.sent_load(1.0)
    assert publishing.deadline == 1.0 + BUSY_BEAT
    publishing.load_changed({1: load(0)})
    assert publishing.beat == ADVERT_EVERY
    publishing.sent_load(2.0)
    assert publishing.deadline == ADVERT_EVERY


def test_what_one_peer_was_told_all_are_told_even_if_it_is_over():
    publishing = Publishing()
    publishing.load_changed({1: load(0)})
    publishing.sent_advert(0.0, 0.0)
    publishing.load_changed({1: load(1)})
    publishing.told_one()
    publishing.load_changed({1: load(0)})
    assert publishing.deadline == LOAD_GAP and publishing.due(LOAD_GAP) == "load"
    publishing.sent_load(LOAD_GAP)
    assert publishing.deadline == ADVERT_EVERY


def test_each_token_of_kv_is_not_news():
    publishing = Publishing()
    publishing.load_changed({1: load(1, free_kv=10_000)})
    publishing.sent_advert(0.0, 0.0)
    publishing.load_changed({1: load(1, free_kv=9_990)})
    assert publishing.deadline == BUSY_BEAT
    publishing.load_changed({1: load(1, free_kv=7_000)})
    assert publishing.deadline == LOAD_GAP


@given(free=st.integers(0, (1 << 40) - 1))
def test_rounding_never_promises_more_and_keeps_half(free):
    kept = rounded(load(0, free_kv=free)).free_kv
    assert kept <= free < max(1, kept) * 2
    assert not math.isnan(kept)


def test_in_a_large_mesh_all_speak_less_often_and_promise_so():
    publishing = Publishing()
    publishing.mesh_size(300)
    assert publishing.beat == 3 * ADVERT_EVERY
    publishing.sent_advert(0.0, 0.0)
    assert publishing.deadline == 3 * ADVERT_EVERY
    publishing.load_changed({1: load(2)})
    assert publishing.deadline == 3 * LOAD_GAP and publishing.beat == 3 * BUSY_BEAT
    publishing.mesh_size(100_000)
    assert publishing.beat <= 60.0
    publishing.mesh_size(5)
    assert publishing.beat == BUSY_BEAT
