"""What a link runs over: one connection and its three lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trio

from mesh.transport.lanes import PRIORITY, BufferedLaneStream, DirectLaneStream, Lane, LaneStream
from mesh.transport.quic.connection import MeshConnection
from mesh.transport.quic.stream import MeshStream


def lane_stream(stream: Any) -> LaneStream:
    """A stream of any connection, as a lane wants it."""
    if isinstance(stream, MeshStream):
        return DirectLaneStream(stream)
    return BufferedLaneStream(stream)


def prioritise(stream: Any, lane: Lane) -> None:
    """Serve this stream as its lane wants, where the connection knows priorities."""
    if isinstance(stream, MeshStream):
        stream.muxed_conn.set_priority(stream, PRIORITY[lane])


class Carrier:
    """A connection in use by a link. ``offered_here``: this side opened the lanes."""

    def __init__(
        self,
        connection: Any,
        streams: Mapping[Lane, LaneStream],
        *,
        path: str,
        offered_here: bool,
    ) -> None:
        self.connection = connection
        self.streams = dict(streams)
        self.path = path
        self.offered_here = offered_here
        self._shut = trio.Event()
        self._shut_reason = ""

    @property
    def last_heard(self) -> float:
        """Time (monotonic) of the last sign of life from the other end."""
        if isinstance(self.connection, MeshConnection):
            return self.connection.engine.last_received
        return max(s.heard for s in self.streams.values() if isinstance(s, BufferedLaneStream))

    @property
    def close_reason(self) -> str:
        if isinstance(self.connection, MeshConnection):
            return self.connection.close_reason
        return self._shut_reason

    async def run(self) -> None:
        """Move data where the streams need it; close the connection at the end."""
        async with trio.open_nursery() as nursery:
            for stream in self.streams.values():
                if isinstance(stream, BufferedLaneStream):
                    nursery.start_soon(self._move, stream)
            try:
                await self._shut.wait()
            finally:
                nursery.cancel_scope.cancel()
                if not isinstance(self.connection, MeshConnection):
                    with trio.move_on_after(1) as scope:
                        scope.shield = True
                        await self.connection.close()

    async def _move(self, stream: BufferedLaneStream) -> None:
        await stream.run()
        # What it had taken to send is lost, and those who wait for it have to learn of that.
        self.shut("a relayed lane broke")

    def shut(self, reason: str) -> None:
        """Close the connection; a direct one at once, a relayed one through :meth:`run`."""
        self._shut_reason = self._shut_reason or reason
        self._shut.set()
        if isinstance(self.connection, MeshConnection):
            self.connection.shut(reason=reason)
