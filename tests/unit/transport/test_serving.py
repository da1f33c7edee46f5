"""A call that is taken back before its turn has come is not begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

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
