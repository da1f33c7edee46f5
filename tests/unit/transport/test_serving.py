"""A call that is taken back before its turn is not begun; one that breaks finds its link down."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from mesh.transport.errors import LinkClosed
from mesh.transport.frames import Frame, FrameKind, encode_body
from mesh.transport.messages import Message
from mesh.transport.serving import CallHead, Request, ServedCall, Services


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_cancelled_before_its_turn_is_not_begun(cancelled: bool) -> None:
    begun: list[Any] = []
    sent: list[FrameKind] = []
    over: list[int] = []

    async def handler(request: Request) -> Message:
        begun.append(request.message.body)
        return Message("done")

    async def send(kind: FrameKind, *_: Any, **__: Any) -> None:
        sent.append(kind)

    services = Services()
    services.add("ask", handler)
    link: Any = SimpleNamespace(call_served=over.append, peer=None, certificate=None)
    port: Any = SimpleNamespace(send=send)
    frame = Frame(FrameKind.CALL, 7, encode_body({"k": "ask", "b": 1}), b"")

    async def main() -> None:
        call = ServedCall(link, port, 7, 0)
        if cancelled:
            call.scope.cancel()
        await call.run(services, frame, CallHead.of(frame))

    trio.run(main)
    assert over == [7]
    assert (begun, sent) == (([], []) if cancelled else ([1], [FrameKind.ITEM]))


def test_a_handler_whose_answer_cannot_be_sent_finds_the_link_down() -> None:
    """The streams of a connection break a turn before its link knows."""
    downs: list[str] = []
    found: list[list[str]] = []

    async def handler(request: Request) -> AsyncGenerator[Message, None]:
        try:
            yield Message("a part")
        finally:
            found.append(list(downs))

    async def send(*_: Any, **__: Any) -> None:
        raise LinkClosed("reset")

    services = Services()
    services.add_stream("ask", handler)
    link: Any = SimpleNamespace(
        call_served=lambda number: None, down=downs.append, peer=None, certificate=None
    )
    port: Any = SimpleNamespace(send=send)

    async def main() -> None:
        call = ServedCall(link, port, 7, 0)
        call.grant(1 << 20)
        frame = Frame(FrameKind.CALL, 7, encode_body({"k": "ask", "b": 1}), b"")
        await call.run(services, frame, CallHead.of(frame))

    trio.run(main)
    assert found == [["reset"]]
