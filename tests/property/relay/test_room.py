"""KV memory that is short, clients that are slow or go away, stages that fail."""

from __future__ import annotations

import threading

import outcome
import pytest
import trio

from inference.errors import GenerationError
from inference.generation import SamplingParams


def test_sessions_grow_give_way_and_all_end_right(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            # Room for 512 tokens, and five sessions that come to 270 each.
            a = await world.add("a", 0, 2, 4, blocks=64)
            b = await world.add("b", 2, 4, 4, blocks=32)
            head = world.head(a, b)
            sampling = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.1)
            wanted = [toys.Ask([n, n + 1], 268 + n, sampling) for n in range(5)]
            got = {}

            async def client(number: int) -> None:
                got[number] = await toys.collect(head, wanted[number])

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number in range(5):
                        nursery.start_soon(client, number)
            assert [got[n] for n in range(5)] == [ask.expected(4) for ask in wanted]
            await world.empty()

    toys.run(main)


def test_a_queue_is_bounded_and_a_place_is_given_on(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head = world.head(a, b, slots=1, queue=1)
            first = toys.Ask([1], 100).session()
            await head.start(first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(toys.collect, head, toys.Ask([2], 3))
                await trio.sleep(0.02)
                with pytest.raises(GenerationError) as caught:
                    await head.start(toys.Ask([3], 3).session())
                assert caught.value.code == "overloaded"
                assert caught.value.retry_after
                head.end(first)
            await world.empty()
            # A chain whose memory is another head's says so.
            other = await world.add("other", 0, 2, 4)
            theirs = world.head(other, b)
            sessions = [toys.Ask([1], 300).session() for _ in range(3)]
            for session in sessions:
                await theirs.start(session)
            with pytest.raises(GenerationError) as caught:
                await head.start(toys.Ask([1] * 200, 60).session())
            assert caught.value.code == "overloaded"
            for session in sessions:
                theirs.end(session)
            await world.empty()

    toys.run(main)


def test_without_a_queue_places_are_given_and_nobody_waits(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 4, 4)
            head = world.head(a, slots=2, queue=0)
            sessions = [toys.Ask([n], 100).session() for n in range(2)]
            for session in sessions:
                await head.start(session)
            with pytest.raises(GenerationError) as caught:
                await head.start(toys.Ask([3], 3).session())
            assert caught.value.code == "overloaded"
            head.end(sessions[0])
            assert await toys.collect(head, toys.Ask([3], 3)) == toys.Ask([3], 3).expected(4)
            head.end(sessions[1])
            await world.empty()

    toys.run(main)


def test_a_client_that_goes_away_at_any_moment_leaves_nothing(toys) -> None:
    async def main() -> None:
        async with toys.open_world(3, delay=0.002) as world:
            a = await world.add("a", 0, 2, 6)
            b = await world.add("b", 2, 4, 6)
            c = await world.add("c", 4, 6, 6)
            head = world.head(a, b, c)
            for moment in range(12):
                with trio.move_on_after(moment * 0.004):
                    await toys.collect(head, toys.Ask(list(range(60)), 400))
            assert await toys.collect(head, toys.Ask([1], 5)) == toys.Ask([1], 5).expected(6)
            await world.empty()

    toys.run(main)


def test_a_client_that_does_not_read_stalls_nobody(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head = world.head(a, b)
            slow = toys.Ask([9], 50)
            session = slow.session()
            await head.start(session)
            quick = toys.Ask([1], 120)
            assert await toys.collect(head, quick) == quick.expected(4)
            tokens = [(await session.get()).token for _ in range(50)]
            assert tokens == slow.expected(4)
            head.end(session)
            await world.empty()

    toys.run(main)


def test_a_session_that_a_stage_fails_on_fails_alone(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head = world.head(a, b)
            ask = toys.Ask([1], 60)
            session, victim = ask.session(), toys.Ask([2], 60).session()
            await head.start(session)
            await head.start(victim)
            await victim.get()
            key = world.hosts[b].table.chains[head.ring.id].sessions[victim.number].key
            world.stages[b].broken.add(key)
            with pytest.raises(GenerationError) as caught:
                while True:
                    await victim.get()
            assert caught.value.code == "engine_failed"
            head.end(victim)
            assert [(await session.get()).token for _ in range(60)] == ask.expected(4)
            head.end(session)
            await world.empty()

    toys.run(main)


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_a_runtime_that_fails_fails_its_step_and_no_other(toys, where: str) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head, ask = world.head(a, b), toys.Ask([1], 20)
            for stage in (world.stages[b], world.stages[a]):
                stage.failing = where
                with pytest.raises(
                    GenerationError, match=f"the runtime fails at {where}"
                ) as caught:
                    await toys.collect(head, toys.Ask([2], 20))
                assert caught.value.code == "engine_failed"
                stage.failing = None
                assert await toys.collect(head, ask) == ask.expected(4)
            await world.empty()

    toys.run(main)


def test_a_stage_whose_failure_cannot_be_told_ends(toys) -> None:
    """It has nobody left to wait for: who unloads it, or stops the node, must not wait for ever."""

    class Untold(Exception):
        pass

    def untold(*_) -> None:
        raise Untold

    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 4, 4)
            world.stages[a].failing = "finish"
            world.relays[a].refused = untold
            await toys.collect(world.head(a), toys.Ask([1], 5))

    with pytest.raises(ExceptionGroup) as caught:
        with_bound(main)
    assert caught.group_contains(Untold)


def with_bound(main) -> None:
    """:func:`trio.run`, of what no cancelling may end."""
    ended: list[outcome.Outcome[None]] = []
    thread = threading.Thread(
        target=lambda: ended.append(outcome.capture(trio.run, main)), daemon=True
    )
    thread.start()
    thread.join(20)
    assert ended, "still running"
    ended[0].unwrap()
