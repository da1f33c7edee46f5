"""Stages are lost at random moments, also while a loss is being mended, with late frames about."""

from __future__ import annotations

import itertools
import random

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.errors import GenerationError
from inference.generation import SamplingParams
from mesh.relay.chain import MAX_REPAIRS
from mesh.relay.frames import STEP_KIND
from mesh.relay.messages import CLOSE, FENCE, GROW, OPEN, REPLAY

SEEDED = SamplingParams(temperature=0.9, seed=11, frequency_penalty=0.4)


async def ring(world, spares: int = 2, activations: str = "f32", **options):
    """A chain of four stages, with spares for all but the first."""
    first = await world.add("head", 0, 2, 8)
    rest = []
    for name, a, b in (
        (
            "b",
            2,
            3,
        ),
        ("c", 3, 6),
        ("d", 6, 8),
    ):
        rest.append(await world.add(name, a, b, 8, **options))
        for number in range(spares):
            await world.add(f"{name}{number}", a, b, 8, **options)
    return world.head(first, *rest, activations=activations)


def asks(toys, rng: random.Random, count: int):
    return [
        toys.Ask(
            [rng.randrange(64) for _ in range(rng.choice([1, 3, 30, 100]))],
            rng.randrange(5, 40),
            SEEDED if number % 2 else SamplingParams(temperature=0.0),
        )
        for number in range(count)
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    losses=st.lists(
        st.tuples(st.floats(0, 0.06), st.sampled_from(["kill", "cut"]), st.integers(1, 3)),
        min_size=1,
        max_size=2,
    ),
    # Another one while it is being mended: at which message of that, and whom.
    during=st.none() | st.tuples(st.integers(1, 12), st.integers(1, 3)),
    repeated=st.sampled_from([0.0, 0.1]),
    slow=st.sampled_from([0.0, 0.003]),
    sessions=st.integers(1, 6),
    kept=st.sampled_from([1 << 20, 1200]),
    activations=st.sampled_from(["f32", "f16"]),
)
def test_no_token_is_lost_or_doubled(
    toys, seed, losses, during, repeated, slow, sessions, kept, activations
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with toys.open_world(seed, delay=0.001) as world:
            head = await ring(world, spares=3, kept_bytes=kept, activations=activations)
            wanted = asks(toys, rng, sessions)
            got: dict[int, list[int]] = {}
            for stage in world.stages.values():
                stage.seconds = rng.choice([0.0, slow])  # frames wait before a slow one
            mending = 0
            steps = MAX_REPAIRS  # a session may have as many rows out of place

            def asked(kind: str) -> None:
                nonlocal mending
                mending += kind in (FENCE, REPLAY) or (kind == OPEN and mending > 0)
                if during is not None and mending == during[0]:
                    mending += 1
                    world.kill(head.route[during[1]].peer)

            def again(kind: str) -> float | None:
                nonlocal steps
                if rng.random() >= repeated or (kind == STEP_KIND and not steps):
                    return None
                steps -= kind == STEP_KIND
                return rng.choice([0.0, 0.01, 0.05])

            world.asked, world.again = asked, again

            async def client(number: int) -> None:
                await trio.sleep(rng.random() * 0.02)
                got[number] = await toys.collect(head, wanted[number])

            async def trouble() -> None:
                for wait, what, rank in losses:
                    await trio.sleep(wait)
                    if head.idle:
                        return
                    if what == "kill":
                        world.kill(head.route[rank].peer)
                    else:
                        world.cut(head.route[rank - 1].peer, head.route[rank].peer)

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trouble)
                    for number in range(sessions):
                        nursery.start_soon(client, number)
            for number, ask in enumerate(wanted):
                assert got[number] == ask.expected(8), number
            await world.empty()

    toys.run(main)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_only_the_lost_range_is_computed_again(toys, rank) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, spares=1)
            ask = toys.Ask(list(range(60)), 40)
            session = ask.session()
            await head.start(session)
            tokens = [(await session.get()).token for _ in range(10)]
            lost = head.route[rank].peer
            world.kill(lost)
            while len(tokens) < 40:
                tokens.append((await session.get()).token)
            head.end(session)
            assert tokens == ask.expected(8)
            for node, stage in world.stages.items():
                if node in {hop.peer for hop in head.route}:
                    # The last token drawn is not computed; the row under way may be, twice.
                    assert 99 <= stage.positions <= 102, node
            assert [route[rank].peer for _, route in session.routes] == [
                lost,
                head.route[rank].peer,
            ]

    toys.run(main)


def test_a_stage_that_hangs_is_replaced_and_a_pause_is_not_a_loss(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world)
            ask = toys.Ask([1, 2, 3], 200)
            session = ask.session()
            await head.start(session)
            tokens = [(await session.get()).token for _ in range(5)]
            paused = head.route[1].peer
            world.hung[paused] = trio.Event()
            await trio.sleep(1.0)
            world.hung.pop(paused).set()
            tokens += [(await session.get()).token for _ in range(5)]
            assert head.route[1].peer == paused

            world.hung[paused] = trio.Event()
            before = trio.current_time()
            while head.route[1].peer == paused:
                tokens.append((await session.get()).token)
            assert trio.current_time() - before < 2.5
            world.hung.pop(paused).set()  # what it sends now is late
            while len(tokens) < 200:
                tokens.append((await session.get()).token)
            head.end(session)
            assert tokens == ask.expected(8)
            await world.empty()

    toys.run(main)


def test_a_session_that_begins_at_a_stage_that_hangs_need_not_wait_for_it(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, spares=1)
            hung = head.route[2].peer
            world.hung[hung] = trio.Event()
            ask = toys.Ask([1, 2, 3], 20)
            before = trio.current_time()
            assert await toys.collect(head, ask) == ask.expected(8)
            assert trio.current_time() - before < 4.0
            assert head.route[2].peer != hung

            world.hung[head.route[2].peer] = trio.Event()  # and now there is no other
            before = trio.current_time()

            async def client() -> None:
                with pytest.raises(GenerationError) as caught:
                    await toys.collect(head, ask)
                assert caught.value.code == "node_lost"

            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(client)
            assert trio.current_time() - before < 6.0

            # They come back, and to what was asked of them meanwhile, in whatever order.
            for event in world.hung.values():
                event.set()
            world.hung.clear()
            await trio.sleep(0.1)
            await world.empty()

    toys.run(main)


def test_without_a_spare_there_is_an_error_and_nothing_stays_behind(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, spares=0)
            sessions = [toys.Ask([1, 2, 3], 100).session() for _ in range(3)]
            for session in sessions:
                await head.start(session)
            await sessions[0].get()
            world.kill(head.route[2].peer)
            for session in sessions:
                with pytest.raises(GenerationError) as caught, trio.fail_after(10):
                    while True:
                        await session.get()
                assert caught.value.code == "node_lost"
                head.end(session)
            await world.empty()
            with pytest.raises(GenerationError):
                await head.start(toys.Ask([1], 5).session())

    toys.run(main)


@pytest.mark.parametrize("seed", range(6))
def test_a_mending_that_fails_leaves_nothing_behind(toys, seed: int) -> None:
    """What it has opened for a session is freed, also when that has ended before it was opened."""

    async def main() -> None:
        async with toys.open_world(seed=seed, delay=0.02) as world:
            head = await ring(world, spares=0)
            await world.add("b0", 2, 3, 8)
            sessions = [toys.Ask([1, 2, 3], 200).session() for _ in range(4)]
            for session in sessions:
                await head.start(session)
            await sessions[0].get()
            last = head.route[3].peer

            def asked(kind: str) -> None:
                if kind == OPEN:
                    for session in sessions:
                        head.end(session)
                elif kind == REPLAY and last not in world.dead:
                    world.kill(last)

            world.asked = asked
            world.kill(head.route[1].peer)
            with trio.fail_after(10):
                while not head.failed:  # noqa: ASYNC110 (polling is the test's business)
                    await trio.sleep(0.01)
            await world.empty()

    toys.run(main)


def test_the_head_is_lost(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, spares=0)
            session = toys.Ask([1, 2, 3], 100).session()
            await head.start(session)
            await session.get()
            world.kill(head.route[0].peer)
            await world.empty()

    toys.run(main)


def test_a_stage_that_is_unloaded_hands_over_at_once(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, spares=1)
            ask = toys.Ask([1, 2, 3], 60)
            session = ask.session()
            await head.start(session)
            tokens = [(await session.get()).token for _ in range(5)]
            for rank in (1, 2, 3):
                before = trio.current_time()
                leaving = head.route[rank].peer
                world.unload(leaving)
                while head.route[rank].peer == leaving:
                    tokens.append((await session.get()).token)
                assert trio.current_time() - before < 0.4
                tokens += [(await session.get()).token for _ in range(5)]
            while len(tokens) < 60:
                tokens.append((await session.get()).token)
            assert tokens == ask.expected(8)
            head.end(session)
            await world.empty()

            session = toys.Ask([1, 2, 3], 400).session()
            await head.start(session)
            world.unload(head.route[0].peer)
            with pytest.raises(GenerationError) as caught:
                while True:
                    await session.get()
            assert caught.value.code == "node_lost"
            assert head.failed
            head.end(session)
            await world.empty()

    toys.run(main)


def test_a_replay_holds_up_no_other_chain(toys) -> None:
    """The spare of a long session goes on with its own sessions between the pieces."""

    async def main() -> None:
        async with toys.open_world() as world:
            one, other = [await world.add(name, 0, 2, 4) for name in ("a", "b")]
            lost, spare = [await world.add(name, 2, 4, 4) for name in ("c", "d")]
            world.stages[spare].seconds = 0.003
            long = toys.Ask([n % 64 for n in range(450)], 40)
            beside = toys.Ask([1, 2, 3], 120)
            steps: list[int] = []  # of the spare, at each token of the session beside
            begun = trio.Event()

            async def tokens(head, ask, each) -> list[int]:
                session = ask.session()
                await head.start(session)
                found: list[int] = []
                while True:
                    drawn = await session.get()
                    found.append(drawn.token)
                    each(len(found))
                    if drawn.reason is not None:
                        head.end(session)
                        return found

            def count(_: int) -> None:
                steps.append(world.hosts[spare].steps)
                begun.set()

            def lose(made: int) -> None:
                if made == 5:
                    world.stages[spare].seconds = 0.01  # what comes meanwhile has to wait
                    world.kill(lost)

            async def first() -> None:
                assert await tokens(world.head(one, lost), long, lose) == long.expected(4)

            async def second() -> None:
                assert await tokens(world.head(other, spare), beside, count) == beside.expected(4)

            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(second)
                    await begun.wait()
                    nursery.start_soon(first)
            assert max(b - a for a, b in itertools.pairwise(steps)) <= 3

    toys.run(main)


def test_a_chain_is_in_use_while_a_session_begins_anew(toys) -> None:
    """And when it is shut down then, the client is told."""

    async def main() -> None:
        async with toys.open_world(delay=0.02) as world:
            head = await ring(world, kept_bytes=1)  # too little to send anything again
            session = toys.Ask([1, 2, 3], 40).session()
            await head.start(session)
            for _ in range(5):
                await session.get()
            world.kill(head.route[2].peer)
            with trio.fail_after(5):
                while head.active:  # noqa: ASYNC110 (polling is the test's business)
                    await trio.sleep(0.001)
            assert not head.idle
            head.close()
            with pytest.raises(GenerationError) as caught, trio.fail_after(5):
                while True:
                    await session.get()
            assert caught.value.code == "node_lost"
            assert head.idle
            await world.empty()

    toys.run(main)


def test_who_waits_for_room_gets_it_when_those_that_run_begin_anew(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            first = await world.add("head", 0, 2, 4, kept_bytes=1)
            lost, _ = [await world.add(name, 2, 4, 4, blocks=32) for name in ("b", "c")]
            world.stages[first].seconds = 0.002
            head = world.head(first, lost)
            running = toys.Ask([n % 64 for n in range(200)], 250)
            waiting = toys.Ask([n % 50 for n in range(200)], 5)
            session = running.session()
            await head.start(session)
            given_back, tried = 0, trio.Event()

            async def returning(kind: str, _) -> None:
                nonlocal given_back
                given_back += kind == CLOSE
                if given_back == 2:  # after its first try, and after one at the door
                    tried.set()

            async def client() -> None:
                assert await toys.collect(head, waiting) == waiting.expected(4)

            world.returning = returning
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client)
                    tokens = [(await session.get()).token for _ in range(5)]
                    await tried.wait()
                    assert head.active == 1
                    world.stages[first].seconds = 0.0
                    world.kill(lost)
                    while len(tokens) < 250:
                        tokens.append((await session.get()).token)
                    assert tokens == running.expected(4)
                    head.end(session)
            await world.empty()

    toys.run(main)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stage_is_lost_while_sessions_stand_still_for_lack_of_room(toys, rank: int) -> None:
    """They have all the tokens that they have room for: the stage that takes over has to see."""

    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 6)
            b, _ = [await world.add(name, 2, 4, 6, blocks=34) for name in ("b", "spare-b")]
            c, _ = [await world.add(name, 4, 6, 6) for name in ("c", "spare-c")]
            head = world.head(a, b, c)
            asks = [toys.Ask([n, n + 1], 400) for n in range(2)]
            sessions = [ask.session() for ask in asks]
            for session in sessions:
                await head.start(session)
            with trio.fail_after(20):
                while not any(s.starved and len(s.tokens) > s.capacity for s in sessions):
                    await trio.lowlevel.checkpoint()
                world.kill(head.route[rank].peer)
                for ask, session in zip(asks, sessions, strict=True):
                    tokens = [(await session.get()).token for _ in range(400)]
                    assert tokens == ask.expected(6)
                    head.end(session)
            await world.empty()

    toys.run(main)


def test_a_client_that_leaves_while_its_chain_is_mended_costs_no_stage_its_place(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world)
            session = toys.Ask([1, 2, 3], 400).session()
            await head.start(session)
            await session.get()

            async def leaving(kind: str) -> None:
                if kind == REPLAY:
                    head.end(session)
                    await trio.sleep(0.02)

            world.leaving = leaving
            world.kill(head.route[1].peer)
            route = [hop.peer for hop in head.route[2:]]
            with trio.fail_after(5):
                while head.route[1].peer in world.dead:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                await head._mender.wait_steady()
            assert [hop.peer for hop in head.route[2:]] == route
            await world.empty()

    toys.run(main)


def test_room_is_asked_for_again_when_who_gave_it_is_lost_meanwhile(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world)
            slow, lost = head.route[1].peer, head.route[3].peer
            answered, go_on = trio.Event(), trio.Event()

            async def returning(kind: str, peer) -> None:
                if (kind, peer) == (GROW, slow):
                    answered.set()
                    await go_on.wait()

            world.returning = returning
            ask = toys.Ask([1, 2, 3], 400)
            session = ask.session()
            await head.start(session)
            with trio.fail_after(10):
                await answered.wait()
                await trio.sleep(0.01)
                world.kill(lost)  # it has given room
                while head.route[3].peer == lost:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                await head._mender.wait_steady()
                go_on.set()
                assert [(await session.get()).token for _ in range(400)] == ask.expected(8)
            await world.empty()

    toys.run(main)


def test_a_refusal_of_room_does_not_concern_a_session_that_has_begun_anew(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            head = await ring(world, kept_bytes=1)
            stays, *others = [hop.peer for hop in head.route[1:]]
            asked, go_on = trio.Event(), trio.Event()

            async def leaving(kind: str) -> None:
                if kind == GROW:
                    asked.set()
                    await go_on.wait()

            world.leaving = leaving
            ask = toys.Ask([1, 2, 3], 400)
            session = ask.session()
            await head.start(session)
            number = session.number
            with trio.fail_after(10):
                await asked.wait()
                world.cut(*others)
                chain = world.hosts[stays].table.chains[head.ring.id]
                while number in chain.sessions or not head.active:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                go_on.set()  # and no stage knows it by that number
                assert [(await session.get()).token for _ in range(400)] == ask.expected(8)
            await world.empty()

    toys.run(main)


def test_a_session_that_gives_way_during_a_mending_begins_anew_once(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            first = await world.add("head", 0, 2, 6, kept_bytes=1)
            short = await world.add("b", 2, 4, 6, blocks=34, kept_bytes=1)
            lost, _ = [await world.add(name, 4, 6, 6) for name in ("c", "d")]
            head = world.head(first, short, lost)
            asks = [toys.Ask([n, n + 1], 400) for n in range(2)]
            sessions = [ask.session() for ask in asks]
            for session in sessions:
                await head.start(session)
            answers, fenced = 0, trio.Event()

            async def returning(kind: str, peer) -> None:
                nonlocal answers
                if (kind, peer) == (GROW, short):
                    answers += 1
                    if answers == 2:
                        await fenced.wait()
                elif (kind, peer) == (FENCE, short):
                    fenced.set()
                    while head.active > 1:  # noqa: ASYNC110
                        await trio.sleep(0.001)

            async def client(number: int) -> None:
                tokens = [(await sessions[number].get()).token for _ in range(400)]
                assert tokens == asks[number].expected(6)

            world.returning = returning
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for number in range(2):
                        nursery.start_soon(client, number)
                    while any(len(s.tokens) <= s.capacity for s in sessions):  # noqa: ASYNC110
                        await trio.sleep(0.001)
                    world.kill(lost)
            assert fenced.is_set()
            await world.empty()

    toys.run(main)
