"""A node that works for us and falls silent is asked for a sign of life before it is given up."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from inference.errors import GenerationError
from mesh.forward.liveness import SILENCE_SECONDS, SLICE_SECONDS
from mesh.forward.remote import next_message


class SilentLink:
    """Nothing comes but the pongs to what it is asked, ``late`` seconds after each."""

    peer = "silent"

    def __init__(self, late: float | None) -> None:
        self.late = late
        self.heard = trio.current_time()
        self.asked: list[float] = []

    @property
    def silent_for(self) -> float:
        now = trio.current_time()
        if self.late is not None:
            self.heard = max(
                [self.heard, *(t + self.late for t in self.asked if t + self.late < now)]
            )
        return now - self.heard

    def prod(self) -> None:
        self.asked.append(trio.current_time())


class Nothing:
    """A call whose answer does not come."""

    def __aiter__(self) -> Nothing:
        return self

    async def __anext__(self) -> Any:
        await trio.sleep_forever()


def wait(late: float | None) -> tuple[SilentLink, float | None]:
    """The link, and after how many seconds it was given up, if within ten."""

    async def main() -> tuple[SilentLink, float | None]:
        link: Any = SilentLink(late)
        began = trio.current_time()
        with trio.move_on_after(10.0):
            with pytest.raises(GenerationError) as caught:
                await next_message(link, Nothing())
            assert caught.value.code == "node_lost"
            return link, trio.current_time() - began
        return link, None

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_silence_is_asked_about_once_and_ends_it() -> None:
    link, after = wait(None)
    assert after == pytest.approx(SILENCE_SECONDS)
    assert link.asked == [pytest.approx(link.heard + SLICE_SECONDS)]


def test_who_answers_is_asked_again_and_never_given_up() -> None:
    link, after = wait(0.05)
    assert after is None
    assert len(link.asked) > 10
