"""The measurement of a link."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from mesh.transport import LinkClosed, Message, measure_link


def test_figures_of_a_link(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            link = await a.connect(b.addresses[0])
            seen: list[float] = []
            figures = await measure_link(
                link, megabytes=4, round_trips=20, progress=lambda done, what: seen.append(done)
            )
            assert [trip.bytes for trip in figures.round_trips] == [1024, 10_240]
            assert all(0 < t.median_ms <= t.p99_ms for t in figures.round_trips)
            assert figures.up_mb_s > 0.5
            assert figures.down_mb_s > 0.5
            assert figures.path == "direct"
            assert figures.loss is not None and figures.loss < 0.2
            assert seen == sorted(seen)
            assert seen[-1] == 1.0
            json.dumps(figures.as_json())

    trio.run(main)


def test_a_peer_that_goes_away_meanwhile_is_one_error(network: Any) -> None:
    """Pieces are on their way at once: all break, and callers handle one LinkClosed."""

    class Breaks:
        def __init__(self, link: Any) -> None:
            self.peer, self.path, self.carrier, self.link = link.peer, link.path, link.carrier, link

        async def request(self, kind: str, *arguments: Any, **options: Any) -> Message:
            if kind == "transport.sink":
                with trio.CancelScope(shield=True):
                    await trio.sleep(0.05)
                self.link.down("the lid was closed")
            answer: Message = await self.link.request(kind, *arguments, **options)
            return answer

    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            link: Any = Breaks(await a.connect(b.addresses[0]))
            with pytest.raises(LinkClosed):
                await measure_link(link, round_trips=1)

    trio.run(main)
