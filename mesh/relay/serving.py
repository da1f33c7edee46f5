"""The relay on a node's transport: who may ask, and reading what peers send one way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import trio

from ca.certificate import Role
from mesh.relay.refusal import Refusal
from mesh.relay.service import NOTES, REQUESTS, Relay
from mesh.transport import (
    Link,
    LinkClosed,
    LinkDown,
    LinkUp,
    Message,
    RemoteError,
    Request,
    Transport,
)


async def serve_relay(
    relay: Relay,
    transport: Transport,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``relay`` over ``transport`` until cancelled. Call once per transport.

    Heads and stages must both be allowed to serve: a chain is work that nodes do together.
    """
    for kind in REQUESTS:
        transport.serve(kind, _handler(relay, kind))
    async with transport.events() as events, trio.open_nursery() as nursery:
        await nursery.start(relay.run)
        read: set[Link] = set()
        for link in list(transport.links.values()):
            _read_link(relay, link, read, nursery)
        task_status.started()
        async for event in events:
            if isinstance(event, LinkUp):
                _read_link(relay, event.link, read, nursery)
            elif isinstance(event, LinkDown):
                relay.link_down(event.peer)


def _handler(relay: Relay, kind: str) -> Callable[[Request], Awaitable[Message]]:
    async def handle(request: Request) -> Message:
        if Role.SERVE not in request.certificate.roles:
            raise RemoteError("forbidden", "the certificate does not allow to run stages")
        message = request.message
        try:
            return Message(await relay.answer(request.peer, kind, message.body, message.payload))
        except Refusal as refusal:
            raise RemoteError(refusal.code, refusal.message) from refusal

    return handle


def _read_link(relay: Relay, link: Link, read: set[Link], nursery: trio.Nursery) -> None:
    if link not in read and Role.SERVE in link.certificate.roles:
        read.add(link)
        nursery.start_soon(_read, relay, link, read)


async def _read(relay: Relay, link: Link, read: set[Link]) -> None:
    def taker(kind: str) -> Callable[[Message], None]:
        return lambda message: relay.take(link.peer, kind, message.body, message.payload)

    try:
        with ExitStack() as stack:
            for kind in NOTES:
                stack.enter_context(link.handle(kind, taker(kind)))
            await link.wait_down()
    except LinkClosed:
        pass
    read.discard(link)
