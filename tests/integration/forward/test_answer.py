"""An answer from elsewhere is the answer from here, with a receipt that names who made it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import trio

from ca.naming import Role
from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from mesh.forward.answer import answer
from mesh.forward.events import Completed, Started
from mesh.forward.remote import RemoteGenerator
from mesh.forward.wire import Assignment
from mesh.receipts import verify_response
from mesh.transport import Message

REQUEST = GenerateRequest(
    model="counting",
    prompt="count, please",
    max_tokens=40,
    sampling=SamplingParams(seed=7, logprobs=0),
)


async def collect(events: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(events):
        return [event async for event in events]


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent))


def as_response(request: GenerateRequest, events: list[Any]) -> bytes:
    """The plain HTTP response that these events make."""
    done = events[-1]
    finish = events[-2].finish
    choice = {"index": 0, "text": text_of(events), "finish_reason": finish.reason}
    return json.dumps(
        {
            "model": request.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": finish.prompt_tokens,
                "completion_tokens": finish.completion_tokens,
            },
            "mesh": {
                "node": done.node,
                "nodes": done.nodes,
                "receipt": base64.b64encode(done.receipt).decode(),
                "token_ids": done.token_ids,
            },
        }
    ).encode()


def test_forwarded_and_local_answers_are_the_same(run: Any, start: Any, authority: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        far = await stack.enter_async_context(start("far"))
        answers = []
        for node in (entry, far):
            entry.routes = [node] if node is entry else [far]
            events = await collect(answer(REQUEST, "r1", entry.around))
            answers.append([e for e in events if isinstance(e, TokenEvent)])
            assert events[0] == Started(node.peer)
            done = events[-1]
            assert isinstance(done, Completed)
            assert done.node == node.peer
            assert [n["node"] for n in done.nodes] == [node.peer]
            assert done.token_ids == tuple(e.token_id for e in answers[-1])
            assert 0 < done.timings["first_token"] <= done.timings["total"]
            response = as_response(REQUEST, events)
            (verified,) = verify_response(response, authority.ca_pem, now=time.time())
            assert verified.certificate.name == node.identity.certificate.name
            assert verified.receipt.entry == entry.peer
        assert answers[0] == answers[1]
        assert len(answers[0]) == 40 and answers[0][0].logprob is not None
        assert entry.under_way == 0 and far.server.active == 0
        assert entry.asked[0].prompt_tokens > 0 and not entry.asked[0].exclude

    run(main)


def test_errors_come_through_as_they_were(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        far = await stack.enter_async_context(start("far"))
        far.engine.context = 3
        entry.routes = [far]
        with pytest.raises(GenerationError) as caught:
            await collect(answer(REQUEST, "r1", entry.around))
        assert caught.value.code == "context_length_exceeded"
        assert (caught.value.message, caught.value.param) == ("too long", "prompt")
        other = REQUEST.model_copy(update={"model": "unknown"})
        with pytest.raises(GenerationError) as caught:
            await collect(answer(other, "r2", entry.around))
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert entry.transport.link(far.peer) is not None

    run(main)


def test_a_request_goes_elsewhere_when_one_refuses_it(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        full = await stack.enter_async_context(start("full"))
        free = await stack.enter_async_context(start("free"))

        def refuse(position: int) -> None:
            raise GenerationError("overloaded", "full", retry_after=2.5)

        full.engine.on_token = refuse
        entry.routes = [full, free]
        events = await collect(answer(REQUEST, "r1", entry.around))
        assert events[0] == Started(free.peer)
        assert [n["node"] for n in events[-1].nodes] == [free.peer]
        assert entry.asked[1].exclude == {full.peer}
        entry.routes = [full]
        with pytest.raises(GenerationError) as caught:
            await collect(answer(REQUEST, "r2", entry.around))
        assert (caught.value.code, caught.value.retry_after) == ("overloaded", 2.5)

    run(main)


def test_roles_are_enforced(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        server = await stack.enter_async_context(start("server", roles=[Role.SERVE]))
        user = await stack.enter_async_context(start("user", roles=[Role.USE]))
        both = await stack.enter_async_context(start("both"))
        for asks, serves, message in (
            (server, both, "does not allow to send work"),
            (both, user, "does not allow it to serve"),
        ):
            asks.routes = [serves]
            with pytest.raises(GenerationError, match=message):
                await collect(answer(REQUEST, "r", asks.around))
            assert serves.engine.made == 0
        user.routes = [server]
        assert len(await collect(answer(REQUEST, "r", user.around))) == 42

    run(main)


def test_closing_stops_the_work_within_one_token(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        far = await stack.enter_async_context(start("far"))
        far.engine.seconds_per_token = 0.05
        entry.routes = [far]
        long = REQUEST.model_copy(update={"max_tokens": None})
        for how in ("close", "cancel"):
            if how == "close":
                async with aclosing(answer(long, "r", entry.around)) as events:
                    async for event in events:
                        if isinstance(event, TokenEvent) and event.token_id == 7 * 3 + 4:
                            break
            else:
                with trio.move_on_after(0.5):
                    await collect(answer(long, "r", entry.around))
            made = far.engine.made
            await trio.sleep(0.3)
            assert far.engine.made <= made + 1
            assert (far.engine.running, far.server.active, entry.under_way) == (0, 0, 0)

    run(main)


def test_a_node_that_changes_the_text_is_found_out(run: Any, start: Any) -> None:
    """The answer fails before its last event goes out: the client sees no ``finish``."""

    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        liar = await stack.enter_async_context(start("liar"))
        honest = liar.server.handle

        async def lie(request: Any) -> AsyncGenerator[Message, None]:
            async with aclosing(honest(request)) as messages:
                async for message in messages:
                    if message.body[0] == 1 and message.body[1] == 5:
                        message = Message([*message.body[:3], " 666", *message.body[4:]])
                    yield message

        liar.transport._services.streams["generate"] = lie
        entry.routes = [liar]
        events = []
        with pytest.raises(GenerationError, match="does not hold"):
            async with aclosing(answer(REQUEST, "r", entry.around)) as source:
                async for event in source:
                    events.append(event)
        tokens = [e for e in events if isinstance(e, TokenEvent)]
        assert len(tokens) == 39 and all(e.finish is None for e in tokens)

    run(main)


@pytest.mark.parametrize("frame", [None, [7], [1, 3, 1, "x"], [1, 0, -1, "x"], "text"])
def test_a_node_that_sends_nonsense_is_an_error(run: Any, start: Any, frame: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        odd = await stack.enter_async_context(start("odd"))

        async def nonsense(request: Any) -> AsyncGenerator[Message, None]:
            yield Message(frame)
            await trio.sleep_forever()

        odd.transport._services.streams["generate"] = nonsense
        entry.routes = [odd]
        with pytest.raises(GenerationError) as caught:
            await collect(answer(REQUEST, "r", entry.around))
        assert caught.value.code == "engine_failed"

    run(main)


def test_an_old_receipt_does_not_do_for_a_new_answer(run: Any, start: Any) -> None:
    """The same request, the same node, the same text: only the nonce tells them apart."""

    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        lazy = await stack.enter_async_context(start("lazy"))
        honest = lazy.server.handle
        receipts: list[Any] = []

        async def replay(request: Any) -> AsyncGenerator[Message, None]:
            async with aclosing(honest(request)) as messages:
                async for message in messages:
                    if message.payload:
                        receipts.append(message.payload)
                        message = Message(message.body, receipts[0])
                    yield message

        lazy.transport._services.streams["generate"] = replay
        entry.routes = [lazy]
        await collect(answer(REQUEST, "r1", entry.around))
        with pytest.raises(GenerationError, match="nonce"):
            await collect(answer(REQUEST, "r2", entry.around))

    run(main)


def test_other_weights_are_refused(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry = await stack.enter_async_context(start("entry"))
        far = await stack.enter_async_context(start("far"))
        link = await entry.transport.link_to(far.peer, far.addresses)
        for digest, works in (("cd" * 32, True), (None, True), ("00" * 32, False)):
            assignment = Assignment(response="r", nonce=bytes(16), model_digest=digest)
            remote = RemoteGenerator(link, assignment)
            if works:
                assert len(await collect(remote.generate(REQUEST))) == 40
            else:
                with pytest.raises(GenerationError) as caught:
                    await collect(remote.generate(REQUEST))
                assert caught.value.code == "model_not_found"

    run(main)
