"""Two and three transports over loopback QUIC: calls, streams, one-way messages, events."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio

from mesh.transport import (
    DeadlineExceeded,
    DialError,
    Lane,
    LinkClosed,
    LinkDown,
    LinkUp,
    Message,
    RemoteError,
    Request,
)


async def echo(request: Request) -> Message:
    return request.message


def test_request_and_answer(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            b.serve("echo", echo)
            link = await a.connect(b.addresses[0])
            for size in (0, 1, 10_240, 1 << 20, 20 << 20):
                payload = os.urandom(size)
                answer = await link.request("echo", {"size": size}, payload, lane=Lane.BULK)
                assert answer.body == {"size": size}
                assert answer.payload == payload
            assert link.path == "direct"
            assert link.rtt is not None and link.rtt < 1
            assert link.certificate.name == "b"

    trio.run(main)


def test_handler_sees_who_asks(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:

            async def who(request: Request) -> Message:
                return Message([request.peer, request.certificate.name])

            b.serve("who", who)
            link = await a.connect(b.addresses[0])
            assert (await link.request("who")).body == [a.peer_id, "a"]

    trio.run(main)


def test_both_sides_ask_over_one_link(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, b.events() as events:
            a.serve("echo", echo)
            b.serve("echo", echo)
            there = await a.connect(b.addresses[0])
            up = await anext(events)
            assert isinstance(up, LinkUp)
            back = up.link
            assert back.peer == a.peer_id
            assert (await there.request("echo", 1)).body == 1
            assert (await back.request("echo", 2)).body == 2

    trio.run(main)


def test_errors_travel(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:

            async def refuse(request: Request) -> Message:
                raise RemoteError("full", "no room", {"slots": 0})

            async def crash(request: Request) -> Message:
                raise KeyError("secret detail")

            b.serve("refuse", refuse)
            b.serve("crash", crash)
            link = await a.connect(b.addresses[0])
            with pytest.raises(RemoteError) as refused:
                await link.request("refuse")
            assert (refused.value.code, refused.value.message) == ("full", "no room")
            assert refused.value.data == {"slots": 0}
            with pytest.raises(RemoteError) as crashed:
                await link.request("crash")
            assert crashed.value.code == "internal"
            assert "secret" not in str(crashed.value)
            with pytest.raises(RemoteError) as unknown:
                await link.request("nothing")
            assert unknown.value.code == "unknown_kind"

    trio.run(main)


def test_stream_is_held_back_by_its_reader(network: Any) -> None:
    async def main() -> None:
        made = 0
        async with network.open("a") as a, network.open("b") as b:

            async def count(request: Request) -> AsyncGenerator[Message, None]:
                nonlocal made
                for number in range(100):
                    made += 1
                    yield Message(number, bytes(65_536))

            b.serve_stream("count", count)
            link = await a.connect(b.addresses[0])
            async with link.stream("count") as call:
                assert (await anext(call)).body == 0
                await trio.sleep(0.3)
                assert made < 20  # about a window of 512 KiB
                rest = [message.body async for message in call]
            assert rest == list(range(1, 100))

    trio.run(main)


def test_leaving_a_stream_cancels_its_handler(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            stopped = trio.Event()

            async def forever(request: Request) -> AsyncGenerator[Message, None]:
                try:
                    while True:
                        yield Message("tick")
                        await trio.sleep(0.01)
                finally:
                    stopped.set()

            b.serve_stream("forever", forever)
            link = await a.connect(b.addresses[0])
            async with link.stream("forever") as call:
                await anext(call)
            with trio.fail_after(2):
                await stopped.wait()

    trio.run(main)


def test_call_can_live_in_an_async_generator(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:

            async def three(request: Request) -> AsyncGenerator[Message, None]:
                for number in range(3):
                    yield Message(number)

            b.serve_stream("three", three)
            link = await a.connect(b.addresses[0])

            async def numbers() -> AsyncGenerator[int, None]:
                call = await link.open("three")
                try:
                    async for message in call:
                        yield message.body
                finally:
                    await call.aclose()

            assert [number async for number in numbers()] == [0, 1, 2]

    trio.run(main)


def test_late_answer_is_a_deadline_and_cancels(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            begun, cancelled = trio.Event(), trio.Event()

            async def slow(request: Request) -> Message:
                begun.set()
                try:
                    await trio.sleep_forever()
                finally:
                    cancelled.set()

            b.serve("slow", slow)
            link = await a.connect(b.addresses[0])
            # On a slow machine a call may be over before its handler has had a turn.
            for timeout in (0.2, 1.0, 5.0):
                with pytest.raises(DeadlineExceeded):
                    await link.request("slow", timeout=timeout)
                if begun.is_set():
                    break
            with trio.fail_after(2):
                await cancelled.wait()

    trio.run(main)


def test_one_way_messages_wait_for_their_reader(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, b.events() as events:
            link = await a.connect(b.addresses[0])
            up = await anext(events)
            assert isinstance(up, LinkUp)

            async def send() -> None:
                for number in range(200):
                    await link.send("rows", number, number.to_bytes(2, "big") * 10_000)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                await trio.sleep(0.2)
                async with up.link.subscribe("rows") as rows:
                    for number in range(200):
                        row = await anext(rows)
                        assert row.body == number
                        assert row.payload == number.to_bytes(2, "big") * 10_000

    trio.run(main)


def test_a_handler_gets_one_way_messages_those_before_it_included(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, b.events() as events:
            link = await a.connect(b.addresses[0])
            up = await anext(events)
            assert isinstance(up, LinkUp)
            got: list[Message] = []
            all_here = trio.Event()

            def take(message: Message) -> None:
                got.append(message)
                if len(got) == 200:
                    all_here.set()

            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    for number in range(200):  # more than the credit of a reader that is not there
                        await link.send("rows", number, number.to_bytes(2, "big") * 10_000)

                nursery.start_soon(send)
                await trio.sleep(0.2)
                assert not link.try_send("rows", "too early")
                with up.link.handle("rows", take):
                    with pytest.raises(ValueError, match="already"):
                        async with up.link.subscribe("rows"):
                            pass
                    await all_here.wait()
            assert [message.body for message in got] == list(range(200))
            assert all(m.payload == m.body.to_bytes(2, "big") * 10_000 for m in got)
            assert link.try_send("rows", "later")
            async with up.link.subscribe("rows") as rows:  # nobody handles them any more
                assert (await anext(rows)).body == "later"

    trio.run(main)


def test_link_down_reaches_everybody_who_waits(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, a.events() as events:
            async with network.open("b") as b:

                async def never(request: Request) -> Message:
                    await trio.sleep_forever()
                    raise AssertionError

                b.serve("never", never)
                link = await a.connect(b.addresses[0])
                assert isinstance(await anext(events), LinkUp)
                errors: list[Exception] = []

                async def ask() -> None:
                    try:
                        await link.request("never")
                    except LinkClosed as error:
                        errors.append(error)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    await trio.sleep(0.1)
                    b._links.shut()
            with trio.fail_after(2):
                down = await anext(events)
            assert isinstance(down, LinkDown)
            assert down.peer == b.peer_id
            assert len(errors) == 1
            assert not link.is_up
            assert a.link(b.peer_id) is None

    trio.run(main)


def test_simultaneous_dials_leave_one_link(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            a.serve("echo", echo)
            b.serve("echo", echo)
            for _ in range(5):
                got: list[Any] = []

                async def dial(one: Any, other: Any, got: list[Any] = got) -> None:
                    got.append(await one.connect(other.addresses[0]))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(dial, a, b)
                    nursery.start_soon(dial, b, a)
                await trio.sleep(0.1)
                assert len(got) == 2
                ours, theirs = a.link(b.peer_id), b.link(a.peer_id)
                assert ours is not None and theirs is not None
                assert ours.link_id == theirs.link_id
                assert (await ours.request("echo", 1)).body == 1
                assert (await theirs.request("echo", 2)).body == 2
                for _ in range(40):  # the peers also dial back once, for a moment
                    counts = [len(t._quic.endpoint.connections) for t in (a, b)]
                    if counts == [1, 1]:
                        break
                    await trio.sleep(0.05)
                assert counts == [1, 1]
                ours.down("once more")
                await trio.sleep(0.2)

    trio.run(main)


def test_a_dial_that_is_not_answered_does_not_keep_the_peer_out(network: Any) -> None:
    """A node that was started again dials those who try to reach it where it was."""

    async def main() -> None:
        async with network.open("a") as one, network.open("b") as other:
            small, large = sorted((one, other), key=lambda node: str(node.peer_id))
            with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as silent:
                await silent.bind(("127.0.0.1", 0))
                port = silent.getsockname()[1]
                links: list[Any] = []

                async def dial_in_vain() -> None:
                    nowhere = f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{large.peer_id}"
                    links.append(await small.connect(nowhere))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(dial_in_vain)
                    await silent.recvfrom(2048)
                    with trio.fail_after(3):
                        links.append(await large.connect(small.addresses[0]))
            assert links[0].link_id == links[1].link_id

    trio.run(main)


def test_gossip_reaches_all_and_names_its_author(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("c") as c:
            await a.connect(b.addresses[0])
            await b.connect(c.addresses[0])
            refused = []

            def valid(author: str, data: bytes) -> bool:
                if data == b"bad":
                    refused.append(author)
                    return False
                return True

            async with (
                a.subscribe("news", valid) as at_a,
                b.subscribe("news", valid),
                c.subscribe("news", valid) as at_c,
            ):
                await trio.sleep(1.5)
                await a.publish("news", b"bad")
                await a.publish("news", b"hello")
                with trio.fail_after(5):
                    assert await anext(at_c) == (a.peer_id, b"hello")
                await c.publish("news", b"answer")
                with trio.fail_after(5):
                    assert await anext(at_a) == (c.peer_id, b"answer")
                assert set(refused) == {a.peer_id}

    trio.run(main)


def test_nobody_there(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            address = b.addresses[0]
            gone = address.replace(
                address.split("/")[4], "9"
            )  # the discard port, where nobody listens
            with pytest.raises(DialError):
                await a.connect(gone, timeout=0.5)

    trio.run(main)


def test_cancelled_sends_do_not_use_up_the_credit(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, b.events() as events:
            link = await a.connect(b.addresses[0])
            up = await anext(events)
            assert isinstance(up, LinkUp)
            large = bytes(4 << 20)
            for _ in range(30):
                with trio.move_on_after(0.001):
                    await link.send("rows", "large", large, lane=Lane.BULK)
            async with up.link.subscribe("rows") as rows:
                with trio.fail_after(20):
                    await link.send("rows", "last")
                    while (await anext(rows)).body != "last":
                        pass
            with trio.fail_after(10):
                ports = up.link._ports.values()
                while any(port._assembler.held for port in ports):  # noqa: ASYNC110
                    await trio.sleep(0.01)

    trio.run(main)


def test_a_node_that_stood_still_itself_reads_what_came_before_it_blames_the_peer(
    network: Any,
) -> None:
    address: list[str] = []
    begun, ready, over = threading.Event(), threading.Event(), threading.Event()

    async def serve() -> None:
        async def answer(request: Request) -> Message:
            begun.set()
            await trio.sleep(0.1)
            return Message("here")

        async with network.open("b") as b:
            b.serve("ask", answer)
            address.append(b.addresses[0])
            ready.set()
            await trio.to_thread.run_sync(over.wait)

    async def main() -> None:
        async with network.open("a") as a:
            link = await a.connect(address[0])
            answers: list[Any] = []

            async def ask() -> None:
                answers.append((await link.request("ask", timeout=0.4)).body)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.to_thread.run_sync(begun.wait)
                time.sleep(0.6)  # noqa: ASYNC251 (the whole node stands still)
            assert answers == ["here"]

    other = threading.Thread(target=trio.run, args=(serve,))
    other.start()
    try:
        assert ready.wait(20)
        trio.run(main)
    finally:
        over.set()
        other.join(20)
