"""A response whose entry node is lost is fetched at another node."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from mesh.forward import kept
from mesh.forward.answer import answer
from mesh.forward.events import Completed, Started
from mesh.forward.following import Follower, NotKept, Wanted, find
from mesh.forward.wire import Assignment
from mesh.receipts import Bundle, Expected, verify
from mesh.receipts.record import NONCE_BYTES

REQUEST = GenerateRequest(
    model="counting", prompt="count", max_tokens=60, sampling=SamplingParams(seed=3)
)
LONG = REQUEST.model_copy(update={"max_tokens": 100_000})
KEY = kept.key_of("the secret")


async def until(holds: Any) -> None:
    while not holds():  # noqa: ASYNC110
        await trio.sleep(0.01)


async def look(node: Any, after: int, key: bytes = KEY, response: str = "r") -> Follower:
    return await find(
        Wanted(response, key, after),
        identity=node.identity,
        trust=node.trust,
        here=node.server.kept,
        links=list(node.transport.links.values()),
        clock=time.time,
    )


async def rest(follower: Follower) -> list[Any]:
    async with aclosing(follower.events()) as events:
        return [event async for event in events]


def whole_text(engine: Any) -> str:
    text: str = engine.decode([engine.token(REQUEST, i) for i in range(60)])
    return text


async def lose_entry(
    stack: AsyncExitStack, start: Any, holder: Any, at: int, request: GenerateRequest = REQUEST
) -> list[TokenEvent]:
    """What a client has read when the node that it spoke to vanishes after ``at`` tokens."""
    read: list[TokenEvent] = []
    async with AsyncExitStack() as doomed:
        entry = await doomed.enter_async_context(start("entry"))
        entry.routes = [holder]
        events: AsyncGenerator[Any, None] = answer(request, "r", entry.around, keep=KEY)
        async for event in events:
            if isinstance(event, TokenEvent):
                read.append(event)
            if len(read) == at:
                break
        # Without a word: the generator is not closed before the links are.
        entry.transport._links.shut()
        await events.aclose()
    return read


def test_the_rest_comes_from_another_node(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01
        other = await stack.enter_async_context(start("other"))
        await other.transport.link_to(holder.peer, holder.addresses)
        read = await lose_entry(stack, start, holder, 20)
        with pytest.raises(NotKept) as wrong:
            await look(other, 20, kept.key_of("another secret"))
        assert wrong.value.reason == "not_found"
        with pytest.raises(NotKept) as early:
            await look(other, 61)
        assert early.value.reason == "gone"
        # Twice: the client may lose its second node too; and at the node that keeps it.
        for node in (other, other, holder):
            follower = await look(node, 20)
            assert follower.request == REQUEST
            events = await rest(follower)
            assert isinstance(events[0], Started) and events[0].node == holder.peer
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            text = "".join(event.text for event in [*read, *tokens])
            assert text == whole_text(holder.engine)
            done = events[-1]
            assert isinstance(done, Completed) and len(done.token_ids) == 60
            verify(
                Bundle.from_bytes(done.receipt),
                other.trust.roots,
                network="test",
                now=time.time(),
                expected=Expected(request=REQUEST, token_ids=done.token_ids, text=text),
            )
        (end,) = [e for e in await rest(await look(other, 60)) if isinstance(e, TokenEvent)]
        assert end.finish is not None and end.token_id is None

    run(main)


def test_a_response_that_its_client_gives_up_is_not_kept(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01
        entry = await stack.enter_async_context(start("entry"))
        entry.routes = [holder]
        async with aclosing(answer(REQUEST, "r", entry.around, keep=KEY)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    break
        await until(lambda: holder.engine.running == 0)
        assert holder.engine.made < 20
        with pytest.raises(NotKept):
            await look(entry, 1)

    run(main)


def test_nothing_is_recorded_without_a_key(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        entry = await stack.enter_async_context(start("entry"))
        entry.routes = [holder]
        async with aclosing(answer(REQUEST, "r", entry.around)) as events:
            async for _ in events:
                assert not holder.server.kept._recordings

    run(main)


def test_it_is_kept_for_a_while_only(run: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "KEEP_SECONDS", 0.5)

    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01
        await lose_entry(stack, start, holder, 5, LONG)
        await until(lambda: holder.server.kept._kept)
        assert holder.engine.running == 1
        # While somebody reads, it goes on.
        follower = await look(holder, 5)
        began = trio.current_time()
        async with aclosing(follower.events()) as events:
            async for _ in events:
                if trio.current_time() - began > 1.0:
                    break
        assert holder.engine.running == 1
        await until(lambda: holder.engine.running == 0)
        await until(lambda: not holder.server.active)
        assert not holder.server.kept._recordings
        with pytest.raises(NotKept):
            await look(holder, 5)

    run(main)


def test_a_reader_that_leaves_at_once_reads_no_more(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01
        other = await stack.enter_async_context(start("other"))
        await other.transport.link_to(holder.peer, holder.addresses)
        await lose_entry(stack, start, holder, 5, LONG)
        follower = await look(other, 5)
        (recording,) = holder.server.kept._recordings.values()
        assert recording.readers == 1
        async with aclosing(follower.events()) as events:
            async for _ in events:
                break
        with trio.fail_after(10):
            await until(lambda: recording.readers == 0)

    run(main)


def test_an_entry_node_that_comes_back_alive_wants_it_no_more(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01
        entry = await stack.enter_async_context(start("entry"))
        entry.routes = [holder]
        with pytest.raises(GenerationError):
            async with aclosing(answer(LONG, "r", entry.around, keep=KEY)) as events:
                async for event in events:
                    if isinstance(event, TokenEvent) and event.token_id == LONG.sampling.seed * 3:
                        entry.transport.link(holder.peer).down("the network is gone")
        await until(lambda: holder.server.kept._kept)
        assert holder.engine.running == 1
        await entry.transport.link_to(holder.peer, holder.addresses)
        await until(lambda: holder.engine.running == 0)

    run(main)


def test_an_entry_node_may_be_back_before_its_loss_is_dealt_with(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        entry = await stack.enter_async_context(start("entry"))
        link = await holder.transport.link_to(entry.peer, entry.addresses)
        assignment = Assignment(
            response="r", nonce=bytes(NONCE_BYTES), model_digest=holder.model.digest, keep=KEY
        )
        stopped = trio.Event()
        recording = holder.server.kept.begin(link, assignment, LONG, stopped.set)
        link.down("replaced by a new link from the same peer")
        await holder.transport.link_to(entry.peer, entry.addresses)
        with trio.fail_after(10):
            await holder.server.kept.keep(entry.peer, recording)
        assert stopped.is_set()
        assert not holder.server.kept._recordings

    run(main)


def test_many_of_them_make_room_for_new_ones(
    run: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MAX_KEPT", 2)

    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        entry = await stack.enter_async_context(start("entry"))
        entry.routes = [holder]
        for number in range(4):
            events = answer(REQUEST, f"r{number}", entry.around, keep=KEY)
            async with aclosing(events):
                async for _ in events:
                    pass
        await until(lambda: len(holder.server.kept._kept) == 2)
        for number, there in enumerate((False, False, True, True)):
            if there:
                await (await look(entry, 30, response=f"r{number}")).aclose()
            else:
                with pytest.raises(NotKept):
                    await look(entry, 30, response=f"r{number}")

    run(main)


def test_a_reader_hears_when_the_generation_fails(run: Any, start: Any) -> None:
    async def main(stack: AsyncExitStack) -> None:
        holder = await stack.enter_async_context(start("holder"))
        holder.engine.seconds_per_token = 0.01

        def fail(position: int) -> None:
            if position == 40:
                raise GenerationError("engine_failed", "the device is gone")

        holder.engine.on_token = fail
        await lose_entry(stack, start, holder, 5)
        with pytest.raises(GenerationError) as caught:
            await rest(await look(holder, 5))
        assert caught.value.message == "the device is gone"

    run(main)


def test_a_proof_is_for_one_asker_and_one_holder() -> None:
    proofs = {
        kept.proof_of(key, response, asker=asker, holder=holder)
        for key in (KEY, kept.key_of("other"))
        for response in ("r", "s")
        for asker in ("a", "b")
        for holder in ("a", "b")
    }
    assert len(proofs) == 16
