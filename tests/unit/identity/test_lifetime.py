"""A certificate's end is spoken of in time, and not over and over."""

from __future__ import annotations

from mesh.identity.lifetime import DAY, EndNotices


def test_each_mark_once() -> None:
    notices = EndNotices(30 * DAY)
    told = [hour / 24 for hour in range(31 * 24 + 1) if notices.due(hour / 24 * DAY) is not None]
    assert told == [23.0, 29.0, 29 + 23 / 24, 30.0]


def test_after_a_long_sleep_there_is_one_notice_and_it_says_what_is_left() -> None:
    notices = EndNotices(30 * DAY)
    assert notices.due(0) is None
    assert notices.due(29.5 * DAY) == DAY / 2
    assert notices.due(29.6 * DAY) is None
    assert notices.due(31 * DAY) == -DAY
    assert notices.due(32 * DAY) is None


def test_a_short_life_is_spoken_of_at_once() -> None:
    notices = EndNotices(DAY / 2)
    assert notices.due(0) == DAY / 2
