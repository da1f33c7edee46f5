"""What was taken back before it came is not opened, and nothing else is kept out."""

from __future__ import annotations

from mesh.identity import PeerId
from mesh.relay.closings import MAX_MARKS, Closings
from mesh.relay.messages import Close, Open, OpenSession

HEAD, OTHER = (PeerId(name * 52) for name in "ho")
CHAIN, ANOTHER = b"1" * 16, b"2" * 16


def left(
    closings: Closings, *sessions: int, epoch: int = 1, chain: bytes = CHAIN, head: PeerId = HEAD
) -> list[int]:
    """Which sessions are opened. Their histories go with them."""
    message = Open.model_validate(
        {
            "chain": chain, "epoch": epoch, "previous": HEAD, "next": OTHER, "model": "m" * 64,
            "first": 4, "last": 8, "layers": 12, "rank": 1, "stages": 3, "activations": "f16",
            "sessions": [OpenSession(session=n, capacity=8, prompt=5) for n in sessions],
        }
    )  # fmt: skip
    found, histories = closings.sift(head, message, [[n] for n in sessions])
    numbers = [session.session for session in found.sessions]
    assert histories == [[n] for n in numbers]
    return numbers


def test_a_session_that_was_closed_before_it_came_is_not_opened() -> None:
    closings = Closings()
    closings.add(HEAD, Close(chain=CHAIN, epoch=3, sessions=(1, 2, 5)), {5})
    assert left(closings, 1, 2, 3) == [3]
    assert left(closings, 1, epoch=9) == []
    # It was here: a replaced node may get it again.
    assert left(closings, 5) == [5]
    # A session of another chain, or of another head, is another one.
    assert left(closings, 1, chain=ANOTHER) == [1]
    assert left(closings, 1, head=OTHER) == [1]


def test_a_chain_that_was_closed_may_come_back_at_a_later_epoch() -> None:
    closings = Closings()
    closings.add(HEAD, Close(chain=CHAIN, epoch=3), {1})
    closings.add(HEAD, Close(chain=CHAIN, epoch=2), ())
    assert left(closings, 1, 2, epoch=3) == []
    assert left(closings, 1, 2, epoch=4) == [1, 2]
    assert left(closings, 1, chain=ANOTHER) == [1]


def test_what_a_head_can_have_remembered_is_bounded() -> None:
    closings = Closings()
    closings.add(OTHER, Close(chain=CHAIN, epoch=1, sessions=(1,)), ())
    for number in range(1, MAX_MARKS + 3):
        closings.add(HEAD, Close(chain=CHAIN, epoch=1, sessions=(number,)), ())
    assert left(closings, 1, 2, 3, MAX_MARKS + 2) == [1, 2]
    assert left(closings, 1, head=OTHER) == []  # one head pushes out nothing of another's


def test_marks_go_with_the_link() -> None:
    closings = Closings()
    closings.add(HEAD, Close(chain=CHAIN, epoch=1, sessions=(1,)), ())
    closings.forget(HEAD)
    assert left(closings, 1) == [1]
