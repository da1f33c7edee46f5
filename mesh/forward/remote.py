"""The asking side: a :class:`Generator` that is a peer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, TokenEvent
from mesh.forward.liveness import SILENCE_SECONDS, SILENCE_SLICES, SLICE_SECONDS
from mesh.forward.wire import (
    KIND,
    Assignment,
    WireError,
    read_frame,
    read_receipt,
    read_refusal,
    write_call,
)
from mesh.receipts import SignedReceipt
from mesh.transport import Lane, Link, LinkClosed, Message, RemoteError


class RemoteGenerator:
    """Runs one assignment on the node at the other end of ``link``.

    A lost link, and silence for :data:`SILENCE_SECONDS`, is GenerationError ``node_lost``; what the
    peer reports comes through unchanged; what it should not have sent is ``engine_failed``.
    :attr:`receipt` is there when the event with ``finish`` is, or after an error that came with the
    receipt of the tokens before it. It is not checked here.
    """

    def __init__(self, link: Link, assignment: Assignment) -> None:
        self._link = link
        self._assignment = assignment
        self.receipt: SignedReceipt | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        body, payload = write_call(request, self._assignment)
        due = len(self._assignment.resume)
        try:
            call = await self._link.open(KIND, body, payload, lane=Lane.CONTROL)
            try:
                while True:
                    message = await next_message(self._link, call)
                    frame = read_frame(message.body)
                    if frame is None:
                        continue
                    if isinstance(frame, GenerationError):
                        self.receipt = read_receipt(message.payload)
                        raise frame
                    position, event = frame
                    if position < due:
                        continue  # seen already
                    if position > due:
                        raise WireError(f"token {due} is missing")
                    if event.finish is not None:
                        self.receipt = read_receipt(message.payload)
                        yield event
                        return
                    due += 1
                    yield event
            finally:
                await call.aclose()
        except LinkClosed as error:
            raise GenerationError("node_lost", f"the link to {self._link.peer} was lost") from error
        except WireError as error:
            raise GenerationError("engine_failed", f"{self._link.peer}: {error}") from error
        except RemoteError as error:
            raise read_refusal(error.code, error.message, error.data) from error


async def next_message(link: Link, call: AsyncIterator[Message]) -> Message:
    """The next frame. Raises GenerationError ``node_lost`` after too long a silence.

    A link on which anything else arrives is alive: a long prompt may still be on its way.
    """
    silent = 0
    while silent < SILENCE_SLICES:
        with trio.move_on_after(SLICE_SECONDS):
            try:
                return await anext(call)
            except StopAsyncIteration:
                raise WireError("the answer ended without an end") from None
        silent = silent + 1 if link.silent_for >= SLICE_SECONDS else 0
        if silent == 1:  # a beat is overdue, or nearly
            link.prod()
    raise GenerationError("node_lost", f"{link.peer} has been silent for {SILENCE_SECONDS} s")
