"""A chain over the network gives the tokens and the text of the uncut model."""

from __future__ import annotations

import random

import pytest
import trio


@pytest.mark.slow
def test_sixteen_sessions_joining_and_leaving(open_mesh, requests, read_all, uncut) -> None:
    # Half of them take the most likely token, half draw.
    wanted = [*requests(16, 32, seeded=False)[:8], *requests(16, 32, seeded=True)[8:]]
    expected = uncut(wanted)

    async def main() -> None:
        async with open_mesh() as mesh:
            chain = await mesh.chain((3, 9, 16, 27))
            got = {}
            rng = random.Random(5)

            async def client(number: int) -> None:
                await trio.sleep(rng.random() * 2)
                got[number] = await read_all(chain, wanted[number])

            async def leaver(number: int) -> None:
                """Goes away in the middle."""
                await trio.sleep(rng.random() * 2)
                with trio.move_on_after(0.5):
                    await read_all(chain, wanted[number])

            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(client, number)
                for number in range(3):
                    nursery.start_soon(leaver, number)
            assert [got[number] for number in range(16)] == expected
            await mesh.empty()

    trio.run(main)


def test_alone_with_what_a_client_sees(open_mesh, requests, read_all, uncut) -> None:
    wanted = requests(2, 40, seeded=True)
    expected = uncut(wanted)

    async def main() -> None:
        async with open_mesh() as mesh:
            chain = await mesh.chain((13,))
            for request, answer in zip(wanted, expected, strict=True):
                run = chain.run()
                assert await read_all(run, request) == answer
                assert [s.tokens for s in run.shares()] == [(0, 40), (0, 40)]
                assert all(seconds > 0 for _, seconds in run.seconds)

    trio.run(main)
