"""The lanes of a link: one long-lived stream each, opened once, shared by all calls.

Opening a stream per request would cost two round trips of protocol negotiation each time. Three
lanes keep what must not wait apart from what may: QUIC serves control first, then activations, and
bulk gets what is left; within a lane, messages take turns piece by piece.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import trio
from libp2p.io.exceptions import IOException
from libp2p.stream_muxer.exceptions import (
    MuxedConnError,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from mesh.transport.errors import LinkClosed, MalformedFrame
from mesh.transport.frames import (
    MAX_IN_PIECES,
    MAX_MESSAGES_IN_PIECES,
    PIECE,
    Assembler,
    Buffer,
    Flags,
    Fragment,
    Frame,
    FrameKind,
    FrameReader,
    encode,
    encode_abort,
)
from mesh.transport.quic.stream import MeshStream

logger = logging.getLogger(__name__)

_READ = 256 << 10
_UNREAD_LIMIT = 8 << 20  # bytes that a peer may leave unread of what must be sent at once
BROKEN = (
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
    MuxedConnError,
    IOException,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)


class Lane(IntEnum):
    """Which stream of a link a message takes."""

    CONTROL = 0  # requests, gossip's exchanges, token streams
    ACTIVATIONS = 1  # between the stages of a chain
    BULK = 2  # models and other large things


# Streams of libp2p's own protocols have 1 (quic.core.DEFAULT_PRIORITY).
PRIORITY = {Lane.CONTROL: 0, Lane.ACTIVATIONS: 1, Lane.BULK: 3}


class LaneStream(Protocol):
    """A stream that takes a frame whole or not at all."""

    def has_room(self) -> bool: ...
    async def wait_room(self) -> None: ...
    def write_now(self, parts: Sequence[Buffer]) -> None: ...
    def unsent(self) -> int: ...
    async def receive(self) -> list[Fragment]: ...
    async def deliver(self, take: Callable[[list[Fragment]], bool]) -> None: ...
    def push_back(self, fragments: list[Fragment]) -> None: ...
    async def close(self) -> None: ...


class _FragmentSource:
    """Reads fragments from a stream of bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._reader = FrameReader()
        self._pushed_back: list[Fragment] = []
        self.heard = time.monotonic()

    async def receive(self) -> list[Fragment]:
        """At least one fragment. Raises one of BROKEN at the end, MalformedFrame for no frame."""
        if self._pushed_back:
            fragments, self._pushed_back = self._pushed_back, []
            return fragments
        while True:
            data = await self._stream.read(_READ)
            if not data:
                raise MuxedStreamEOF()
            self.heard = time.monotonic()
            fragments = self._reader.feed(data)
            if fragments:
                return fragments

    async def deliver(self, take: Callable[[list[Fragment]], bool]) -> None:
        """Call ``take`` with what comes until it returns False. Raises as :meth:`receive` does, and
        what ``take`` raises."""
        while take(await self.receive()):
            pass

    def push_back(self, fragments: list[Fragment]) -> None:
        """Have these given out again."""
        self._pushed_back = fragments + self._pushed_back

    async def close(self) -> None:
        await self._stream.close()


class DirectLaneStream(_FragmentSource):
    """A lane's stream on a QUIC connection."""

    def __init__(self, stream: MeshStream) -> None:
        super().__init__(stream)
        self.has_room = stream.has_room
        self.wait_room = stream.wait_room
        self.write_now = stream.write_now

    async def deliver(self, take: Callable[[list[Fragment]], bool]) -> None:
        """As above, without a task's turn between a datagram and the call: that costs as much as
        the datagram."""
        ended = trio.Event()
        failures: list[Exception] = []
        busy = False

        def on_readable() -> None:
            nonlocal busy
            if busy or ended.is_set():  # a call has closed the connection, and so its streams
                return
            busy = True
            try:
                while (fragments := self._take_now()) is not None:
                    if not take(fragments):
                        ended.set()
                        break
            except Exception as error:
                failures.append(error)
                ended.set()
            busy = False

        stream: MeshStream = self._stream
        stream.on_readable = on_readable
        try:
            on_readable()
            await ended.wait()
        finally:
            stream.on_readable = None
        if failures:
            raise failures[0]

    def _take_now(self) -> list[Fragment] | None:
        """The fragments that are here; None when nothing is."""
        if self._pushed_back:
            fragments, self._pushed_back = self._pushed_back, []
            return fragments
        data = self._stream.take_now()
        return None if data is None else self._reader.feed(data)

    def unsent(self) -> int:
        return int(self._stream.muxed_conn.unacknowledged(self._stream.stream_id))


class BufferedLaneStream(_FragmentSource):
    """A lane's stream on any other muxed connection (a relayed one), whose writes may wait.

    ``run`` moves what was written; it has to be running for anything to leave.
    """

    ROOM = 1 << 20

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._waiting = bytearray()
        self._filled = trio.Event()
        self._emptied = trio.Event()
        self._broken = False

    async def run(self) -> None:
        """Write until the stream breaks. Cancel it only when nothing written still matters."""
        try:
            while True:
                while not self._waiting:
                    self._filled = trio.Event()
                    await self._filled.wait()
                data = bytes(self._waiting)
                self._waiting.clear()
                self._emptied.set()
                await self._stream.write(data)
        except BROKEN as error:
            logger.debug("relayed stream: %r", error)
            self._broken = True
            self._emptied.set()

    def has_room(self) -> bool:
        return len(self._waiting) < self.ROOM

    async def wait_room(self) -> None:
        while not self.has_room() and not self._broken:
            self._emptied = trio.Event()
            await self._emptied.wait()

    def write_now(self, parts: Sequence[Buffer]) -> None:
        if self._broken:
            raise MuxedStreamClosed()
        for part in parts:
            self._waiting += part
        self._filled.set()

    def unsent(self) -> int:
        return len(self._waiting)


class _InPieces:
    """What a peer takes of long messages at once, as ``frames`` says; first come, first served."""

    def __init__(self) -> None:
        self._turn = trio.Lock()
        self._messages = self._bytes = 0
        self._one_ended = trio.Event()

    @asynccontextmanager
    async def one_of(self, size: int) -> AsyncIterator[None]:
        """Around sending a message of so many bytes."""
        size = min(size, MAX_IN_PIECES)  # a larger one is refused when it is cut
        async with self._turn:
            while self._messages >= MAX_MESSAGES_IN_PIECES or self._bytes + size > MAX_IN_PIECES:
                self._one_ended = trio.Event()
                await self._one_ended.wait()
            self._messages += 1
            self._bytes += size
        try:
            yield
        finally:
            self._messages -= 1
            self._bytes -= size
            self._one_ended.set()


class LanePort:
    """One lane of one link: sends messages in pieces, and receives whole ones."""

    def __init__(self, lane: Lane, stream: LaneStream) -> None:
        self.lane = lane
        self._outgoing = stream
        self._incoming = stream
        self._next_incoming: LaneStream | None = None
        self._next_ready = trio.Event()
        self._turn = trio.Lock()
        self._in_pieces = _InPieces()
        self._assembler = Assembler()

    # -- sending ------------------------------------------------------------------------------

    async def send(
        self,
        kind: FrameKind,
        number: int,
        body: bytes = b"",
        payload: Buffer = b"",
        *,
        end: bool = False,
    ) -> None:
        """Hand a message to the stream, in turn with others and as fast as the peer takes it.

        Cancelled in the middle of a long message, it tells the peer to forget the pieces.
        Raises LinkClosed; ValueError when the message is too large.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.try_send(kind, number, body, payload, end=end):
            return
        frames = encode(kind, number, body, payload, end=end)
        size = len(body) + len(payload)
        try:
            async with self._in_pieces.one_of(size) if size > PIECE else nullcontext():
                await self._send_pieces(frames, kind, number)
        except BROKEN as error:
            raise LinkClosed("the link broke while sending") from error

    def try_send(
        self,
        kind: FrameKind,
        number: int,
        body: bytes = b"",
        payload: Buffer = b"",
        *,
        end: bool = False,
    ) -> bool:
        """Hand a short message to the stream if nobody is before it and the peer keeps up.

        Raises LinkClosed.
        """
        if len(body) + len(payload) > PIECE or self._turn.locked() or not self._outgoing.has_room():
            return False
        try:
            self._outgoing.write_now(next(encode(kind, number, body, payload, end=end)))
        except BROKEN as error:
            raise LinkClosed("the link broke while sending") from error
        return True

    async def _send_pieces(self, frames: Any, kind: FrameKind, number: int) -> None:
        begun = False
        try:
            for frame in frames:
                async with self._turn:  # first come, first served: that is the fairness
                    await self._outgoing.wait_room()
                    self._outgoing.write_now(frame)
                begun = True
        except trio.Cancelled:
            if begun:
                self._outgoing.write_now((encode_abort(kind, number),))
            raise

    def send_now(self, kind: FrameKind, number: int, body: bytes = b"") -> None:
        """Send a short message ahead of any that wait. Raises LinkClosed, also when the peer has
        left so much unread that it cannot be served any more."""
        if self._outgoing.unsent() > _UNREAD_LIMIT:
            raise LinkClosed("the peer does not read")
        try:
            for frame in encode(kind, number, body):
                self._outgoing.write_now(frame)
        except BROKEN as error:
            raise LinkClosed("the link broke while sending") from error

    # -- receiving ----------------------------------------------------------------------------

    async def run(self, dispatch: Callable[[Frame], None]) -> None:
        """Call ``dispatch`` with every message, when it is complete. A SWITCH on the old stream is
        followed here.

        Raises LinkClosed when the stream ended, MalformedFrame for what is no frame, and what
        ``dispatch`` raises.
        """

        def take(fragments: list[Fragment]) -> bool:
            for position, fragment in enumerate(fragments):
                if fragment.kind is FrameKind.SWITCH and not fragment.flags & Flags.END:
                    if position + 1 != len(fragments):
                        raise MalformedFrame("something follows the switch to another connection")
                    return False
                frame = self._assembler.add(fragment)
                if frame is not None:
                    dispatch(frame)
            return True

        while True:
            try:
                await self._incoming.deliver(take)
            except BROKEN as error:
                raise LinkClosed("the connection was lost") from error
            await self._follow_switch()
            dispatch(Frame(FrameKind.SWITCH, 0, b"", b""))

    async def _follow_switch(self) -> None:
        while self._next_incoming is None:
            await self._next_ready.wait()
        self._incoming, self._next_incoming = self._next_incoming, None
        self._next_ready = trio.Event()

    # -- moving to another connection ---------------------------------------------------------

    async def move(self, stream: LaneStream) -> None:
        """Go on over ``stream``: the last frame on the old one says so, so none is lost."""
        self._next_incoming = stream
        self._next_ready.set()
        async with self._turn:
            for frame in encode(FrameKind.SWITCH, 0):
                self._outgoing.write_now(frame)
            self._outgoing = stream

    def confirm_move(self) -> None:
        """Tell the peer, on the new connection, that all its lanes have been followed."""
        try:
            for frame in encode(FrameKind.SWITCH, 0, end=True):
                self._outgoing.write_now(frame)
        except BROKEN as error:
            raise LinkClosed("the link broke while moving") from error
