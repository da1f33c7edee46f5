"""The socket: batches where the kernel has them, and the plain way where it has not."""

from __future__ import annotations

import os
import sys

import pytest
import trio

from mesh.transport.errors import ListenError
from mesh.transport.quic.udp import UdpSocket


@pytest.mark.parametrize("batched", [False, True])
def test_batches_arrive_whole(batched: bool) -> None:
    if batched and sys.platform != "linux":
        pytest.skip("only Linux has batches")

    async def main() -> None:
        sender, receiver = UdpSocket("127.0.0.1", 0), UdpSocket("127.0.0.1", 0)
        if not batched:
            sender._segments = receiver._joins = False
        sizes = [1200] * 70 + [500, 1200, 1200, 16_000, 16_000, 16_000, 16_000, 3]
        datagrams = [(os.urandom(size), receiver.address) for size in sizes]
        assert sender.send(datagrams) == []
        received: list[bytes] = []
        with trio.fail_after(5):
            while len(received) < len(datagrams):
                await receiver.wait_readable()
                received += [data for data, _ in receiver.receive()]
        assert received == [data for data, _ in datagrams]
        sender.close()
        receiver.close()

    trio.run(main)


def test_refused_batches_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sender, receiver = UdpSocket("127.0.0.1", 0), UdpSocket("127.0.0.1", 0)
        plain = sender._socket

        class Refusing:
            def __getattr__(self, name: str) -> object:
                return getattr(plain, name)

            def sendmsg(self, *_: object) -> None:
                raise OSError(22, "this card cannot do that")

        sender._socket = Refusing()  # type: ignore[assignment]
        sender.send([(bytes([n]) * 100, receiver.address) for n in range(10)])
        received: list[bytes] = []
        with trio.fail_after(5):
            while len(received) < 10:
                await receiver.wait_readable()
                received += [data for data, _ in receiver.receive()]
        assert [data[0] for data in received] == list(range(10))
        assert sender._segments is False
        plain.close()
        receiver.close()

    trio.run(main)


def test_second_socket_on_a_port_is_an_error() -> None:
    async def main() -> None:
        first = UdpSocket("127.0.0.1", 0)
        with pytest.raises(ListenError, match="already in use"):
            UdpSocket("127.0.0.1", first.port)
        first.close()

    trio.run(main)


def test_errors_of_the_network_are_like_loss() -> None:
    async def main() -> None:
        udp = UdpSocket("127.0.0.1", 0)
        udp.send([(b"x", ("192.0.2.1", 9)), (b"x", ("127.0.0.1", 9))])
        udp.close()
        udp.send([(b"x", ("127.0.0.1", 9))])

    trio.run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_refusals_are_told() -> None:
    async def main() -> None:
        udp, other = UdpSocket("127.0.0.1", 0), UdpSocket("127.0.0.1", 0)
        gone = other.address
        other.close()
        udp.send([(b"x", gone)])
        with trio.fail_after(5):
            await udp.wait_readable()
        assert list(udp.receive()) == []
        assert udp.take_refusals(look=True) == [gone]
        with trio.move_on_after(0.2) as scope:
            await udp.wait_readable()  # the queue of errors is empty: no busy loop
        assert scope.cancelled_caught
        udp.close()

    trio.run(main)


def test_a_refusal_by_one_does_not_take_the_place_of_what_goes_to_another() -> None:
    async def main() -> None:
        udp, other, receiver = (UdpSocket("127.0.0.1", 0) for _ in range(3))
        gone = other.address
        other.close()
        for number in range(20):
            # On loopback the refusal is here before the next one is sent.
            udp.send([(b"x", gone), (bytes([number]), receiver.address)])
        got: list[bytes] = []
        with trio.move_on_after(5):
            while len(got) < 20:
                await receiver.wait_readable()
                got += [data for data, _ in receiver.receive()]
        assert got == [bytes([number]) for number in range(20)]
        udp.close()
        receiver.close()

    trio.run(main)
