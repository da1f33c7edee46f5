"""The asking side: a call under way, and the inbox in which its answers wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from mesh.transport.credit import ReceiveWindow
from mesh.transport.errors import LinkClosed, TransportError
from mesh.transport.frames import Frame, FrameKind, encode_body
from mesh.transport.lanes import LanePort
from mesh.transport.messages import Message

if TYPE_CHECKING:
    from mesh.transport.link import Link


class Inbox:
    """Messages that wait for one reader, bounded by the credit given to their sender."""

    def __init__(self) -> None:
        self._window = ReceiveWindow()
        self._items: deque[Frame] = deque()
        self._wake = trio.Event()
        self._end: TransportError | None = None
        self.ended = False

    def put(self, frame: Frame) -> None:
        """Raises MalformedFrame when the sender had no credit."""
        self._window.received(frame.size)
        self._items.append(frame.detached())
        self._wake.set()

    def pass_by(self, frame: Frame) -> int:
        """A message that its reader takes at once, when none waits: the credit to grant for it.

        Raises MalformedFrame when the sender had no credit.
        """
        self._window.received(frame.size)
        return self._window.consumed(frame.size)

    def finish(self, error: TransportError | None = None) -> None:
        """Nothing more comes. What is here can still be read; then ``error`` is raised, if any."""
        if not self.ended:
            self.ended = True
            self._end = error
            self._wake.set()

    async def take(self) -> tuple[Frame, int] | None:
        """The next message and the credit to grant for it; None at the end.

        Cancelling it loses nothing.
        """
        while not self._items:
            if self._end is not None:
                raise self._end
            if self.ended:
                return None
            self._wake = trio.Event()
            await self._wake.wait()
        await trio.lowlevel.checkpoint_if_cancelled()
        return self.take_now()

    def take_now(self) -> tuple[Frame, int] | None:
        """:meth:`take` what is here; None when nothing is."""
        if not self._items:
            return None
        frame = self._items.popleft()
        return frame, self._window.consumed(frame.size)


class Call:
    """A call whose answer is a stream of messages: iterate, and ``aclose`` when done.

    It holds no task, nursery or cancel scope, so it may live in an async generator. Closing it
    before the end cancels the handler on the other side.
    """

    def __init__(self, link: Link, port: LanePort, number: int) -> None:
        self.inbox = Inbox()
        self._link = link
        self._port = port
        self._number = number
        self._closed = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Message:
        """Raises RemoteError, LinkClosed."""
        taken = await self.inbox.take()
        if taken is None:
            self._forget()
            raise StopAsyncIteration
        frame, grant = taken
        if grant and not self.inbox.ended:
            self._tell(FrameKind.CREDIT, encode_body(grant))
        return self._link.message_of(frame)

    async def aclose(self) -> None:
        """Be done with the call. Never raises, and does not wait for the other side."""
        self.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def cancel(self) -> None:
        """The same without a checkpoint."""
        if not self._closed and not self.inbox.ended:
            self._tell(FrameKind.CANCEL, b"")
        self._forget()

    def _tell(self, kind: FrameKind, body: bytes) -> None:
        try:
            self._port.send_now(kind, self._number, body)
        except LinkClosed as error:
            self._link.down(str(error))

    def _forget(self) -> None:
        self._closed = True
        self._link.call_closed(self._number)
