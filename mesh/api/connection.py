"""One HTTP connection of hypercorn (0.18), with what its protocol classes lack.

* It goes on for a keep-alive timeout after the client has closed it: :class:`Connection`.
* Over HTTP/2 what a client does not take is buffered without a bound, and the end of an answer
  waits for it whatever is cancelled: :class:`_PatientBuffer`, and :class:`Connection` again.
* It waits for ever for a client that has stopped reading: :class:`PatientStream`.

Each can go when hypercorn does that by itself. The first two rest on private names of it, which the
lock file holds.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import trio
from hypercorn.protocol import h2
from hypercorn.trio.tcp_server import TCPServer
from starlette.requests import ClientDisconnect

# A reader that takes nothing for so long is taken for gone. Full windows look like this too, so it
# is longer than any pause of a live client.
STALL_SECONDS = 60.0
_SEND_BYTES = 64 << 10  # sent between two looks at that clock
# A client whose machine vanished sends nothing at all; the kernel finds out by asking.
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_COUNT = 30, 10, 3  # s, s, probes


class Connection(TCPServer):  # type: ignore[misc]
    """A connection that is over when the client has closed it, not a keep-alive timeout later."""

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
            await self.idle_task.stop()
        finally:
            # Over HTTP/2 the end of an answer waits, whatever is cancelled, until it has been sent.
            # From here on it never will be.
            for buffer in getattr(self.protocol.protocol, "stream_buffers", {}).values():
                await buffer.close()


class _PatientBuffer(h2.StreamBuffer):  # type: ignore[misc]
    """What waits for the window of one HTTP/2 stream.

    hypercorn's own holds nobody up while that window is closed: it grows by all that is made. Here
    the maker waits, and as over HTTP/1.1 the patience with a reader that takes nothing has an end,
    for its stream alone: others may share the connection.
    """

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise h2.BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        if not await self._taken(h2.BUFFER_HIGH_WATER):
            raise ClientDisconnect

    async def drain(self) -> None:
        await self._taken(1)

    async def pop(self, max_length: int) -> bytes:
        data: bytes = await super().pop(max_length)
        await self._paused.set()
        return data

    async def _taken(self, size: int) -> bool:
        """Wait until less than ``size`` is left; False, and nothing is, when the reader stalls."""
        left = len(self.buffer)
        with trio.move_on_after(STALL_SECONDS) as limit:
            while len(self.buffer) >= size:
                await self._paused.clear()
                await self._paused.wait()
                if len(self.buffer) < left:
                    left = len(self.buffer)
                    limit.deadline = trio.current_time() + STALL_SECONDS
        if limit.cancelled_caught:
            await self.close()
        return not limit.cancelled_caught


h2.StreamBuffer = _PatientBuffer  # hypercorn makes them by this name, and has no setting for it


class PatientStream:
    """A socket stream for hypercorn whose patience with a stalled reader has an end."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket
        with suppress(OSError, AttributeError):  # not every system has all of these
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)

    async def send_all(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _SEND_BYTES):
            try:
                with trio.fail_after(STALL_SECONDS):
                    await self._stream.send_all(view[start : start + _SEND_BYTES])
            except trio.TooSlowError:
                raise trio.BrokenResourceError("the client stopped reading") from None

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()
