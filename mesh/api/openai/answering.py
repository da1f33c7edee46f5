"""Carrying out an :class:`Ask`: run its generations together, deliver what they make, stop in time.

Each generation has a task that pulls from ``Node.answer`` into one channel without a buffer; the
delivering side takes from it. So a client that reads slowly slows its own generations down, and
nothing piles up here. Everything lives in one nursery inside one call, never across a ``yield``:
when the client leaves, cancelling that nursery reaches each ``answer`` at once.

Nothing is sent before the first token, so whatever goes wrong until then is a real HTTP error.
After that it is an error event, and there is neither a ``finish_reason`` nor ``[DONE]``.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import trio
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.api.errors import ApiError, from_generation, internal_error, json_response
from mesh.api.openai.shapes import Json, Shape
from mesh.api.openai.translate import Ask
from mesh.forward.events import AnswerEvent, Completed, Started

logger = logging.getLogger(__name__)

# Proxies and clients give up on a silent connection after 30 to 60 s.
KEEPALIVE_SECONDS = 15.0
RESUME_HEADER = b"x-mesh-resume"  # has the secret with which the rest of a stream can be fetched


@dataclass(frozen=True)
class _Item:
    """Something that a generation made. ``event`` None: it has ended."""

    index: int
    event: AnswerEvent | ApiError | None


@dataclass
class _Choice:
    """How far one generation is. Checks that it keeps the contract of ``Node.answer``."""

    node: str | None = None
    finish: Finish | None = None
    record: Completed | None = None
    events: list[TokenEvent] = field(default_factory=list)

    def take(self, event: AnswerEvent | ApiError | None) -> TokenEvent | None:
        """The token event that came, if it was one. Raises ApiError when the answer failed."""
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Started) and self.finish is None:
            self.node = event.node
        elif isinstance(event, TokenEvent) and self.node is not None and self.finish is None:
            self.finish = event.finish
            return event
        elif isinstance(event, Completed) and self.finish is not None and self.record is None:
            self.record = event
        elif event is not None or self.record is None:
            logger.error("an answer broke its contract with %r after %r", event, self.finish)
            raise internal_error()
        return None


class Answering:
    """The ASGI response to one completion request. Use once.

    ``answer`` is that of :class:`mesh.api.ports.Node`. ``secret``: what the client needs to fetch
    the rest of a stream elsewhere; then each chunk says how many tokens there are so far, of which
    ``already`` are with the client, from an earlier stream.
    """

    def __init__(
        self,
        answer: Callable[[GenerateRequest, str], AsyncGenerator[AnswerEvent, None]],
        ask: Ask,
        shape: Shape,
        request_id: str,
        closing: trio.Event,
        *,
        secret: str | None = None,
        already: int = 0,
    ) -> None:
        self._answer = answer
        self._secret = secret
        self._already = already
        self._ask = ask
        self._shape = shape
        self._request_id = request_id
        self._closing = closing
        self._choices = [_Choice() for _ in ask.requests]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        output = _Output(send)
        failure: ApiError | None = None
        async with trio.open_nursery() as exchange:
            exchange.start_soon(_cancel_on_disconnect, receive, exchange.cancel_scope)
            async with trio.open_nursery() as work:
                sink, source = trio.open_memory_channel[_Item](0)
                work.start_soon(self._fail_on_closing, sink)
                for index, request in enumerate(self._ask.requests):
                    work.start_soon(self._run, index, request, sink)
                try:
                    if self._ask.stream:
                        await self._deliver_stream(source, output)
                    else:
                        await self._deliver_whole(source, output, scope, receive)
                except ApiError as error:
                    failure = error
                except ClientDisconnect:
                    logger.debug("request %s: the client stopped reading", self._request_id)
                except Exception:
                    logger.exception("request %s failed", self._request_id)
                    failure = internal_error()
                work.cancel_scope.cancel()
            # Said only after the other generations have stopped: when the client reads of the
            # failure, nothing works for it any more.
            if failure is not None:
                await output.fail(failure, scope, receive)
            exchange.cancel_scope.cancel()

    async def _run(
        self, index: int, request: GenerateRequest, sink: trio.MemorySendChannel[_Item]
    ) -> None:
        request_id = self._request_id if index == 0 else f"{self._request_id}-{index}"
        last: ApiError | None = None
        try:
            async with aclosing(self._answer(request, request_id)) as events:
                async for event in events:
                    await sink.send(_Item(index, event))
        except GenerationError as error:
            last = from_generation(error, self._ask.names)
        except Exception:
            logger.exception("request %s failed", request_id)
            last = internal_error()
        await sink.send(_Item(index, last))

    async def _fail_on_closing(self, sink: trio.MemorySendChannel[_Item]) -> None:
        await self._closing.wait()
        error = ApiError(
            503, "shutting_down", "this node is shutting down", headers={"retry-after": "1"}
        )
        await sink.send(_Item(0, error))

    async def _deliver_whole(
        self,
        source: trio.MemoryReceiveChannel[_Item],
        output: _Output,
        scope: Scope,
        receive: Receive,
    ) -> None:
        running = len(self._choices)
        while running:
            item = await source.receive()
            choice = self._choices[item.index]
            token = choice.take(item.event)
            if token is not None:
                choice.events.append(token)
            elif item.event is None:
                running -= 1
        choices = [
            self._shape.whole_choice(index, choice.events, choice.finish.reason)
            for index, choice in enumerate(self._choices)
            if choice.finish is not None
        ]
        body = self._shape.whole(choices, self._usage(), self._mesh())
        response = json_response(body, headers={"x-mesh-node": self._nodes_header()})
        await response(scope, receive, output.send)

    async def _deliver_stream(
        self, source: trio.MemoryReceiveChannel[_Item], output: _Output
    ) -> None:
        running = len(self._choices)
        made = self._already
        while running:
            item = await self._next(source, output)
            choice = self._choices[item.index]
            token = choice.take(item.event)
            if token is not None:
                made += token.token_id is not None
                if not output.streaming:
                    await output.start_stream(self._nodes_header(), self._secret)
                    # All of them, in order: clients that put chunks together learn from these
                    # how many choices there are.
                    openings = [self._shape.opening(index) for index in range(len(self._choices))]
                    if not self._already:
                        await output.events([self._shape.chunk(one) for one in openings if one])
                delta = self._shape.delta(item.index, token)
                if delta is not None:
                    chunk = self._shape.chunk(delta)
                    if self._secret is not None:
                        chunk["mesh_tokens"] = made
                    await output.events([chunk])
            elif item.event is None and choice.finish is not None:
                # Only now, after its record, is a choice known to have ended well.
                running -= 1
                last = self._shape.chunk(self._shape.closing(item.index, choice.finish.reason))
                if not running and not self._ask.include_usage:
                    # In the last chunk that has a choice: clients that did not ask for usage
                    # do not expect one without.
                    last["mesh"] = self._mesh()
                await output.events([last])
        if self._ask.include_usage:
            await output.events([{**self._shape.chunk(None, self._usage()), "mesh": self._mesh()}])
        await output.end_stream()

    async def _next(self, source: trio.MemoryReceiveChannel[_Item], output: _Output) -> _Item:
        """The next item; meanwhile comments that keep an open stream from looking dead."""
        if not output.streaming:
            return await source.receive()
        while True:
            with trio.move_on_after(KEEPALIVE_SECONDS):
                return await source.receive()
            await output.comment()

    def _nodes_header(self) -> str:
        nodes = dict.fromkeys(choice.node for choice in self._choices if choice.node is not None)
        return ", ".join(nodes)

    def _usage(self) -> Json:
        """Tokens of all choices; each prompt counts once, however many choices it has."""
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        firsts = finishes[:: self._ask.n]
        prompt = sum(finish.prompt_tokens for finish in firsts)
        completion = sum(finish.completion_tokens for finish in finishes)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(finish.cached_tokens for finish in firsts)
            },
        }

    def _mesh(self) -> Json:
        """The ``mesh`` field: that of choice 0, and where there are several, a list of all."""
        records = [
            _record(choice.record, request.sampling.seed)
            for choice, request in zip(self._choices, self._ask.requests, strict=True)
            if choice.record is not None
        ]
        mesh: dict[str, Any] = {"request": self._request_id, **records[0]}
        if len(records) > 1:
            mesh["receipts"] = [{"index": i, **record} for i, record in enumerate(records)]
        return mesh


def _record(record: Completed, seed: int) -> Json:
    return {
        "node": record.node,
        "nodes": list(record.nodes),
        "receipt": base64.b64encode(record.receipt).decode("ascii"),
        "timings": dict(record.timings),
        "token_ids": list(record.token_ids),
        "seed": seed,
    }


class _Output:
    """The response on its way out: nothing yet, a whole one, or a stream of events."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.streaming = False

    async def start_stream(self, node: str, secret: str | None) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would otherwise collect events
            (b"x-mesh-node", node.encode("latin-1")),
        ]
        if secret is not None:
            headers.append((RESUME_HEADER, secret.encode("latin-1")))
        self.streaming = True
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, events: Sequence[Json]) -> None:
        data = b"".join(b"data: " + to_json(event) + b"\n\n" for event in events)
        if data:
            await self._write(data)

    async def comment(self) -> None:
        await self._write(b": waiting\n\n")

    async def end_stream(self) -> None:
        await self._write(b"data: [DONE]\n\n", last=True)

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if self.streaming:
            await self._write(b"data: " + to_json(error.body()) + b"\n\n", last=True)
        else:
            await error.response()(scope, receive, self.send)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


async def _cancel_on_disconnect(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
