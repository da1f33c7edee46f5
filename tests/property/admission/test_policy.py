"""Who is admitted to chains: states change by runs of tests, never by a single one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mesh.admission.measure import LinkSummary
from mesh.admission.policy import (
    FAILS,
    LONGEST_RETEST,
    PASSES,
    RETEST,
    WORSE,
    Standing,
    Thresholds,
    judge,
    next_look,
)

LIMITS = Thresholds()
GOOD = LinkSummary(0.02, 0.001, 0.0, 5e6, 5e6)
SLOW = LinkSummary(LIMITS.max_rtt * 1.5, 0.001, 0.0, 5e6, 5e6)
DREADFUL = LinkSummary(LIMITS.max_rtt * 10, 0.001, 0.0, 5e6, 5e6)
BORDER = LinkSummary(LIMITS.max_rtt * 0.95, 0.001, 0.0, 5e6, 5e6)  # good enough to stay only


def run(summaries, standing=None, speed=20.0):
    standing = standing or Standing()
    now = 0.0
    for summary in summaries:
        now = max(now + 1.0, standing.next_test)
        standing = judge(standing, summary, speed, LIMITS, now)
    return standing


def test_one_bad_test_changes_nothing_two_quarantine():
    assert run([SLOW]).state == "admitted"
    assert run([SLOW, GOOD, SLOW, GOOD, SLOW]).state == "admitted"
    quarantined = run([SLOW] * FAILS)
    assert quarantined.state == "quarantined"
    assert quarantined.reason == "rtt 750 ms, allowed 500"


def test_it_comes_back_after_some_good_tests_with_room_to_spare():
    bad = run([SLOW] * FAILS)
    assert run([GOOD] * (PASSES - 1), bad).state == "quarantined"
    assert run([GOOD] * PASSES, bad).state == "admitted"
    assert run([BORDER] * 20, bad).state == "quarantined"
    assert run([BORDER] * 20).state == "admitted"


def test_what_is_dreadful_for_long_is_rejected_and_works_its_way_back():
    rejected = run([DREADFUL] * (FAILS + WORSE))
    assert rejected.state == "rejected"
    assert run([SLOW] * (FAILS + 3 * WORSE)).state == "quarantined"
    assert run([GOOD], rejected).state == "quarantined"
    assert run([GOOD] * PASSES, rejected).state == "admitted"


def test_each_threshold_counts_and_what_is_unknown_fails_none():
    for bad, word in (
        (LinkSummary(jitter=1.0), "jitter"),
        (LinkSummary(loss=0.5), "loss 50 %"),
        (LinkSummary(upload=1e3), "upload 0.008 Mbit/s"),
        (LinkSummary(download=1e3), "download"),
    ):
        standing = run([bad] * FAILS)
        assert standing.state == "quarantined" and word in standing.reason
    assert "speed" in run([GOOD] * FAILS, speed=0.1).reason
    assert run([LinkSummary()] * 10, speed=None).state == "admitted"


def test_a_first_failure_is_looked_into_soon():
    assert run([GOOD]).interval == RETEST
    assert run([GOOD, SLOW]).interval < RETEST


def test_what_cannot_be_measured_is_tried_ever_more_seldom():
    standing, up, tries = Standing(next_test=1e9), 0.0, 0
    while up < 600:
        up += next_look(standing, up=up, soon=5.0, now=0.0)
        tries += 1
    assert 10 < tries < 25


def test_a_peer_in_quarantine_waits_for_its_test():
    standing = run([SLOW] * FAILS)
    assert standing.state == "quarantined"
    now = standing.next_test - 9.0
    assert next_look(standing, up=100.0, soon=5.0, now=now) == 9.0


def test_tests_of_a_hopeless_peer_become_seldom_and_of_a_recovering_one_frequent():
    standing = run([SLOW] * 20)
    waits = []
    now = standing.next_test
    for summary in (SLOW, GOOD, GOOD):
        standing = judge(standing, summary, None, LIMITS, now)
        waits.append(standing.next_test - now)
        now = standing.next_test
    assert waits[0] == LONGEST_RETEST
    assert standing.passes == 2 and waits[2] <= 10.0


@given(st.lists(st.sampled_from([GOOD, SLOW, DREADFUL, BORDER, LinkSummary()]), max_size=60))
def test_states_are_neighbours_and_the_next_test_lies_ahead(tests):
    order = ["admitted", "quarantined", "rejected"]
    standing = Standing()
    now = 0.0
    for summary in tests:
        before = standing
        standing = judge(standing, summary, 20.0, LIMITS, now)
        assert abs(order.index(before.state) - order.index(standing.state)) <= 1
        assert now < standing.next_test <= now + LONGEST_RETEST
        assert standing.state == "admitted" or standing.reason
        now = standing.next_test
