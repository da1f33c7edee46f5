"""Through a relay when there is no other way, and off it as soon as there is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.lowlevel

from mesh.transport import DialError, LinkMoved, LinkUp, Message, NotAdmitted, Request
from mesh.transport.reach import Reachability

NOWHERE = "/ip4/127.0.0.1/udp/9/quic-v1/p2p/"


async def echo(request: Request) -> Message:
    return request.message


async def numbers(request: Request) -> AsyncGenerator[Message, None]:
    for number in range(request.message.body):
        yield Message(number, bytes(2000))


@pytest.fixture
def no_punching(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stay(self: Any, link: Any) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Reachability, "_leave_relay", stay)


@pytest.mark.usefixtures("no_punching")
def test_link_through_a_relay(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("r") as r:
            await a.connect(r.addresses[0])
            await b.connect(r.addresses[0])
            b.serve("echo", echo)
            b.serve_stream("numbers", numbers)
            link = await a.link_to(b.peer_id, [NOWHERE + b.peer_id], timeout=20)
            assert link.path == "relayed"
            assert link.certificate.name == "b"
            answer = await link.request("echo", 5, bytes(1_000_000))
            assert (answer.body, len(answer.payload)) == (5, 1_000_000)
            async with link.stream("numbers", 500) as call:
                assert [m.body async for m in call] == list(range(500))

    trio.run(main)


@pytest.mark.usefixtures("no_punching")
def test_relay_named_by_the_address(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("r") as r:
            await b.connect(r.addresses[0])
            link = await a.connect(f"{r.addresses[0]}/p2p-circuit/p2p/{b.peer_id}")
            assert link.path == "relayed"
            assert set(a.links) == {b.peer_id, r.peer_id}

    trio.run(main)


@pytest.mark.usefixtures("no_punching")
def test_relay_without_the_peer_says_so(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("r") as r:
            await a.connect(r.addresses[0])
            stranger = network.identity("nobody").peer_id
            with pytest.raises(DialError):
                await a.link_to(stranger, [NOWHERE + stranger], timeout=8)

    trio.run(main)


@pytest.mark.usefixtures("no_punching")
def test_relayed_peer_must_be_admitted_by_the_other_end(network: Any) -> None:
    """The relay admits both; the end that does not trust the other refuses it through the relay."""

    async def main() -> None:
        trust = network.trust("b")
        verify = trust.verify_peer
        banned: set[str] = set()

        def verify_peer(chain: Any, peer: str, now: float) -> Any:
            return verify(None if peer in banned else chain, peer, now)

        trust.verify_peer = verify_peer
        async with (
            network.open("a") as a,
            network.open("b", trust=trust) as b,
            network.open("r") as r,
        ):
            banned.add(a.peer_id)
            await a.connect(r.addresses[0])
            await b.connect(r.addresses[0])
            with pytest.raises((DialError, NotAdmitted)):
                await a.link_to(b.peer_id, [NOWHERE + b.peer_id], timeout=8)
            assert a.peer_id not in b.links
            assert len(b._host.get_network().connections) == 1

    trio.run(main)


def test_relayed_link_moves_to_a_direct_path_without_losing_a_frame(network: Any) -> None:
    async def main() -> None:
        async with (
            network.open("a") as a,
            network.open("b") as b,
            network.open("r") as r,
            b.events() as at_b,
        ):
            await a.connect(r.addresses[0])
            await b.connect(r.addresses[0])
            b.serve("echo", echo)
            b.serve_stream("numbers", numbers)
            async with a.events() as at_a:
                link = await a.link_to(b.peer_id, [NOWHERE + b.peer_id], timeout=20)
                assert link.path == "relayed"
                async for event in at_b:
                    if isinstance(event, LinkUp) and event.link.peer == a.peer_id:
                        back = event.link
                        break

                async def up() -> None:
                    for number in range(2000):
                        await link.send("up", number, bytes(500))
                        if number % 20 == 0:
                            await trio.sleep(0.005)

                async def received() -> None:
                    async with back.subscribe("up") as notes:
                        for number in range(2000):
                            assert (await anext(notes)).body == number

                async def down() -> None:
                    async with link.stream("numbers", 2000) as call:
                        assert [m.body async for m in call] == list(range(2000))

                with trio.fail_after(30):
                    async with trio.open_nursery() as nursery:
                        for job in (up, received, down):
                            nursery.start_soon(job)
                    async for event in at_a:
                        if isinstance(event, LinkMoved):
                            break
                assert link.is_up
                assert a.links[b.peer_id] is link
                assert link.path == back.path == "punched"
                assert (await link.request("echo", 7)).body == 7
                await trio.sleep(0.5)
                assert len(a._host.get_network().connections) == 2
                assert all(len(c) == 1 for c in a._host.get_network().connections.values())

    trio.run(main)


def test_peers_say_how_they_see_us_and_dial_back(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            await a.connect(b.addresses[0])
            await trio.sleep(0.3)
            port = int(a.addresses[0].split("/")[4])
            assert ("127.0.0.1", port) in a._observed.candidates
            answer = await a.links[b.peer_id].request(
                "transport.dial_back", {"host": "127.0.0.1", "port": port}
            )
            assert answer.body is True
            answer = await a.links[b.peer_id].request(
                "transport.dial_back", {"host": "127.0.0.1", "port": 9}
            )
            assert answer.body is False
            assert set(a.links) == {b.peer_id}

    trio.run(main)
