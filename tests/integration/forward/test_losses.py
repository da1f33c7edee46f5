"""A node is lost in the middle of an answer, and the client does not notice."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from mesh.forward.answer import answer
from mesh.forward.events import Completed, Started
from mesh.forward.liveness import SILENCE_SECONDS
from mesh.forward.wire import KIND, Assignment, read_frame, read_receipt, write_call
from mesh.receipts import Bundle, Expected, VerifiedReceipt, verify
from mesh.receipts.record import NONCE_BYTES
from mesh.transport import Message
from mesh.transport.calls import Call

REQUEST = GenerateRequest(
    model="counting", prompt="count", max_tokens=60, sampling=SamplingParams(seed=3, logprobs=0)
)


async def collect(events: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(events):
        return [event async for event in events]


def tokens_of(events: list[Any]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


def check(node: Any, request: GenerateRequest, events: list[Any]) -> VerifiedReceipt:
    """The receipt as anybody can check it later."""
    done = events[-1]
    assert isinstance(done, Completed)
    return verify(
        Bundle.from_bytes(done.receipt),
        node.trust.roots,
        network=node.trust.network,
        now=node.around.clock(),
        expected=Expected(
            request=request,
            token_ids=done.token_ids,
            text="".join(event.text for event in tokens_of(events)),
        ),
    )


async def nodes(stack: AsyncExitStack, start: Any, *names: str) -> list[Any]:
    return [await stack.enter_async_context(start(name)) for name in names]


def break_at(node: Any, position: int, entry: Any) -> None:
    """When ``node`` makes the token at ``position``, its link to the entry node breaks."""

    def on_token(made: int) -> None:
        link = node.transport.link(entry.peer)
        if made == position and link is not None:
            link.down("the cable was pulled")

    node.engine.on_token = on_token


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"stop": (" 3637",)},  # appears after the cut
        {"stop": ("728é 3", "nowhere")},  # lies across it, and so does a character
        {"max_tokens": 21},
        {"max_tokens": 20},
    ],
    ids=["plain", "stop after", "stop across", "one more", "only the end is lost"],
)
@pytest.mark.parametrize("by", ["remote", "local"])
def test_the_answer_is_the_one_of_an_unbroken_run(
    run: Any, start: Any, change: dict[str, Any], by: str
) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one, two = await nodes(stack, start, "entry", "one", "two")
        request = REQUEST.model_copy(update=change)
        entry.routes = [two]
        unbroken = await collect(answer(request, "r0", entry.around))
        assert (unbroken[-2].finish.reason == "stop") == ("stop" in change)
        entry.routes = [one, two if by == "remote" else entry]
        break_at(one, 20, entry)
        events = await collect(answer(request, "r1", entry.around))
        assert "".join(e.text for e in tokens_of(events)) == "".join(
            e.text for e in tokens_of(unbroken)
        )
        assert events[-1].token_ids == unbroken[-1].token_ids
        assert events[-2].finish == unbroken[-2].finish
        expected = [event for event in tokens_of(unbroken) if event.token_id is not None]
        assert [e.logprob for e in tokens_of(events)[: len(expected)]] == [
            e.logprob for e in expected
        ]
        verified = check(entry, request, events)
        second = entry.routes[1]
        if len(events[-1].token_ids) > 20:
            assert [e.node for e in events if isinstance(e, Started)] == [one.peer, second.peer]
            assert [(s.node, s.tokens, s.evidence) for s in verified.segments] == [
                (one.peer, (0, 20), "lost"),
                (second.peer, (20, len(events[-1].token_ids)), "signer"),
            ]
            assert verified.segments[0].parts[0].serial is not None
            # Once tokens are out, only the weights that made them can carry on.
            assert [facts.digest for facts in entry.asked[-2:]] == [None, one.model.digest]
        assert entry.under_way == 0

    run(main)


@pytest.mark.parametrize("in_that_turn", [False, True])
def test_a_node_that_leaves_hands_over_and_signs_for_its_part(
    run: Any, start: Any, in_that_turn: bool
) -> None:
    """Also when a token was made in the turn in which it ends, which nobody gets from it."""

    async def main(stack: AsyncExitStack) -> None:
        entry, one, two, three = await nodes(stack, start, "entry", "one", "two", "three")
        entry.routes = [one, two, three]
        for node, position in ((one, 10), (two, 30)):
            node.engine.seconds_per_token = 0.001

            def on_token(made: int, node: Any = node, position: int = position) -> None:
                if made == position:
                    nursery.start_soon(node.server.leave, 0.0)
                    for session in node.server._sessions if in_that_turn else ():
                        session.scope.cancel()

            node.engine.on_token = on_token
        async with trio.open_nursery() as nursery:
            events = await collect(answer(REQUEST, "r", entry.around))
        verified = check(entry, REQUEST, events)
        first, second, last = verified.segments
        assert [s.evidence for s in verified.segments] == ["receipt", "receipt", "signer"]
        assert [s.name for s in verified.segments] == ["one", "two", "three"]
        assert first.tokens[1] >= 10 and second.tokens[1] >= 30 and last.tokens[1] == 60
        assert not verified.unsigned
        # It takes no new work, and says so in a way that lets others do it.
        entry.routes = [one, three]
        again = await collect(answer(REQUEST, "r2", entry.around))
        assert again[0] == Started(three.peer)

    run(main)


def test_a_node_that_leaves_lets_running_work_end(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one = await nodes(stack, start, "entry", "one")
        entry.routes = [one]

        def on_token(made: int) -> None:
            if made == 3:
                nursery.start_soon(one.server.leave, 20.0)

        one.engine.on_token = on_token
        async with trio.open_nursery() as nursery:
            events = await collect(answer(REQUEST, "r", entry.around))
        assert [n["node"] for n in events[-1].nodes] == [one.peer]

    run(main)


def test_a_peer_that_does_not_read_does_not_hold_a_node_that_leaves(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one = await nodes(stack, start, "entry", "one")
        link = await entry.transport.link_to(one.peer, one.addresses)

        async def call(response: str) -> Call:
            wanted = REQUEST.model_copy(update={"max_tokens": 100_000})
            assignment = Assignment(
                response=response, nonce=bytes(NONCE_BYTES), model_digest=one.model.digest
            )
            return await link.open(KIND, *write_call(wanted, assignment))

        def credit_is_used_up() -> bool:
            there = one.transport.link(entry.peer)
            calls = [] if there is None else there._serving.values()
            return any(not served.credit.may_send for served in calls)

        unread = await call("unread")
        while not credit_is_used_up():  # noqa: ASYNC110
            await trio.sleep(0.01)
        read = await call("read")
        assert read_frame((await anext(read)).body) is None  # the beat with which it begins
        assert isinstance(read_frame((await anext(read)).body), tuple)
        with trio.fail_after(10):
            await one.server.leave(0.0)
        last = [message async for message in read][-1]
        cut = read_frame(last.body)
        assert isinstance(cut, GenerationError) and cut.code == "node_lost"
        assert read_receipt(last.payload) is not None
        await unread.aclose()

    run(main)


def test_an_engine_that_fails_in_the_middle_is_carried_on_from(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one, two = await nodes(stack, start, "entry", "one", "two")
        entry.routes = [one, two]

        def on_token(made: int) -> None:
            if made == 5:
                raise RuntimeError("the device is on fire")

        one.engine.on_token = on_token
        events = await collect(answer(REQUEST, "r", entry.around))
        verified = check(entry, REQUEST, events)
        assert [s.evidence for s in verified.segments] == ["receipt", "signer"]
        assert one.server.active == 0

    run(main)


def test_with_nobody_left_the_error_is_honest(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one = await nodes(stack, start, "entry", "one")
        entry.routes = [one]
        break_at(one, 20, entry)
        got = []
        with pytest.raises(GenerationError) as caught:
            async with aclosing(answer(REQUEST, "r", entry.around)) as events:
                async for event in events:
                    got.append(event)
        assert caught.value.code == "node_lost"
        assert len(tokens_of(got)) == 20
        assert all(event.finish is None for event in tokens_of(got))
        assert entry.under_way == 0
        with trio.fail_after(5):
            while one.engine.running:  # noqa: ASYNC110 (polling is the test's business)
                await trio.sleep(0.01)

    run(main)


def test_a_busy_pause_of_a_second_loses_nothing(run: Any, start: Any) -> None:
    """The engine makes no token for longer than silence may last, and the beats go on."""

    async def main(stack: AsyncExitStack) -> None:
        entry, one, two = await nodes(stack, start, "entry", "one", "two")
        entry.routes = [one, two]
        one.engine.seconds_per_token = SILENCE_SECONDS * 1.5
        request = REQUEST.model_copy(update={"max_tokens": 1})
        events = await collect(answer(request, "r", entry.around))
        assert [n["node"] for n in events[-1].nodes] == [one.peer]

    run(main)


def test_doubled_frames_are_dropped(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one = await nodes(stack, start, "entry", "one")
        honest = one.server.handle

        async def twice(request: Any) -> AsyncGenerator[Message, None]:
            async with aclosing(honest(request)) as messages:
                async for message in messages:
                    yield message
                    if message.body[0] == 1:
                        yield message

        one.transport._services.streams["generate"] = twice
        entry.routes = [one]
        events = await collect(answer(REQUEST, "r", entry.around))
        assert len(tokens_of(events)) == 60
        check(entry, REQUEST, events)

    run(main)


def test_many_at_once_each_get_their_own(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        entry, one, two = await nodes(stack, start, "entry", "one", "two")
        entry.routes = [one, two]
        break_at(one, 45, entry)

        async def ask(seed: int) -> None:
            sampling = SamplingParams(seed=seed)
            request = REQUEST.model_copy(update={"sampling": sampling})
            events = await collect(answer(request, f"r{seed}", entry.around))
            assert events[-1].token_ids == tuple(one.engine.token(request, i) for i in range(60))
            check(entry, request, events)

        async with trio.open_nursery() as nursery:
            for seed in range(20):
                nursery.start_soon(ask, seed)

    run(main)
