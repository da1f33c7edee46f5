"""Every frame arrives once, in order, whatever the path does to datagrams."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trio

from mesh.transport import (
    Lane,
    LinkClosed,
    LinkUp,
    LivenessPolicy,
    Message,
    Request,
    Transport,
    TransportConfig,
)

FRAMES = 300


async def deliver(client: Transport, server: Transport, count: int = FRAMES) -> None:
    """One-way frames up, a stream down and requests, all at once; each checked byte for byte."""
    link = client.links[server.peer_id]
    back = server.links[client.peer_id]

    async def numbers(request: Request) -> AsyncGenerator[Message, None]:
        for number in range(request.message.body):
            yield Message(number, number.to_bytes(4, "big") * 500)

    async def digest(request: Request) -> Message:
        return Message(hashlib.sha256(request.message.payload).digest())

    if "numbers" not in server._services.streams:
        server.serve_stream("numbers", numbers)
        server.serve("digest", digest)

    async def up() -> None:
        for number in range(count):
            await link.send("up", number, number.to_bytes(4, "big") * 500)

    async def received() -> None:
        async with back.subscribe("up") as notes:
            for number in range(count):
                note = await anext(notes)
                assert note.body == number
                assert note.payload == number.to_bytes(4, "big") * 500

    async def down() -> None:
        async with link.stream("numbers", count) as call:
            assert [m.body async for m in call] == list(range(count))

    async def ask() -> None:
        for _ in range(10):
            payload = os.urandom(200_000)
            answer = await link.request("digest", None, payload, lane=Lane.BULK, timeout=60)
            assert answer.body == hashlib.sha256(payload).digest()

    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:
            for job in (up, received, down, ask):
                nursery.start_soon(job)
    assert link.is_up


@pytest.mark.parametrize(
    "faults",
    [
        "--delay 25",
        "--delay 10 --jitter 15",
        "--delay 5 --loss 1",
        "--delay 5 --loss 5",
        "--delay 5 --reorder 10",
        "--delay 5 --duplicate 10",
        "--delay 5 --jitter 5 --loss 2 --reorder 5 --duplicate 5",
        "--delay 2 --mtu 1300",
    ],
)
def test_every_frame_arrives_once(pairs: Any, faults: str) -> None:
    async def main() -> None:
        async with pairs.linked(faults) as (client, server, _):
            await deliver(client, server)

    trio.run(main)


def test_changed_port_is_followed(pairs: Any) -> None:
    """A NAT that restarts gives the client another port in the middle of everything."""

    async def main() -> None:
        async with pairs.linked("--delay 5") as (client, server, path):
            link = client.links[server.peer_id]
            await deliver(client, server, 50)
            before = server.links[client.peer_id].carrier.connection.get_remote_address()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver, client, server)
                await trio.sleep(0.05)
                path.tell("rebind")
            await deliver(client, server, 50)
            after = server.links[client.peer_id].carrier.connection.get_remote_address()
            assert before != after
            assert link.is_up

    trio.run(main)


def test_four_seconds_of_nothing_are_survived(pairs: Any) -> None:
    async def main() -> None:
        async with pairs.linked("--delay 5") as (client, server, path):
            link = client.links[server.peer_id]
            await deliver(client, server, 20)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(deliver, client, server)
                await trio.sleep(0.1)
                path.tell("hole 4")
                began = trio.current_time()
            took = trio.current_time() - began
            assert took >= 3.5  # the hole was really in the way
            assert took < 12
            assert link.is_up
            assert client.links[server.peer_id] is link

    trio.run(main)


def test_an_idle_peer_that_vanishes_costs_the_others_nothing(pairs: Any) -> None:
    """A lid is closed: nothing says so, and pings are not answered."""

    async def main() -> None:
        liveness = LivenessPolicy(idle_ping=0.3)
        config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",), liveness=liveness)
        async with pairs.linked("--delay 1", config) as (client, server, path):
            link = client.links[server.peer_id]
            path.tell("hole 3")
            used, began = time.process_time(), trio.current_time()
            await trio.sleep(2)
            assert trio.current_time() - began < 10
            assert time.process_time() - used < 1
            await deliver(client, server, 20)
            assert client.links[server.peer_id] is link

    trio.run(main)


def test_path_that_stays_dead_is_given_up_and_dialled_again(pairs: Any) -> None:
    async def main() -> None:
        async with pairs.linked("--delay 1") as (client, server, path):
            link = client.links[server.peer_id]
            client.keep(server.peer_id, [path.address])

            async def never(request: Request) -> Message:
                await trio.sleep_forever()
                raise AssertionError

            server.serve("never", never)
            async with client.events() as events, trio.open_nursery() as nursery:

                async def ask() -> None:
                    with pytest.raises(Exception, match=r"no sign of life|lost|closed"):
                        await link.request("never", timeout=60)

                nursery.start_soon(ask)
                await trio.sleep(0.1)
                path.tell("hole 12")
                with trio.fail_after(30):
                    await link.wait_down()
                    while not isinstance(await anext(events), LinkUp):
                        pass

    trio.run(main)


@pytest.mark.slow
def test_datagrams_grow_to_what_the_path_takes(pairs: Any) -> None:
    async def main() -> None:
        async with pairs.linked("--delay 1 --mtu 4000") as (client, server, _):
            await deliver(client, server, 20)
            await trio.sleep(0.5)
            engine = client.links[server.peer_id].carrier.connection.engine
            assert engine.mtu.size == 1200  # the loopback's large size does not fit this path

        async with pairs.linked("--delay 1") as (client, server, _):
            await deliver(client, server, 20)
            engine = client.links[server.peer_id].carrier.connection.engine
            assert engine.mtu.size > 10_000

    trio.run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of refused datagrams")
def test_killed_peer_is_noticed_long_before_its_silence_is(pairs: Any) -> None:
    async def main(node: subprocess.Popen[str]) -> None:
        assert node.stdout is not None
        hello = json.loads(node.stdout.readline())
        async with pairs.member("nat", "nat test", "client") as client:
            link = await client.connect(hello["addresses"][0])
            async with link.stream("transport.source", 1 << 30) as call:
                await anext(call)
                node.kill()
                began = trio.current_time()
                with trio.fail_after(8), pytest.raises(LinkClosed):
                    async for _ in call:
                        pass
                assert trio.current_time() - began < 5

    node = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nat_node.py")), "victim", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        trio.run(main, node)
    finally:
        node.kill()
        node.wait()
