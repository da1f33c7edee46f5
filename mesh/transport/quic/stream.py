"""One QUIC stream as py-libp2p wants it.

No timeout on reads (an idle stream is not a broken one), no byte dropped because nobody has read
yet (the sender is held back instead), and a write waits until what is unacknowledged has shrunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

if TYPE_CHECKING:
    from mesh.transport.quic.connection import MeshConnection

Buffer = bytes | bytearray | memoryview

SEND_BUFFER = 2 << 20  # bytes written but not acknowledged before a writer waits
_WRITE_PIECE = 256 << 10  # bytes handed to the engine at a time


class MeshStream(IMuxedStream):
    """A bidirectional stream. Reading and writing are independent; each by one task at a time."""

    def __init__(self, connection: MeshConnection, stream_id: int) -> None:
        self.muxed_conn = connection
        self.stream_id = stream_id
        self._connection = connection
        self._chunks: deque[bytes] = deque()
        self._readable = trio.Event()
        self._writable = trio.Event()
        # Called when :meth:`take_now` may have something, or an end, to give.
        self.on_readable: Callable[[], None] | None = None
        self._ended = False  # the peer has finished writing
        self._reset = False
        self._read_closed = False  # we will not read any more
        self._write_closed = False

    # -- from the connection ------------------------------------------------------------------

    def feed(self, data: bytes, end: bool) -> None:
        """Bytes from the peer, in order."""
        if self._read_closed:
            self._connection.consumed(self.stream_id, len(data))
        elif data:
            self._chunks.append(data)
        if end:
            self._ended = True
            self._maybe_done()
        self._now_readable()

    def peer_reset(self) -> None:
        """The peer gave the stream up, or the connection is gone."""
        self._reset = True
        self._ended = True
        self._write_closed = True
        self._writable.set()
        self._maybe_done()
        self._now_readable()

    def _now_readable(self) -> None:
        self._readable.set()
        if self.on_readable is not None:
            self.on_readable()

    def peer_stopped(self) -> None:
        """The peer does not want to read any more."""
        self._write_closed = True
        self._writable.set()
        self._maybe_done()

    def refresh_writable(self) -> None:
        if self._unacknowledged() < SEND_BUFFER // 2:
            self._connection.blocked.discard(self)
            self._writable.set()

    # -- reading ------------------------------------------------------------------------------

    async def read(self, n: int | None = None) -> bytes:
        """Some bytes, at most ``n``, as soon as there are any.

        Raises MuxedStreamEOF after the last one and MuxedStreamReset when the stream broke.
        """
        while (data := self.take_now(n)) is None:
            self._readable = trio.Event()
            await self._readable.wait()
        return data

    def take_now(self, n: int | None = None) -> bytes | None:
        """:meth:`read` what is here; None when nothing is."""
        if not self._chunks:
            if self._reset:
                raise MuxedStreamReset()
            if self._ended or self._read_closed:
                raise MuxedStreamEOF()
            return None
        chunk = self._chunks.popleft()
        if n is not None and 0 <= n < len(chunk):
            self._chunks.appendleft(chunk[n:])
            chunk = chunk[:n]
        elif (n is None or n < 0) and self._chunks:
            chunk = b"".join((chunk, *self._chunks))
            self._chunks.clear()
        self._connection.consumed(self.stream_id, len(chunk))
        if self._ended and not self._chunks:
            self._maybe_done()
        return chunk

    # -- writing ------------------------------------------------------------------------------

    def _unacknowledged(self) -> int:
        return self._connection.unacknowledged(self.stream_id)

    async def write(self, data: bytes) -> None:
        """Hand ``data`` over, waiting while too much is unacknowledged."""
        view = memoryview(data)
        position = 0
        while True:
            if self._reset:
                raise MuxedStreamReset()
            if self._write_closed:
                raise MuxedStreamClosed()
            if position == len(view):
                return
            if not self.has_room():
                await self.wait_room()
                continue
            piece = view[position : position + _WRITE_PIECE]
            self.write_now((piece,))
            position += len(piece)

    def has_room(self) -> bool:
        return self._unacknowledged() < SEND_BUFFER

    async def wait_room(self) -> None:
        """Wait until :meth:`write_now` is welcome. Cancelling it leaves nothing behind."""
        while not self.has_room() and not self._reset and not self._write_closed:
            self._writable = trio.Event()
            self._connection.blocked.add(self)
            try:
                await self._writable.wait()
            finally:
                self._connection.blocked.discard(self)

    def write_now(self, parts: Sequence[Buffer]) -> None:
        """Write all of ``parts`` or raise, without waiting. Raises MuxedStreamClosed or -Reset."""
        if self._reset:
            raise MuxedStreamReset()
        if self._write_closed or not self._connection.write_parts(self.stream_id, parts):
            raise MuxedStreamClosed()

    async def close_write(self) -> None:
        """No more data from us; what was written still arrives."""
        if not self._write_closed:
            self._write_closed = True
            self._connection.end_stream(self.stream_id)
            self._writable.set()
        self._maybe_done()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def close(self) -> None:
        """Finish writing and stop reading."""
        if not self._write_closed:
            self._write_closed = True
            self._connection.end_stream(self.stream_id)
            self._writable.set()
        self._stop_reading()
        self._maybe_done()
        await trio.lowlevel.checkpoint_if_cancelled()

    async def reset(self) -> None:
        """Give the stream up in both directions."""
        if not self._reset:
            self._reset = True
            self._write_closed = True
            self._connection.reset_stream(self.stream_id)
            self._stop_reading()
            self._writable.set()
        self._maybe_done()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _stop_reading(self) -> None:
        if self._read_closed:
            return
        self._read_closed = True
        unread = sum(map(len, self._chunks))
        self._chunks.clear()
        if unread:
            self._connection.consumed(self.stream_id, unread)
        if not self._ended:
            self._connection.stop_stream(self.stream_id)
        self._readable.set()

    def _maybe_done(self) -> None:
        """Let the connection forget the stream once neither side has anything to say."""
        if self._write_closed and self._ended and (self._read_closed or not self._chunks):
            self._connection.stream_done(self.stream_id)

    # -- the rest of py-libp2p's interface ----------------------------------------------------

    def is_closed(self) -> bool:
        return self._reset or (self._write_closed and (self._read_closed or self._ended))

    def set_deadline(self, ttl: int) -> bool:
        return False  # callers use cancel scopes

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    async def __aenter__(self) -> MeshStream:
        return self

    async def __aexit__(self, *args: Any) -> None:
        await self.close()
