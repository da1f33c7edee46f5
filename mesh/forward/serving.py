"""The serving side: other nodes' requests, run here.

Token events go out one frame each, the moment they exist; between them goes a beat when there is
nothing else to say. Each generation runs in a task of its own, so that waiting for a token can be
given up (to send a beat) without disturbing the engine, and so that it can outlive the link to its
entry node (see :mod:`mesh.forward.kept`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import trio

from ca.naming import Role
from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from mesh.forward.execution import Execution, Run
from mesh.forward.kept import KeptResponses, Recording
from mesh.forward.liveness import BEAT_SECONDS
from mesh.forward.wire import (
    BEAT,
    KIND,
    Assignment,
    WireError,
    read_call,
    write_cut,
    write_event,
    write_receipt,
)
from mesh.identity import Identity
from mesh.transport import LinkUp, Message, RemoteError, Request, Transport

_log = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # for the receipts of what is handed over to get out
_AT_ONCE = 64 << 10  # bytes of a request that are read in the event loop; more would hold it up

_Item = TokenEvent | GenerationError


@dataclass(eq=False)
class _Session:
    """A generation that is running for a peer."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class ForwardServer:
    """Runs requests for peers whose certificate allows them to send work.

    ``find`` gives what is to run a request, or raises GenerationError (``model_not_found``).
    """

    def __init__(
        self,
        identity: Identity,
        find: Callable[[GenerateRequest, Assignment], Run],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._find = find
        self._clock = clock
        self.kept = KeptResponses(identity.peer_id)
        self._nursery: trio.Nursery | None = None
        self._sessions: set[_Session] = set()
        self._idle = trio.Event()
        self._idle.set()
        self._leaving = False

    @property
    def active(self) -> int:
        """How many generations are running for peers."""
        return len(self._sessions)

    @asynccontextmanager
    async def serving(self, transport: Transport) -> AsyncIterator[None]:
        """Serve inside; leaving the context ends what is still running. Enter it once."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            transport.serve_stream(KIND, self.handle)
            self.kept.serve(transport)
            nursery.start_soon(self._watch_links, transport)
            try:
                yield
            finally:
                self._nursery = None
                nursery.cancel_scope.cancel()

    async def _watch_links(self, transport: Transport) -> None:
        async with transport.events() as events:
            async for event in events:
                if isinstance(event, LinkUp):
                    self.kept.entry_lives(event.link)

    async def leave(self, patience: float) -> None:
        """Take no new work, let running work end for ``patience`` seconds, then hand over the rest.

        A session that is handed over goes on at another node from its last token; this node signs
        for its part.
        """
        self._leaving = True
        with trio.move_on_after(patience):
            await self._idle.wait()
        for session in self._sessions:
            session.scope.cancel()
        # Whoever reads gets its receipt at once. A peer that grants no credit would have this node
        # wait for ever; its call ends with the link.
        with trio.move_on_after(CUT_SECONDS):
            await self._idle.wait()

    async def handle(self, request: Request) -> AsyncGenerator[Message, None]:
        """One call: beats and token events, then the end with its receipt."""
        nursery = self._nursery
        if nursery is None or self._leaving:
            raise RemoteError("node_lost", "the node is starting or leaving")
        session = _Session()
        self._sessions.add(session)
        if self._idle.is_set():
            self._idle = trio.Event()
        record: Recording | None = None
        going_on = False
        try:
            yield Message(BEAT)  # before anything that takes time
            execution, wanted, assignment = await self._admit(request)
            record = self.kept.begin(request.link, assignment, wanted, session.scope.cancel)
            # No buffer: an engine that is faster than the link waits for it.
            send, receive = trio.open_memory_channel[_Item](0)
            nursery.start_soon(_pump, execution, wanted, send, session.scope)
            position = execution.position
            try:
                while True:
                    item: _Item | None = None
                    with trio.move_on_after(BEAT_SECONDS):
                        item = await _receive(receive)
                        if record is not None:
                            record.add(item, execution.receipt)
                    if item is None:
                        yield Message(BEAT)
                    elif isinstance(item, GenerationError):
                        receipt = execution.cut(position)
                        yield Message(write_cut(item), write_receipt(receipt) if receipt else b"")
                        return
                    else:
                        yield _message(position, item, execution)
                        position += item.token_id is not None
                        if item.finish is not None:
                            return
            finally:
                # A call that is given up on a living link is not wanted any more.
                lost = not request.link.is_up
                if record is not None and lost and not record.over and self._nursery is not None:
                    going_on = True
                    nursery.start_soon(self._go_on, session, record, receive, execution)
                else:
                    receive.close()
        finally:
            ended = record is not None and record.over and record.error is None
            if record is not None and self._nursery is not None and (going_on or ended):
                nursery.start_soon(self.kept.keep, request.peer, record)
            elif record is not None:
                self.kept.forget(request.peer, record)
            if not going_on:
                self._end(session)

    async def _go_on(
        self,
        session: _Session,
        record: Recording,
        receive: trio.MemoryReceiveChannel[_Item],
        execution: Execution,
    ) -> None:
        """Record what is still made after the entry node was lost."""
        _log.info("response %s goes on without its entry node", record.assignment.response)
        try:
            with receive:
                while not record.over:
                    record.add(await _receive(receive), execution.receipt)
        finally:
            self._end(session)

    def _end(self, session: _Session) -> None:
        session.scope.cancel()
        self._sessions.discard(session)
        if not self._sessions:
            self._idle.set()

    async def _admit(self, request: Request) -> tuple[Execution, GenerateRequest, Assignment]:
        if Role.USE not in request.certificate.roles:
            raise RemoteError("forbidden", "the certificate does not allow to send work")
        if Role.SERVE not in self._identity.certificate.roles:
            raise RemoteError("forbidden", "this node's certificate does not allow it to serve")
        body, payload = request.message.body, request.message.payload
        try:
            if len(payload) > _AT_ONCE:
                wanted, assignment = await trio.to_thread.run_sync(read_call, body, payload)
            else:
                wanted, assignment = read_call(body, payload)
            run = self._find(wanted, assignment)
        except WireError as error:
            raise RemoteError("malformed", str(error)[:1000]) from error
        except GenerationError as error:
            raise RemoteError(
                error.code,
                error.message,
                {"param": error.param, "retry_after": error.retry_after},
            ) from error
        _log.debug("response %s: running for %s", assignment.response, request.peer)
        execution = Execution(
            run, assignment, entry=request.peer, identity=self._identity, clock=self._clock
        )
        return execution, wanted, assignment


async def _receive(source: trio.MemoryReceiveChannel[_Item]) -> _Item:
    try:
        return await source.receive()
    except trio.EndOfChannel:
        return GenerationError("node_lost", "the node is leaving")


async def _pump(
    execution: Execution,
    request: GenerateRequest,
    send: trio.MemorySendChannel[_Item],
    scope: trio.CancelScope,
) -> None:
    """Run the engine, pass on what it makes, and keep its failures from the other sessions."""
    with scope:
        async with send:
            try:
                async with aclosing(execution.generate(request)) as events:
                    async for event in events:
                        await send.send(event)
            except trio.BrokenResourceError:
                return  # the caller has gone
            except GenerationError as error:
                await send.send(error)
            except Exception:
                _log.exception("a generation failed")
                await send.send(GenerationError("engine_failed", "the node's engine failed"))


def _message(position: int, event: TokenEvent, execution: Execution) -> Message:
    receipt = execution.receipt if event.finish is not None else None
    return Message(
        write_event(position, event), write_receipt(receipt) if receipt is not None else b""
    )
