"""The link to one peer: everything two nodes say to each other.

A link outlives the connection below it: it can move to another one (from a relay to a direct path)
without losing a frame. It ends when its connection breaks, when the peer has been silent too long
while something was awaited, or when the peer's certificate stops counting.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
)
from functools import partial
from typing import Any

import trio

from ca.certificate import Certificate
from mesh.identity import PeerId
from mesh.transport.calls import Call
from mesh.transport.carrier import Carrier
from mesh.transport.errors import (
    DeadlineExceeded,
    LinkClosed,
    MalformedFrame,
    NotAdmitted,
    RemoteError,
    TransportError,
)
from mesh.transport.frames import Buffer, Frame, FrameKind, decode_body, encode_body
from mesh.transport.lanes import Lane, LanePort
from mesh.transport.liveness import Liveness
from mesh.transport.messages import Message
from mesh.transport.notes import NoteDesk, Notes
from mesh.transport.serving import (
    MAX_CALLS,
    MAX_HELD,
    CallHead,
    ErrorBody,
    ServedCall,
    Services,
    call_cost,
)

logger = logging.getLogger(__name__)

_SLICES = 5  # of the time that an answer may take


class Link:
    """Made by the transport; shared by all who talk to the peer."""

    def __init__(
        self,
        *,
        link_id: bytes,
        peer: PeerId,
        peer_boot: bytes,
        certificate: Certificate,
        carrier: Carrier,
        services: Services,
        liveness: Liveness,
        clock: Callable[[], float],
        new_certificate: Callable[[Link, object], Certificate],
        on_down: Callable[[Link], None],
    ) -> None:
        self.link_id = link_id
        self.peer = peer
        self.peer_boot = peer_boot
        self.certificate = certificate
        self.offered_here = carrier.offered_here
        self.close_reason: str | None = None
        self.on_round_trip: Callable[[float], None] | None = None  # seconds of a ping's round trip
        self._carrier = carrier
        self._old_carrier: Carrier | None = None
        self._switches_awaited = 0
        self._move_confirmed = False
        self._services = services
        self._liveness = liveness
        self._clock = clock
        self._new_certificate = new_certificate
        self._on_down = on_down
        self._ports = {lane: LanePort(lane, stream) for lane, stream in carrier.streams.items()}
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._serving: dict[int, ServedCall] = {}
        self._held = 0  # what those being served take
        self._notes = NoteDesk(self)
        self._nursery: trio.Nursery | None = None
        self._closed = trio.Event()
        self._busy_changed = trio.Event()

    # -- facts --------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return not self._closed.is_set()

    @property
    def path(self) -> str:
        """``direct``, ``punched`` (direct, through NATs) or ``relayed``."""
        return self._carrier.path

    @property
    def rtt(self) -> float | None:
        """Round trip time in seconds, smoothed over pings on the control lane; None at first.
        There is a ping a second while calls are under way or one-way messages come and go."""
        return self._liveness.rtt

    @property
    def silent_for(self) -> float:
        """Seconds since anything was heard from the peer. While calls are under way the peer is
        asked every second, so a few seconds here mean trouble long before the link is given up."""
        return self._clock() - self._carrier.last_heard

    @property
    def carrier(self) -> Carrier:
        """What the link runs over at the moment."""
        return self._carrier

    @property
    def can_move(self) -> bool:
        """Whether it runs, and is not on its way to another connection already."""
        return self._nursery is not None and self._old_carrier is None

    def __repr__(self) -> str:
        return f"<Link to {self.peer} {self.path}{'' if self.is_up else ' down'}>"

    # -- asking -------------------------------------------------------------------------------

    async def request(
        self,
        kind: str,
        body: Any = None,
        payload: Buffer = b"",
        *,
        lane: Lane = Lane.CONTROL,
        timeout: float = 30.0,
    ) -> Message:
        """Ask and wait for the one answer.

        Raises RemoteError, DeadlineExceeded, LinkClosed; ValueError when the message is too large.
        Cancelled or late, it cancels the handler on the other side. Time is counted in slices: if
        this node stands still for a while one has passed, and what came meanwhile is read.
        """
        call: Call | None = None
        try:
            with trio.move_on_after(timeout):
                call = await self.open(kind, body, payload, lane=lane, timeout=timeout)
            if call is None:
                raise DeadlineExceeded(f"{kind} was not sent in {timeout:g} s")
            for _ in range(_SLICES):
                with trio.move_on_after(timeout / _SLICES):
                    async for answer in call:
                        return answer
                    raise RemoteError("no_answer", f"{kind} ended without an answer")
        except RemoteError as error:
            if error.code == "deadline":
                raise DeadlineExceeded(f"{kind}: {error.message}") from error
            raise
        finally:
            if call is not None:
                call.cancel()
        raise DeadlineExceeded(f"no answer to {kind} in {timeout:g} s")

    async def open(
        self,
        kind: str,
        body: Any = None,
        payload: Buffer = b"",
        *,
        lane: Lane = Lane.CONTROL,
        timeout: float | None = None,
    ) -> Call:
        """Ask for a stream of answers. The result has to be closed (``aclose``).

        ``timeout`` bounds the handler on the other side, in seconds.
        """
        self._check_up()
        number = next(self._numbers)
        port = self._ports[lane]
        call = self._calls[number] = Call(self, port, number)
        self._busy_changed.set()
        head: dict[str, Any] = {"k": kind, "b": body}
        if timeout is not None:
            head["t"] = float(timeout)
        try:
            await port.send(FrameKind.CALL, number, encode_body(head), payload)
        except LinkClosed as error:
            self.down(str(error))
            raise
        except BaseException:
            call.cancel()
            raise
        return call

    @asynccontextmanager
    async def stream(
        self, kind: str, body: Any = None, payload: Buffer = b"", *, lane: Lane = Lane.CONTROL
    ) -> AsyncIterator[Call]:
        """:meth:`open` as a context; leaving it cancels the handler on the other side."""
        call = await self.open(kind, body, payload, lane=lane)
        try:
            yield call
        finally:
            await call.aclose()

    async def send(
        self,
        kind: str,
        body: Any = None,
        payload: Buffer = b"",
        *,
        lane: Lane = Lane.ACTIVATIONS,
    ) -> None:
        """Send one way. Waits while the peer's reader is behind. Raises LinkClosed, ValueError."""
        self._check_up()
        encoded = encode_body({"k": kind, "b": body})
        size = len(encoded) + len(payload)
        credit = await self._notes.may_send(kind, size, self._check_up)
        try:
            await self._ports[lane].send(FrameKind.NOTE, next(self._numbers), encoded, payload)
        except LinkClosed as error:
            self.down(str(error))
            raise
        except BaseException:
            credit.refund(size)
            raise
        self._carried()

    def try_send(
        self,
        kind: str,
        body: Any = None,
        payload: Buffer = b"",
        *,
        lane: Lane = Lane.ACTIVATIONS,
    ) -> bool:
        """:meth:`send` if it need not wait: False when it would, then nothing was sent. Overtakes
        messages that wait in :meth:`send`. Raises LinkClosed."""
        self._check_up()
        encoded = encode_body({"k": kind, "b": body})
        size = len(encoded) + len(payload)
        credit = self._notes.take_credit(kind, size)
        if credit is None:
            return False
        try:
            sent = self._ports[lane].try_send(FrameKind.NOTE, next(self._numbers), encoded, payload)
        except LinkClosed as error:
            self.down(str(error))
            raise
        if not sent:
            credit.refund(size)
            return False
        self._carried()
        return True

    def subscribe(self, kind: str) -> AbstractAsyncContextManager[Notes]:
        """The one-way messages of ``kind``, those that came before included. One reader a kind.

        Raises LinkClosed; on entering, ValueError when the kind is being read already.
        """
        self._check_up()
        return self._notes.subscribe(kind)

    def handle(self, kind: str, handler: Callable[[Message], None]) -> AbstractContextManager[None]:
        """Have ``handler`` called with each one-way message of ``kind`` as soon as it is here,
        without a task's turn in between. It must neither block nor raise. Raises as
        :meth:`subscribe` does."""
        self._check_up()
        return self._notes.handle(kind, handler)

    def _check_up(self) -> None:
        if self._closed.is_set():
            raise LinkClosed(self.close_reason or "the link is closed")

    # -- used by calls ------------------------------------------------------------------------

    def message_of(self, frame: Frame) -> Message:
        """Decode an answer. A peer that sends what cannot be decoded is dropped."""
        try:
            return Message(decode_body(frame.body), frame.payload)
        except MalformedFrame as error:
            self.down(f"protocol violation: {error}")
            raise LinkClosed(str(error)) from error

    def call_closed(self, number: int) -> None:
        self._calls.pop(number, None)

    def call_served(self, number: int) -> None:
        served = self._serving.pop(number, None)
        if served is not None:
            self._held -= served.cost

    def tell(self, kind: FrameKind, body: bytes) -> None:
        """Send a frame about the link itself."""
        try:
            self._ports[Lane.CONTROL].send_now(kind, 0, body)
        except LinkClosed as error:
            self.down(str(error))

    # -- running ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the link until it is down."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if self._closed.is_set():
                    return
                for port in self._ports.values():
                    nursery.start_soon(self._read, port)
                nursery.start_soon(self._carrier.run)
                nursery.start_soon(self._watch)
                await self._closed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.down("shutting down")
            self._nursery = None

    def down(self, reason: str) -> None:
        """End the link: everyone who waits on it gets LinkClosed."""
        if self._closed.is_set():
            return
        self.close_reason = reason
        self._closed.set()
        error = LinkClosed(reason)
        for call in list(self._calls.values()):
            call.inbox.finish(error)
        self._notes.close(error)
        for served in list(self._serving.values()):
            served.scope.cancel()
        self._carrier.shut(reason)
        if self._old_carrier is not None:
            self._old_carrier.shut(reason)
        self._on_down(self)

    async def wait_down(self) -> None:
        await self._closed.wait()

    async def _read(self, port: LanePort) -> None:
        try:
            await port.run(partial(self._dispatch, port))
        except LinkClosed as error:
            self.down(self._carrier.close_reason or str(error))
        except NotAdmitted as error:
            self.down(f"not admitted any more: {error}")
        except MalformedFrame as error:
            logger.warning("peer %s broke the protocol: %s", self.peer, error)
            self.down(f"protocol violation: {error}")
        except Exception:
            # Whatever it is, it came of what this peer has sent: the others keep their links.
            logger.exception("a message of %s could not be handled", self.peer)
            self.down("a message could not be handled")

    def _dispatch(self, port: LanePort, frame: Frame) -> None:
        number = frame.number
        match frame.kind:
            case FrameKind.ITEM:
                if (call := self._calls.get(number)) is not None:
                    call.inbox.put(frame)
                    if frame.end:
                        call.inbox.finish()
            case FrameKind.END:
                if (call := self._calls.get(number)) is not None:
                    call.inbox.finish()
            case FrameKind.ERROR:
                error = ErrorBody.of(frame)
                if (call := self._calls.get(number)) is not None:
                    call.inbox.finish(error.raised())
            case FrameKind.CALL:
                self._serve(port, frame)
            case FrameKind.CREDIT:
                if (served := self._serving.get(number)) is not None:
                    served.grant(decode_body(frame.body))
            case FrameKind.CANCEL:
                if (served := self._serving.get(number)) is not None:
                    served.scope.cancel()
            case FrameKind.NOTE:
                self._carried()
                self._notes.put(frame)
            case FrameKind.NOTE_CREDIT:
                self._notes.grant(decode_body(frame.body))
            case FrameKind.PING:
                port.send_now(FrameKind.PONG, number)
            case FrameKind.PONG:
                seconds = self._liveness.answered(number, self._clock())
                self._busy_changed.set()  # a surprise makes the next one due soon
                if seconds is not None and self.on_round_trip is not None:
                    self.on_round_trip(seconds)
            case FrameKind.SWITCH:
                self._switched(confirmed=frame.end)
            case FrameKind.CERTIFICATE:
                self.certificate = self._new_certificate(self, decode_body(frame.body))
            case _:
                raise MalformedFrame(f"{frame.kind.name} in the wrong place")

    def _serve(self, port: LanePort, frame: Frame) -> None:
        head = CallHead.of(frame)
        if self._nursery is None or frame.number in self._serving:
            raise MalformedFrame("a call number is used twice")
        cost = call_cost(frame)
        if len(self._serving) >= MAX_CALLS or (self._held and self._held + cost > MAX_HELD):
            busy = {"code": "busy", "message": "too many calls at once", "data": {}}
            port.send_now(FrameKind.ERROR, frame.number, encode_body(busy))
            return
        served = self._serving[frame.number] = ServedCall(self, port, frame.number, cost)
        self._held += cost
        self._busy_changed.set()
        self._nursery.start_soon(served.run, self._services, frame.detached(), head)

    # -- liveness -----------------------------------------------------------------------------

    def _carried(self) -> None:
        if self._liveness.carried(self._clock()):
            self._busy_changed.set()

    async def _watch(self) -> None:
        """Ping the peer, often while something is under way; give up when it stays silent."""
        while True:
            now = self._clock()
            busy = bool(self._calls or self._serving)
            if self._liveness.is_dead(now, last_heard=self._carrier.last_heard, busy=busy):
                self.down(f"no sign of life for {now - self._carrier.last_heard:.0f} s")
                return
            token = self._liveness.ping_due(now, busy=busy)
            if token is not None:
                try:
                    self._ports[Lane.CONTROL].send_now(FrameKind.PING, token)
                except LinkClosed as error:
                    self.down(str(error))
                    return
            wait = self._liveness.next_look(now, last_heard=self._carrier.last_heard, busy=busy)
            if not busy:
                self._busy_changed = trio.Event()
            with trio.move_on_after(max(wait, 0.001) if wait < math.inf else math.inf):
                if busy:
                    await trio.sleep_forever()
                await self._busy_changed.wait()

    def prod(self) -> None:
        """Ping the peer now. Where its process is gone, its host may say so in answer, which is
        much sooner than silence would tell."""
        self.tell(FrameKind.PING, b"")

    async def check(self, seconds: float = 6.0) -> None:
        """Ask the peer for a sign of life now; without one in time the link is down.

        For when the network has changed: our packets then come from another address, which a peer
        that dialled us takes for a stranger's, so waiting would be in vain.
        """
        asked = self._clock()
        deadline = asked + seconds
        while self.is_up and self._carrier.last_heard <= asked:
            if self._clock() >= deadline:
                self.down("no answer after the network changed")
                return
            self.prod()
            await trio.sleep(seconds / 8)

    # -- moving -------------------------------------------------------------------------------

    async def move(self, carrier: Carrier) -> None:
        """Go on over another connection to the same peer. No frame is lost or repeated.

        Both sides do this with the two ends of one new connection.
        """
        if not self.can_move or self._nursery is None:
            carrier.shut("the link cannot move now")
            return
        self._old_carrier, self._carrier = self._carrier, carrier
        self._switches_awaited = len(self._ports)
        self._move_confirmed = False
        self._nursery.start_soon(carrier.run)
        try:
            for lane, port in self._ports.items():
                await port.move(carrier.streams[lane])
        except TransportError as error:
            self.down(f"moving failed: {error}")
        logger.info("link to %s moves to a %s path", self.peer, carrier.path)

    def _switched(self, *, confirmed: bool) -> None:
        """One lane has followed (or the peer says that all of its have)."""
        if confirmed:
            self._move_confirmed = True
        else:
            self._switches_awaited -= 1
            if self._switches_awaited == 0:
                self._ports[Lane.CONTROL].confirm_move()
        if self._move_confirmed and self._switches_awaited <= 0 and self._old_carrier is not None:
            # Everything of ours has arrived there, and everything of theirs here.
            self._old_carrier.shut("the link moved to another connection")
            self._old_carrier = None
