"""One-way messages of a link: in order, by kind, each kind held back by its own reader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import trio

from mesh.transport.calls import Inbox
from mesh.transport.credit import SendCredit
from mesh.transport.errors import LinkClosed, MalformedFrame
from mesh.transport.frames import Frame, FrameKind, decode_body, encode_body
from mesh.transport.messages import Message
from mesh.transport.serving import CallHead

if TYPE_CHECKING:
    from mesh.transport.link import Link

_MOST_KINDS = 64
MAX_UNREAD = 64 << 20  # bytes, of all kinds together


class Notes:
    """One-way messages of one kind from one peer, in order. One reader at a time.

    ``read`` is told the size of each message that is taken."""

    def __init__(self, link: Link, kind: str, read: Callable[[int], None]) -> None:
        self.inbox = Inbox()
        self._link = link
        self._kind = kind
        self._read = read

    def __aiter__(self) -> Notes:
        return self

    async def __anext__(self) -> Message:
        """Raises LinkClosed when the link is gone and all that came before was read."""
        taken = await self.inbox.take()
        if taken is None:
            raise StopAsyncIteration
        return self._taken(*taken)

    def take_now(self) -> Message | None:
        """The next message if one is here."""
        taken = self.inbox.take_now()
        return None if taken is None else self._taken(*taken)

    def _taken(self, frame: Frame, grant: int) -> Message:
        self._read(frame.size)
        self._grant(grant)
        return Message(decode_body(frame.body).get("b"), frame.payload)

    def pass_by(self, frame: Frame) -> None:
        """One that is read as it comes, when none waits. Raises MalformedFrame."""
        self._grant(self.inbox.pass_by(frame))

    def _grant(self, grant: int) -> None:
        if grant and not self.inbox.ended:
            amount = encode_body({"k": self._kind, "n": grant})
            self._link.tell(FrameKind.NOTE_CREDIT, amount)


class NoteDesk:
    """Both directions of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._received: dict[str, Notes] = {}
        self._unread = 0  # bytes
        self._read: set[str] = set()
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._credit: dict[str, SendCredit] = {}
        self._granted: dict[str, trio.Event] = {}

    # -- sending ------------------------------------------------------------------------------

    async def may_send(self, kind: str, size: int, check_up: Callable[[], None]) -> SendCredit:
        """Wait for credit and take ``size`` bytes of it. ``check_up`` raises for a dead link."""
        while (credit := self.take_credit(kind, size)) is None:
            await self._granted.setdefault(kind, trio.Event()).wait()
            check_up()
        return credit

    def take_credit(self, kind: str, size: int) -> SendCredit | None:
        """Take ``size`` bytes of credit, unless there is none now."""
        credit = self._credit.get(kind)
        if credit is None:
            credit = self._credit[kind] = SendCredit()
        if not credit.may_send:
            return None
        credit.spend(size)
        return credit

    def grant(self, body: object) -> None:
        """A NOTE_CREDIT from the peer. Raises MalformedFrame."""
        if not isinstance(body, dict) or not isinstance(kind := body.get("k"), str):
            raise MalformedFrame("not a grant of credit")
        credit = self._credit.get(kind)
        if credit is None:
            raise MalformedFrame("credit for messages that were never sent")
        credit.grant(body.get("n"))
        if (granted := self._granted.pop(kind, None)) is not None:
            granted.set()

    # -- receiving ----------------------------------------------------------------------------

    def put(self, frame: Frame) -> None:
        """A NOTE from the peer. Raises MalformedFrame."""
        head = CallHead.of(frame)
        notes = self._of(head.k)
        if (handler := self._handlers.get(head.k)) is not None:
            notes.pass_by(frame)
            handler(Message(head.b, frame.own_payload()))
            return
        if self._unread + frame.size > MAX_UNREAD:
            raise MalformedFrame("too much that is not read")
        notes.inbox.put(frame)
        self._unread += frame.size

    @contextmanager
    def handle(self, kind: str, handler: Callable[[Message], None]) -> Iterator[None]:
        """Raises ValueError when the kind is being read already."""
        if kind in self._read:
            raise ValueError(f"{kind} is already being read")
        self._read.add(kind)
        try:
            notes = self._of(kind)
            while (message := notes.take_now()) is not None:
                handler(message)
            self._handlers[kind] = handler
            yield
        finally:
            self._handlers.pop(kind, None)
            self._read.discard(kind)

    @asynccontextmanager
    async def subscribe(self, kind: str) -> AsyncIterator[Notes]:
        """Raises ValueError when the kind is being read already."""
        if kind in self._read:
            raise ValueError(f"{kind} is already being read")
        self._read.add(kind)
        try:
            yield self._of(kind)
        finally:
            self._read.discard(kind)

    def _of(self, kind: str) -> Notes:
        notes = self._received.get(kind)
        if notes is None:
            if len(self._received) >= _MOST_KINDS:
                raise MalformedFrame("too many kinds of one-way messages")
            notes = self._received[kind] = Notes(self._link, kind, self._was_read)
        return notes

    def _was_read(self, size: int) -> None:
        self._unread -= size

    def close(self, error: LinkClosed) -> None:
        """Wake everybody who waits."""
        for notes in self._received.values():
            notes.inbox.finish(error)
        while self._granted:
            self._granted.popitem()[1].set()
