"""An admitted peer that sends nonsense loses its link, and nothing else happens."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import trio
import trio.lowlevel
from libp2p.peer.id import ID

from mesh.identity import PeerId
from mesh.transport import (
    DialError,
    Lane,
    Message,
    RemoteError,
    Request,
    TransportConfig,
    Tuning,
)
from mesh.transport.calls import Inbox
from mesh.transport.credit import WINDOW
from mesh.transport.frames import PIECE, Assembler, FrameKind, FrameReader, encode, encode_body
from mesh.transport.lanes import BROKEN
from mesh.transport.opening import LINK_PROTOCOL


async def echo(request: Request) -> Message:
    return request.message


def frames(*messages: tuple[Any, ...]) -> bytes:
    return b"".join(bytes(part) for m in messages for frame in encode(*m) for part in frame)


NONSENSE = {
    "random bytes": os.urandom(4000),
    "a huge frame": struct.pack(">I", 0xFFFFFFFF) + bytes(100),
    "an unknown kind": struct.pack(">IBBQ", 10, 200, 3, 1),
    "a call without a head": frames((FrameKind.CALL, 9, b"")),
    "a call with a bad head": frames((FrameKind.CALL, 9, encode_body({"k": 5}))),
    "a body too deep": frames((FrameKind.CALL, 9, b"\x81" * 50 + b"\x00")),
    "a senseless grant": frames(
        (FrameKind.CALL, 9, encode_body({"k": "wait", "b": None})),
        (FrameKind.CREDIT, 9, encode_body(-5)),
    ),
    "a greeting in the middle": frames((FrameKind.HELLO, 0, b"")),
    "a number used twice": frames(
        (FrameKind.CALL, 9, encode_body({"k": "wait", "b": None})),
        (FrameKind.CALL, 9, encode_body({"k": "wait", "b": None})),
    ),
    "a certificate that is none": frames((FrameKind.CERTIFICATE, 0, encode_body(b"x" * 100))),
    "notes without credit": frames(
        *(
            (FrameKind.NOTE, n, encode_body({"k": "n", "b": None}), bytes(WINDOW // 2))
            for n in range(5)
        )
    ),
    "too many kinds of notes": frames(
        *((FrameKind.NOTE, n, encode_body({"k": f"n{n}", "b": None})) for n in range(100))
    ),
    "a switch followed by more": frames((FrameKind.SWITCH, 0)) + frames((FrameKind.PING, 1)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_ends_the_link_and_nothing_else(network: Any, what: str) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("c") as c:

            async def wait(request: Request) -> Message:
                await trio.sleep_forever()
                raise AssertionError

            b.serve("echo", echo)
            b.serve("wait", wait)
            good = await c.connect(b.addresses[0])
            bad = await a.connect(b.addresses[0])
            at_b = b.links[a.peer_id]
            bad._ports[Lane.CONTROL]._outgoing.write_now((NONSENSE[what],))
            with trio.fail_after(5):
                await at_b.wait_down()
            assert "violation" in (at_b.close_reason or "") or "admitted" in at_b.close_reason
            with trio.fail_after(5):
                await bad.wait_down()
            assert (await good.request("echo", 1)).body == 1
            again = await a.connect(b.addresses[0])
            assert (await again.request("echo", 2)).body == 2

    trio.run(main)


def test_random_lanes_do_no_harm(network: Any) -> None:
    """Streams of the link's protocol that never were an offer, and ones cut short."""

    async def main() -> None:
        rng = Random(7)
        async with network.open("a") as a, network.open("b") as b:
            b.serve("echo", echo)
            link = await a.connect(b.addresses[0])
            for _ in range(40):
                stream = await a._host.new_stream(ID.from_string(b.peer_id), [LINK_PROTOCOL])
                try:
                    await stream.write(rng.randbytes(rng.randrange(200)) + b"\0")
                except Exception:  # refused already
                    continue
                if rng.random() < 0.5:
                    await stream.reset()
            stream = await a._host.new_stream(ID.from_string(b.peer_id), [LINK_PROTOCOL])
            begun = next(encode(FrameKind.HELLO, 0, b"", bytes(2 * PIECE)))
            await stream.write(b"".join(map(bytes, begun)))
            with trio.fail_after(5), suppress(Exception):
                while await stream.read(1):  # a greeting is short: nobody waits for the rest
                    pass
            assert (await link.request("echo", 1)).body == 1
            assert len(b._door._offers) == 0

    trio.run(main)


def test_peer_that_never_reads_is_dropped(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for pongs without end and reads none: the answers must not pile up."""
    monkeypatch.setattr("mesh.transport.lanes._UNREAD_LIMIT", 200_000)
    tuning = Tuning(stream_window=128 << 10, connection_window=1 << 20)
    config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",), tuning=tuning)

    async def main() -> None:
        async with network.open("a", config) as a, network.open("b", config) as b:
            link = await a.connect(b.addresses[0])
            at_b = b.links[a.peer_id]
            port = link._ports[Lane.CONTROL]
            port._incoming._stream._connection.consumed = lambda *_: None  # a never grants more
            pings = frames(*((FrameKind.PING, n) for n in range(1000)))
            with trio.fail_after(30), suppress(*BROKEN):
                while at_b.is_up:
                    if port._outgoing.unsent() < 100_000:
                        port._outgoing.write_now((pings,))
                    await trio.sleep(0.005)
            assert not at_b.is_up
            assert at_b.close_reason == "the peer does not read"

    trio.run(main)


def test_calls_that_wait_are_bounded_in_bytes(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only in number: each may bring megabytes, and have none of its answer read."""
    monkeypatch.setattr("mesh.transport.link.MAX_HELD", 4 << 20)

    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:

            async def wait(request: Request) -> Message:
                await trio.sleep_forever()
                raise AssertionError

            b.serve("wait", wait)
            b.serve("echo", echo)
            link = await a.connect(b.addresses[0])
            refused: list[str] = []

            async def ask(payload: bytes) -> None:
                try:
                    await link.request("wait", None, payload, lane=Lane.BULK)
                except RemoteError as error:
                    refused.append(error.code)

            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(ask, bytes(1 << 20))
                with trio.fail_after(10):
                    while len(refused) < 3:  # noqa: ASYNC110
                        await trio.sleep(0.01)
                assert len(b.links[a.peer_id]._serving) == 3
                nursery.cancel_scope.cancel()
            # What was held has been given back, and one call may always be as large as any.
            with trio.fail_after(10):
                while b.links[a.peer_id]._serving:  # noqa: ASYNC110
                    await trio.sleep(0.01)
                answer = await link.request("echo", None, bytes(6 << 20), lane=Lane.BULK)
            assert len(answer.payload) == 6 << 20
            assert refused == ["busy"] * 3

    trio.run(main)


def test_what_is_kept_holds_on_to_nothing_else() -> None:
    """Short messages are views of all that was read with them."""
    reader, assembler = FrameReader(), Assembler()
    data = frames((FrameKind.NOTE, 1, encode_body({"k": "n"})), (FrameKind.ITEM, 2, bytes(90_000)))
    note, _ = [assembler.add(fragment) for fragment in reader.feed(data)]
    inbox = Inbox()
    inbox.put(note)
    kept, _ = inbox.take_now() or (note, 0)
    assert isinstance(kept.body, bytes)
    assert kept == note


def test_a_peer_id_that_is_none_cannot_be_dialled(network: Any) -> None:
    """Peers name others: who is in a chain with whom."""

    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b:
            await a.connect(b.addresses[0])  # might relay
            with pytest.raises(DialError):
                await a.link_to(PeerId("0" * 52), [])

    trio.run(main)


def test_what_a_handler_did_not_expect_ends_the_link_only(network: Any) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("c") as c:
            b.serve("echo", echo)
            good, bad = await c.connect(b.addresses[0]), await a.connect(b.addresses[0])
            at_b = b.links[a.peer_id]
            heard: list[Any] = []

            def handle(message: Message) -> None:
                heard.append(message.body)
                if message.body:
                    raise KeyError(message.body)

            with at_b.handle("said", handle):
                send = bad._ports[Lane.CONTROL].send
                await send(FrameKind.NOTE, 1, encode_body({"k": "said"}))  # says nothing
                await send(FrameKind.NOTE, 2, encode_body({"k": "said", "b": 1}))
                with trio.fail_after(5):
                    await at_b.wait_down()
            assert heard == [None, 1]
            assert (await good.request("echo", 1)).body == 1

    trio.run(main)


def test_nonsense_on_any_stream_ends_that_stream_only(network: Any) -> None:
    """Of every protocol that the host speaks, the library's own among them."""

    async def main() -> None:
        config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",), kademlia=True)
        async with network.open("a", config) as a, network.open("b", config) as b:
            b.serve("echo", echo)
            link = await a.connect(b.addresses[0])
            heard = trio.Event()

            def validate(_: PeerId, data: bytes) -> bool:
                heard.set()
                return True

            async with a.subscribe("/t", lambda *_: True), b.subscribe("/t", validate):
                for protocol in b._host.get_mux().handlers:
                    for data in (b"\xff" * 20, b"\x00", b"\x05\x0a\xff\xff\xff\x7f", b"\x80" * 12):
                        stream = await a._host.new_stream(ID.from_string(b.peer_id), [protocol])
                        with suppress(*BROKEN):
                            await stream.write(data)
                            with trio.move_on_after(0.05):
                                await stream.read(1)
                        await stream.reset()
                assert (await link.request("echo", 1)).body == 1
                with trio.fail_after(10):
                    while not heard.is_set():
                        await a.publish("/t", b"still here")
                        with trio.move_on_after(0.2):
                            await heard.wait()

    trio.run(main)


def test_a_packet_that_nobody_foresaw_ends_its_connection_only(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with network.open("a") as a, network.open("b") as b, network.open("c") as c:
            b.serve("echo", echo)
            good, bad = await c.connect(b.addresses[0]), await a.connect(b.addresses[0])
            at_b = b.links[a.peer_id]

            def fail(*_: object) -> None:
                raise KeyError("unforeseen")

            monkeypatch.setattr(at_b.carrier.connection.engine, "_payload_received", fail)
            bad.tell(FrameKind.PING, b"")
            with trio.fail_after(5):
                await at_b.wait_down()
            assert (await good.request("echo", 1)).body == 1

    trio.run(main)
