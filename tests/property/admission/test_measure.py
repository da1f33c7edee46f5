"""Aggregates of what was measured on a path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.admission.measure import (
    LEAST_TRANSFER,
    STALE_BANDWIDTH,
    STALE_PATH,
    LinkMeasure,
    LinkSummary,
)

MB = 1 << 20


def test_nothing_is_known_at_first_and_again_after_a_long_time():
    assert LinkMeasure().summary(0.0) == LinkSummary()
    known = LinkMeasure().answered(0.02, 1.0).uploaded(MB, 0.5, 1.0).downloaded(MB, 1.0, 1.0)
    summary = known.summary(2.0)
    assert summary.rtt == 0.02 and summary.upload == 2 * MB and summary.download == MB
    later = known.summary(STALE_PATH + 2.0)
    assert later.rtt is None and later.upload == 2 * MB
    assert known.summary(STALE_BANDWIDTH + 2.0) == LinkSummary()


def test_jitter_follows_the_changes_of_round_trips_and_not_their_size():
    steady, unsteady = LinkMeasure(), LinkMeasure()
    for second in range(200):
        steady = steady.answered(0.1, float(second))
        unsteady = unsteady.answered(0.01 + 0.04 * (second % 2), float(second))
    assert steady.summary(200.0).jitter == pytest.approx(0.0)
    assert unsteady.summary(200.0).jitter == pytest.approx(0.04, rel=0.05)


def test_pings_of_a_link_move_the_round_trip_and_leave_the_rest_to_probes():
    first = LinkMeasure().pinged(0.02, 1.0)
    assert first.summary(1.0).rtt == 0.02
    probed = first.answered(0.04, 2.0).unanswered(3.0)
    measure = probed
    for second in range(4, 80):
        measure = measure.pinged(0.1, float(second))
    after = measure.summary(80.0)
    assert after.rtt == pytest.approx(0.1, rel=0.01)
    assert (after.jitter, after.loss) == (probed.jitter, probed.loss)
    assert measure.summary(79.0 + STALE_PATH).rtt is not None  # and it is as fresh as a probe
    late = measure.pinged(0.5, 80.0 + STALE_PATH)
    assert late.summary(81.0 + STALE_PATH).rtt == 0.5  # what was known has nothing to do with it


def test_loss_comes_from_the_transports_packets_and_from_silence():
    measure = LinkMeasure()
    for step in range(1, 40):
        measure = measure.counted(step * 1000, step * 50, float(step))
    assert measure.summary(40.0).loss == pytest.approx(0.05, rel=0.05)
    fresh = measure.counted(10, 0, 41.0)  # another connection
    assert fresh.packets == (10, 0)
    silent = LinkMeasure()
    for step in range(30):
        silent = silent.unanswered(float(step))
    assert silent.summary(30.0).loss > 0.9
    for step in range(30, 80):
        silent = silent.answered(0.01, float(step))
    assert silent.summary(80.0).loss < 0.01


def test_small_transfers_are_no_measurement_of_bandwidth():
    assert LinkMeasure().uploaded(LEAST_TRANSFER - 1, 0.001, 0.0) == LinkMeasure()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["answered", "unanswered", "counted", "up", "down"]),
            st.floats(1e-4, 2.0),
            st.integers(0, 5000),
        ),
        max_size=60,
    )
)
def test_whatever_comes_the_summary_is_sensible(events):
    measure = LinkMeasure()
    now = sent = lost = 0
    for kind, value, count in events:
        now += 1
        match kind:
            case "answered":
                measure = measure.answered(value, now)
            case "unanswered":
                measure = measure.unanswered(now)
            case "counted":
                sent, lost = sent + count, lost + int(count * min(1.0, value))
                measure = measure.counted(sent, lost, now)
            case "up":
                measure = measure.uploaded(count << 10, value, now)
            case _:
                measure = measure.downloaded(count << 10, value, now)
    summary = measure.summary(now)
    assert summary.loss is None or 0.0 <= summary.loss <= 1.0
    assert summary.rtt is None or 0.0 < summary.rtt <= 2.0
    assert summary.jitter is None or summary.jitter >= 0.0
    assert summary.upload is None or summary.upload > 0.0
