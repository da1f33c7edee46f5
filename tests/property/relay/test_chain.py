"""Chains of toy stages: what comes out is what one uncut stage gives, whatever else goes on."""

from __future__ import annotations

import itertools
import random

import pytest
import trio

from inference.errors import GenerationError
from inference.generation import SamplingParams

SEEDED = SamplingParams(
    temperature=0.8,
    seed=(1 << 63) - 1,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={5: 2.0, 9: -100.0},
    logprobs=2,
)


def asks(toys, rng: random.Random, count: int, output: int = 30):
    found = []
    for number in range(count):
        prompt = [rng.randrange(64) for _ in range(rng.choice([1, 5, 40, 150]))]
        sampling = SEEDED if number % 2 else SamplingParams(temperature=0.0)
        found.append(toys.Ask(prompt, rng.randrange(1, output), sampling))
    return found


@pytest.mark.parametrize("cuts", [(0, 6), (0, 2, 6), (0, 1, 4, 6), (0, 1, 2, 3, 5, 6)])
@pytest.mark.parametrize("sessions", [1, 16])
def test_any_cut_gives_the_tokens_of_the_uncut_model(toys, cuts, sessions) -> None:
    async def main() -> None:
        async with toys.open_world(1) as world:
            nodes = [
                await world.add(f"n{i}", a, b, 6)
                for i, (a, b) in enumerate(itertools.pairwise(cuts))
            ]
            head = world.head(*nodes)
            wanted = asks(toys, random.Random(3), sessions)
            got: dict[int, list[int]] = {}

            async def client(number: int) -> None:
                await trio.sleep(number * 0.003)
                got[number] = await toys.collect(head, wanted[number])

            async with trio.open_nursery() as nursery:
                for number in range(sessions):
                    nursery.start_soon(client, number)
            for number, ask in enumerate(wanted):
                assert got[number] == ask.expected(6), number
            await world.empty()
            if sessions > 1:
                assert max(stage.largest for stage in world.stages.values()) > 2

    toys.run(main)


def test_resume_continues_as_if_nothing_had_happened(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a = await world.add("a", 0, 2, 4)
            b = await world.add("b", 2, 4, 4)
            head = world.head(a, b)
            whole = toys.Ask([1, 2, 3], 20, SEEDED)
            tokens = whole.expected(4)
            rest = toys.Ask([1, 2, 3], 20, SEEDED, resume=tokens[:8])
            assert await toys.collect(head, rest) == tokens[8:]

    toys.run(main)


@pytest.mark.parametrize("deaf", ["b", "c"])
def test_a_stage_that_does_not_take_the_form_makes_the_chain_exact(toys, deaf: str) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            nodes = [await world.add(name, 2 * at, 2 * at + 2, 6) for at, name in enumerate("abc")]
            table = world.hosts[nodes["abc".index(deaf)]].table
            table.takes = frozenset({"f32", "f16"})
            head = world.head(*nodes, activations="int8")
            wanted = [toys.Ask([n, n + 1, n + 2], 20) for n in range(3)]
            got: dict[int, list[int]] = {}

            async def client(number: int) -> None:
                got[number] = await toys.collect(head, wanted[number])

            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for number in range(3):
                        nursery.start_soon(client, number)
            assert [got[n] for n in range(3)] == [ask.expected(6) for ask in wanted]
            assert head.ring.activations == "f32"
            await world.empty()

    toys.run(main)


def test_a_stage_that_does_not_even_take_the_exact_form(toys) -> None:
    async def main() -> None:
        async with toys.open_world() as world:
            a, b = await world.add("a", 0, 2, 4), await world.add("b", 2, 4, 4)
            world.hosts[b].table.takes = frozenset()
            head = world.head(a, b, activations="f16")
            with trio.fail_after(5), pytest.raises(GenerationError, match="taken here"):
                await head.start(toys.Ask([1, 2, 3], 5).session())

    toys.run(main)
