"""The measurement of a link."""

from __future__ import annotations

import json
from typing import Any

import trio

from mesh.transport import measure_link


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
