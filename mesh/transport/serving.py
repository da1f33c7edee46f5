"""The answering side of calls: which handler serves what, and running one for a link."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import trio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.transport.credit import SendCredit
from mesh.transport.errors import LinkClosed, MalformedFrame, RemoteError
from mesh.transport.frames import Buffer, Frame, FrameKind, decode_body, encode_body
from mesh.transport.lanes import LanePort
from mesh.transport.messages import Message, Request

if TYPE_CHECKING:
    from mesh.transport.link import Link

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Message]]
StreamHandler = Callable[[Request], AsyncGenerator[Message, None]]
KindName = Annotated[str, Field(min_length=1, max_length=64)]

MAX_CALLS = 1024  # served at once for one peer
MAX_HELD = 128 << 20  # bytes that these may take
_DECODED = 16  # so many times its size is what a body may take once it is decoded


class CallHead(BaseModel):
    """The body of a CALL or NOTE frame."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    k: KindName
    t: float | None = Field(None, gt=0, le=86_400, allow_inf_nan=False)  # seconds left
    b: Any = None

    @classmethod
    def of(cls, frame: Frame) -> CallHead:
        """Raises MalformedFrame."""
        try:
            return cls.model_validate(decode_body(frame.body))
        except ValidationError as error:
            raise MalformedFrame(f"call: {error.error_count()} fields are wrong") from error


def call_cost(frame: Frame) -> int:
    """What a call counts towards :data:`MAX_HELD`."""
    return len(frame.payload) + _DECODED * len(frame.body)


class ErrorBody(BaseModel):
    """The body of an ERROR frame."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    code: str = Field(max_length=64)
    message: str = Field("", max_length=4096)
    data: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, frame: Frame) -> ErrorBody:
        """Raises MalformedFrame."""
        try:
            return cls.model_validate(decode_body(frame.body))
        except ValidationError as error:
            raise MalformedFrame("not an error body") from error

    def raised(self) -> RemoteError:
        return RemoteError(self.code, self.message, self.data)


class Services:
    """Handlers by kind, for all links of a node."""

    def __init__(self) -> None:
        self.unary: dict[str, Handler] = {}
        self.streams: dict[str, StreamHandler] = {}

    def add(self, kind: str, handler: Handler) -> None:
        self._check(kind)
        self.unary[kind] = handler

    def add_stream(self, kind: str, handler: StreamHandler) -> None:
        self._check(kind)
        self.streams[kind] = handler

    def _check(self, kind: str) -> None:
        if not 1 <= len(kind) <= 64:
            raise ValueError(f"a kind has 1 to 64 characters: {kind!r}")
        if kind in self.unary or kind in self.streams:
            raise ValueError(f"{kind} already has a handler")


class ServedCall:
    """One call of a peer, from its CALL frame to the last frame of the answer."""

    def __init__(self, link: Link, port: LanePort, number: int, cost: int) -> None:
        self.cost = cost
        self.credit = SendCredit()
        self.scope = trio.CancelScope()
        self._link = link
        self._port = port
        self._number = number
        self._granted = trio.Event()

    def grant(self, amount: object) -> None:
        """Raises MalformedFrame."""
        self.credit.grant(amount)
        self._granted.set()

    async def run(self, services: Services, frame: Frame, head: CallHead) -> None:
        """Run the handler and send what it gives. Never raises but for cancellation from above."""
        deadline = trio.current_time() + head.t if head.t is not None else math.inf
        request = Request(Message(head.b, frame.payload), self._link)
        try:
            with self.scope:
                # What is taken back before its turn has come is not begun.
                await trio.lowlevel.checkpoint_if_cancelled()
                with trio.move_on_at(deadline) as limit:
                    await self._answer(services, request, head.k)
                if limit.cancelled_caught:
                    await self._fail(RemoteError("deadline", "the deadline passed"))
        except LinkClosed:
            pass  # nobody is left to answer
        finally:
            self._link.call_served(self._number)

    async def _answer(self, services: Services, request: Request, kind: str) -> None:
        try:
            if (unary := services.unary.get(kind)) is not None:
                await self._send(await unary(request), end=True)
            elif (stream := services.streams.get(kind)) is not None:
                async with aclosing(stream(request)) as items:
                    async for item in items:
                        await self._send(item)
                await self._put(FrameKind.END, end=True)
            else:
                raise RemoteError("unknown_kind", f"this node does not serve {kind}")
        except RemoteError as error:
            await self._fail(error)
        except LinkClosed:
            raise
        except Exception:
            logger.exception("the handler of %s failed", kind)
            await self._fail(RemoteError("internal", "the handler failed"))

    async def _send(self, message: Message, *, end: bool = False) -> None:
        while not self.credit.may_send:
            self._granted = trio.Event()
            await self._granted.wait()
        body = b"" if message.body is None else encode_body(message.body)
        self.credit.spend(len(body) + len(message.payload))
        await self._put(FrameKind.ITEM, body, message.payload, end=end)

    async def _fail(self, error: RemoteError) -> None:
        body = encode_body(
            {"code": error.code[:64], "message": error.message[:4096], "data": error.data}
        )
        await self._put(FrameKind.ERROR, body, end=True)

    async def _put(
        self, kind: FrameKind, body: bytes = b"", payload: Buffer = b"", *, end: bool = False
    ) -> None:
        try:
            await self._port.send(kind, self._number, body, payload, end=end)
        except LinkClosed as error:
            self._link.down(str(error))  # before the handler ends, which may ask why
            raise
