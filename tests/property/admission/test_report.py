"""What adverts tell of links: little, steady, and first of all what is wrong."""

from __future__ import annotations

from mesh.admission.measure import LinkSummary
from mesh.admission.report import is_news, rows
from mesh.gossip.advert import MAX_LINKS
from mesh.gossip.anti_entropy import key_of


def summary(rtt):
    return LinkSummary(rtt, 0.001, 0.0, 5e6, 4e6)


def test_the_nearest_and_those_that_were_found_wanting_are_told():
    seen = {f"P{i:02}": (summary(0.001 * (i + 1)), "admitted") for i in range(40)}
    seen["P39"] = (summary(0.9), "quarantined")
    told = rows(seen, ())
    assert len(told) == MAX_LINKS
    assert told[0].key == key_of("P39") and told[0].state == 1
    assert {row.key for row in told[1:]} == {key_of(f"P{i:02}") for i in range(MAX_LINKS - 1)}


def test_noise_changes_nothing_and_a_real_change_does():
    told = rows({"P": (summary(0.020), "admitted")}, ())
    assert (told[0].rtt, told[0].upload, told[0].download) == (200, 5000, 4000)
    for rtt in (0.0215, 0.018, 0.024):
        assert rows({"P": (summary(rtt), "admitted")}, told) == told
    assert rows({"P": (summary(0.030), "admitted")}, told)[0].rtt == 300
    assert rows({"P": (summary(0.020), "rejected")}, told)[0].state == 2


def test_what_is_not_known_is_not_told():
    row = rows({"P": (LinkSummary(), "admitted")}, ())[0]
    assert (row.rtt, row.loss, row.upload) == (None, None, None)


def test_news_is_what_would_change_the_row():
    told = rows({"P": (summary(0.020), "admitted")}, ())
    assert not is_news("P", summary(0.024), "admitted", told)
    assert is_news("P", summary(0.030), "admitted", told)
    assert is_news("P", summary(0.020), "quarantined", told)
    assert not is_news("Q", summary(0.030), "admitted", told)  # nothing was told of it yet
