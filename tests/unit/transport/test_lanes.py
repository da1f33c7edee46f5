"""What waits for a lane, or is opened over one, learns when it breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamError

from mesh.transport.carrier import Carrier
from mesh.transport.errors import DialError, LinkClosed
from mesh.transport.lanes import BufferedLaneStream, Lane
from mesh.transport.notes import NoteDesk
from mesh.transport.opening import open_lanes
from mesh.transport.pairing import Hello


def test_all_who_wait_for_credit_of_one_kind_are_woken() -> None:
    desk = NoteDesk(SimpleNamespace())  # type: ignore[arg-type]
    sent: list[int] = []
    failed: list[int] = []
    up = True

    def check_up() -> None:
        if not up:
            raise LinkClosed("gone")

    async def send(number: int) -> None:
        try:
            await desk.may_send("rows", 1, check_up)
            sent.append(number)
        except LinkClosed:
            failed.append(number)

    async def main() -> None:
        nonlocal up
        while desk.take_credit("rows", 1 << 16):
            pass
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(send, number)
                await trio.testing.wait_all_tasks_blocked()
                desk.grant({"k": "rows", "n": 1 << 18})
            assert sorted(sent) == [0, 1]
            while desk.take_credit("rows", 1 << 16):
                pass
            async with trio.open_nursery() as nursery:
                for number in range(2):
                    nursery.start_soon(send, number)
                await trio.testing.wait_all_tasks_blocked()
                up = False
                desk.close(LinkClosed("gone"))
            assert sorted(failed) == [0, 1]

    trio.run(main)


def test_a_relayed_lane_that_breaks_ends_its_connection() -> None:
    """What it had taken to send is lost: whoever waits for the rest has to be told."""
    closed = trio.Event()

    async def write(data: bytes) -> None:
        raise MuxedStreamError("no window update")

    async def close() -> None:
        closed.set()

    async def main() -> None:
        lane = BufferedLaneStream(SimpleNamespace(write=write))
        carrier = Carrier(
            SimpleNamespace(close=close), {Lane.BULK: lane}, path="relayed", offered_here=True
        )
        lane.write_now([b"the last of an answer"])
        with trio.fail_after(5):
            await carrier.run()
        assert closed.is_set()
        assert carrier.close_reason == "a relayed lane broke"

    trio.run(main)


def test_a_peer_that_negotiates_nonsense_is_one_that_cannot_be_dialled() -> None:
    class Nonsense:
        def __init__(self) -> None:
            self.muxed_stream = self
            self.data = b"\x03\xff\xfe\n"

        async def write(self, data: bytes) -> None:
            await trio.lowlevel.checkpoint()

        async def read(self, size: int) -> bytes:
            await trio.lowlevel.checkpoint()
            piece, self.data = self.data[:size], self.data[size:]
            return piece

    async def new_stream() -> Any:
        return Nonsense()

    async def main() -> None:
        hello = Hello(link=b"l" * 16, lane=0, boot=b"b" * 8)
        connection = SimpleNamespace(new_stream=new_stream, muxed_conn=SimpleNamespace())
        with pytest.raises(DialError):
            await open_lanes(connection, hello, path="direct")

    trio.run(main)
