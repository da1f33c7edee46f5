"""Peers are dialled again when there is reason to, and some are never given up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import trio
import trio.testing

from mesh.identity import PeerId
from mesh.transport.contacts import Contacts
from mesh.transport.errors import DialError
from mesh.transport.keeper import Keeper

ME, PEER = (PeerId(f"12D3KooW{letter * 44}") for letter in "MP")
DAY = 86_400.0


def at(port: int) -> str:
    return f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{PEER}"


class DeadEnds:
    """Links that never come up: a dial takes a while and fails."""

    def __init__(self) -> None:
        self.up: dict[PeerId, Any] = {}
        self.dials: list[tuple[float, tuple[str, ...]]] = []
        self.seconds = 1.0

    async def link_to(self, peer: PeerId, addresses: Sequence[str], **_: Any) -> Any:
        self.dials.append((trio.current_time(), tuple(addresses)))
        await trio.sleep(self.seconds)
        raise DialError("nobody answers")

    async def until(self, *, dialling: bool) -> None:
        while (trio.current_time() < self.dials[-1][0] + self.seconds) != dialling:  # noqa: ASYNC110
            await trio.sleep(0.5)  # on a clock that does not wait

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[Any]]:
        async def none() -> AsyncIterator[Any]:
            await trio.sleep_forever()
            yield

        yield none()


def run(main: Callable[[Keeper, DeadEnds, Contacts], Awaitable[None]]) -> None:
    async def outer() -> None:
        links, contacts = DeadEnds(), Contacts(None)
        links_: Any = links
        keeper = Keeper(ME, links_, contacts, keep_all=False, rng=Random(1))
        async with trio.open_nursery() as nursery:
            await nursery.start(keeper.run)
            await main(keeper, links, contacts)
            nursery.cancel_scope.cancel()

    trio.run(outer, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_is_heard_during_a_dial_is_tried_right_after_it() -> None:
    async def main(keeper: Keeper, links: DeadEnds, contacts: Contacts) -> None:
        keeper.keep(PEER, [at(1)])
        await trio.sleep(600)  # its waits are long by now
        await links.until(dialling=True)
        for tell in (lambda: keeper.keep(PEER, [at(2)]), keeper.hurry):
            known = len(links.dials)
            tell()
            await trio.sleep(links.seconds + 0.1)
            assert len(links.dials) == known + 1
        assert set(links.dials[-1][1]) == {at(1), at(2)}

    run(main)


def test_a_new_hint_is_tried_at_once_and_one_that_is_known_is_not() -> None:
    async def main(keeper: Keeper, links: DeadEnds, contacts: Contacts) -> None:
        keeper.suggest(PEER, [at(1)])
        await trio.sleep(600)
        await links.until(dialling=False)
        known = len(links.dials)
        keeper.suggest(PEER, [at(1)])
        await trio.sleep(0.1)
        assert len(links.dials) == known
        keeper.suggest(PEER, [at(2)])
        await trio.sleep(0.1)
        assert links.dials[-1][1] == (at(2),)

    run(main)


def test_a_peer_of_the_configuration_is_dialled_however_long_it_is_away() -> None:
    async def main(keeper: Keeper, links: DeadEnds, contacts: Contacts) -> None:
        links.up[ME] = "somebody"
        links.seconds = 600.0
        keeper.keep(PEER, [at(1)])
        await trio.sleep(8 * DAY)
        assert PEER not in contacts.all()
        keeper.keep_address(at(1))
        await trio.sleep(8 * DAY)
        assert links.dials[-1][0] > trio.current_time() - 2 * links.seconds

    run(main)


def test_who_has_no_link_at_all_forgets_nobody() -> None:
    async def main(keeper: Keeper, links: DeadEnds, contacts: Contacts) -> None:
        links.seconds = 600.0
        keeper.keep(PEER, [at(1)])
        await trio.sleep(8 * DAY)
        assert links.dials[-1][0] > trio.current_time() - 2 * links.seconds

    run(main)
