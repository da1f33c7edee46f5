"""The chains that one node is the head of, as they are mended and asked for again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from inference.errors import GenerationError
from inference.generation import GenerateRequest
from mesh import chains
from mesh.chains import Chains, StagedModel
from mesh.explain import Explanations
from mesh.forward.wire import ChainHop
from mesh.relay.generator import ChainGenerator
from mesh.relay.messages import OPEN

DIGEST = "d" * 64
REQUEST = GenerateRequest(model="m", prompt_tokens=tuple(range(20)), max_tokens=12, ignore_eos=True)


def view_of(world: Any) -> Callable[[], Any]:
    def place(peer: Any) -> Any:
        node = SimpleNamespace(peer=peer, load_of=lambda _: SimpleNamespace(active=0))
        return SimpleNamespace(holding=world.stages[peer].range, node=node)

    def view() -> Any:
        stages = [place(peer) for peer in world.stages if peer not in world.dead]
        return SimpleNamespace(models=[SimpleNamespace(digest=DIGEST, stages=stages)], nodes={})

    return view


class Heads:
    """Chains of a world's first node, over stages whose names say which layers they hold."""

    def __init__(self, world: Any, authority: Any) -> None:
        self.world = world
        self.chains = Chains(
            world.relays[next(iter(world.stages))],
            authority.identity("head"),
            view=view_of(world),
            slots=4,
            queue=4,
            activations="f32",
            on_load=lambda: None,
        )
        manifest: Any = SimpleNamespace(
            name="m", digest=DIGEST, layers=8, context_length=512, vocabulary_size=64
        )
        tokenizer: Any = SimpleNamespace(decode=lambda ids: "x" * len(ids), eos_token_ids=())
        self.chains.add_model(StagedModel(manifest, tokenizer))
        self.explanations = Explanations()

    async def ask(self, *route: Any, at: Callable[[int], None] = lambda _: None) -> list[Any]:
        """Who worked, in the order of the layers and then of the tokens."""
        ranges = [(peer, self.world.stages[peer].range) for peer in route]
        hops = [ChainHop(peer=peer, first=r.first, last=r.last) for peer, r in ranges]
        run = self.chains.run("m", DIGEST, hops)
        self.explanations.heads("r", run.seconds)
        made = 0
        async for event in run.generate(REQUEST):
            made += event.token_id is not None
            at(made)
        return [part.peer for part in run.parts((0, made))]


@pytest.mark.parametrize("when", ["busy", "idle"])
def test_a_request_goes_over_the_nodes_that_were_chosen_for_it(
    toys: Any, authority: Any, when: str
) -> None:
    """Also when a chain over them was mended before, and the node that was lost is back."""

    async def main() -> None:
        async with toys.open_world() as world:
            head = await world.add("head", 0, 2, 8)
            one, other = [await world.add(name, 2, 6, 8) for name in ("one", "other")]
            tail = await world.add("end", 6, 8, 8)
            heads = Heads(world, authority)
            assert await heads.ask(head, one, tail) == [head, one, tail]

            def lose(made: int) -> None:
                if made == 4:
                    world.cut(head, one)

            if when == "busy":
                assert await heads.ask(head, one, tail, at=lose) == [head, one, other, tail]
            else:
                world.cut(head, one)
            assert await heads.ask(head, other, tail) == [head, other, tail]
            assert await heads.ask(head, one, tail) == [head, other, tail]  # it is still away
            world.cuts.clear()
            assert await heads.ask(head, one, tail) == [head, one, tail]
            assert await heads.ask(head, other, tail) == [head, other, tail]
            await world.empty()

    toys.run(main)


def test_a_chain_that_a_request_is_on_its_way_to_does_not_make_room_for_another(
    toys: Any, authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "MAX_CHAINS", 1)
    go_on = threading.Event()
    tokenize = ChainGenerator._tokenize

    def slowly(self: ChainGenerator, request: GenerateRequest) -> list[int]:
        go_on.wait(10)
        return tokenize(self, request)

    monkeypatch.setattr(ChainGenerator, "_tokenize", slowly)

    async def main() -> None:
        async with toys.open_world() as world:
            head = await world.add("head", 0, 2, 8)
            one, other = [await world.add(name, 2, 6, 8) for name in ("one", "other")]
            tail = await world.add("end", 6, 8, 8)
            heads = Heads(world, authority)
            async with trio.open_nursery() as nursery:

                async def first() -> None:
                    assert await heads.ask(head, one, tail) == [head, one, tail]

                nursery.start_soon(first)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(GenerationError) as caught:
                    await heads.ask(head, other, tail)
                assert caught.value.code == "overloaded"
                go_on.set()
            assert await heads.ask(head, other, tail) == [head, other, tail]

    toys.run(main)


@pytest.mark.parametrize("when", ["idle", "busy", "anew"])
def test_a_first_stage_that_is_unloaded_leaves_the_memory(
    toys: Any, authority: Any, when: str
) -> None:
    """Whatever its sessions do then; what they took can be asked for afterwards."""

    async def main() -> None:
        async with toys.open_world() as world:
            head = await world.add("head", 0, 2, 8)
            one, _ = [await world.add(name, 2, 6, 8) for name in ("one", "other")]
            tail = await world.add("end", 6, 8, 8)
            heads = Heads(world, authority)
            kind, relay = type(world.stages[head]), world.relays[head]
            world.unload(head)
            while list(relay.hosts):
                await trio.lowlevel.checkpoint()
            unload = trio.Event()

            async def serve(task_status: Any) -> None:
                world.stages[head] = kind(0, 2, 8)
                async with relay.stage(world.stages[head], DIGEST, kept_bytes=1):
                    task_status.started()
                    await unload.wait()

            await world.nursery.start(serve)
            stage = weakref.ref(world.stages[head])

            def at(made: int) -> None:
                if made == 4 and when == "busy":
                    unload.set()
                elif made == 4 and when == "anew":
                    world.cut(head, one)
                    world.asked = lambda asked: unload.set() if asked == OPEN else None

            async def ask() -> str | None:
                try:
                    await heads.ask(head, one, tail, at=at)
                except GenerationError as error:
                    return error.code
                return None

            assert await ask() == (None if when == "idle" else "node_lost")
            unload.set()
            del world.stages[head]
            with trio.fail_after(3):
                while stage() is not None:
                    gc.collect()
                    await trio.sleep(0.02)
            assert not relay.heads
            assert [row[0] for row in heads.explanations.stage_seconds("r")][::2] == [head, tail]

    gc.collect()
    gc.freeze()  # looking through all that other tests have left takes long
    try:
        toys.run(main)
    finally:
        gc.unfreeze()
