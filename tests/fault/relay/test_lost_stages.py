"""Stages are processes here, killed or stopped in the middle of a sentence, with spares."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from inference.engines.stage_text import StageTextEngine
from inference.errors import GenerationError
from inference.generation import GenerateRequest
from inference.paged import StageConfig
from inference.tokenizer import Tokenizer
from mesh.relay.chain import ChainHead
from mesh.relay.generator import ChainGenerator
from mesh.relay.ring import Hop

PROGRAM = Path(__file__).with_name("stage_process.py")
_spec = importlib.util.spec_from_file_location("stage_process", PROGRAM)
assert _spec is not None and _spec.loader is not None
program: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

CUTS = (0, 10, 20, 30)
TOKENS = 40
PLENTY = 64 << 20  # bytes of output that a stage keeps
LITTLE = 64 << 10  # 28 tokens of the demo model


class Stages:
    """Processes with the second and third range, two of each, and the head in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept_bytes = PLENTY
        self.now = time.time()
        self.processes: list[subprocess.Popen[str]] = []
        self.by_peer: dict[str, subprocess.Popen[str]] = {}
        self.ranges: dict[str, tuple[int, int]] = {}
        self.addresses: dict[str, list[str]] = {}
        self.usable: set[str] = set()

    def start(self, *wanted: tuple[str, int, int]) -> None:
        """Start processes, each a name with a range, side by side."""
        started = []
        for name, first, last in wanted:
            arguments = [name, first, last, self.now, self.folder, self.kept_bytes]
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
            started.append((process, (first, last)))
        for process, layers in started:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            self.by_peer[said["peer"]] = process
            self.ranges[said["peer"]] = layers
            self.addresses[said["peer"]] = said["addresses"]
            self.usable.add(said["peer"])

    def introduce(self) -> None:
        line = json.dumps(self.addresses) + "\n"
        for process in self.processes:
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()

    def spare(self, model: str, first: int, last: int, unwanted: frozenset[str]) -> str | None:
        found = (
            peer for peer in sorted(self.usable - unwanted) if self.ranges[peer] == (first, last)
        )
        return next(found, None)

    def held(self, peer: str) -> dict[str, int]:
        """What a stage holds of sessions."""
        process = self.by_peer[peer]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        held: dict[str, int] = json.loads(process.stdout.readline())
        return held

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Stages]:
    made = Stages(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def wanted(seed: int) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {
            "model": "m",
            "prompt": "Once upon a time, in a small village by the sea, " * 4,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "sampling": {"temperature": 0.8, "seed": seed, "presence_penalty": 0.3},
        }
    )


async def read(generator: Any, request: GenerateRequest, at: Any = None) -> tuple[list[int], float]:
    """Tokens, and the longest pause between two of them."""
    tokens: list[int] = []
    stamps: list[float] = []
    async for event in generator.generate(request):
        tokens.append(event.token_id)
        stamps.append(time.perf_counter())
        if at is not None:
            at(len(tokens))
    return tokens, max(b - a for a, b in itertools.pairwise(stamps))


async def both(
    chain: ChainGenerator,
    requests: list[GenerateRequest],
    at: Any,
    results: dict[int, tuple[list[int], float]],
) -> None:
    """Two clients at once; ``at`` hears of the first one's tokens."""

    async def client(number: int) -> None:
        results[number] = await read(chain, requests[number], at if number == 0 else None)

    with trio.fail_after(60):
        async with trio.open_nursery() as clients:
            clients.start_soon(client, 0)
            clients.start_soon(client, 1)


def unbroken(requests: list[GenerateRequest]) -> list[list[int]]:
    async def main() -> list[list[int]]:
        engine = await StageTextEngine.open(program.model(), StageConfig(kv_bytes=96 << 20))
        try:
            return [(await read(engine, request))[0] for request in requests]
        finally:
            await engine.aclose()

    return trio.run(main)


async def open_chain(stages: Stages, nursery: trio.Nursery) -> ChainGenerator:
    """A head in this process, on the first usable stage of each range."""
    manifest = program.model()

    async def run(task_status: Any) -> None:
        stage = program.open_stage(manifest, CUTS[0], CUTS[1])
        async with (
            program.open_node("head", stages.now, stages.folder) as (transport, relay, known),
            relay.stage(stage, manifest.digest, kept_bytes=stages.kept_bytes),
        ):
            known.update(stages.addresses)
            stages.addresses[transport.peer_id] = transport.addresses
            stages.introduce()
            hops = [Hop(transport.peer_id, CUTS[0], CUTS[1])]
            for first, last in itertools.pairwise(CUTS[1:]):
                peer = stages.spare("", first, last, frozenset())
                assert peer is not None
                hops.append(Hop(peer, first, last))
            head = ChainHead(relay, manifest.digest, manifest.layers, hops, spare=stages.spare)
            task_status.started(ChainGenerator(head, manifest, Tokenizer(manifest)))
            await trio.sleep_forever()

    return await nursery.start(run)


@pytest.mark.slow
def test_stages_are_lost_whose_neighbours_have_not_kept_all(stages: Stages) -> None:
    """Then sessions are computed from their token ids again."""
    stages.kept_bytes = LITTLE
    requests = [wanted(1), wanted(2)]
    expected = unbroken(requests)
    ranges = [*itertools.pairwise(CUTS[1:])] * 2
    stages.start(*((f"s{number}", *layers) for number, layers in enumerate(ranges)))
    rng = random.Random(9)

    async def main() -> list[float]:
        pauses = []
        async with trio.open_nursery() as nursery:
            chain = await open_chain(stages, nursery)
            for rank in (2, 1):
                moment = rng.randrange(3, TOKENS - 3)
                results: dict[int, tuple[list[int], float]] = {}

                def lose(count: int, rank: int = rank, moment: int = moment) -> None:
                    if count == moment:
                        victim = chain.head.route[rank].peer
                        stages.usable.discard(victim)
                        stages.by_peer[victim].kill()

                await both(chain, requests, lose, results)
                for number in range(2):
                    assert results[number][0] == expected[number]
                pauses.append(results[0][1])
            nursery.cancel_scope.cancel()
        return pauses

    pauses = trio.run(main)
    print("pauses:", [f"{pause:.2f} s" for pause in pauses])
    # Noticing takes at most 1.5 s; the rest is a machine that may be busy.
    assert max(pauses) < 8


@pytest.mark.slow
def test_without_a_spare_the_client_is_told_and_the_rest_goes_on(stages: Stages) -> None:
    request = wanted(3)
    ranges = itertools.pairwise(CUTS[1:])
    stages.start(*((f"s{number}", *layers) for number, layers in enumerate(ranges)))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            chain = await open_chain(stages, nursery)
            victim = chain.head.route[2].peer
            survivor = chain.head.route[1].peer
            lost: list[float] = []
            before: list[dict[str, int]] = []

            def lose(count: int) -> None:
                if count == 10:
                    before.append(stages.held(survivor))
                    lost.append(time.perf_counter())
                    stages.by_peer[victim].kill()

            with pytest.raises(GenerationError) as caught, trio.fail_after(60):
                await read(chain, request, lose)
            assert caught.value.code == "node_lost"
            assert time.perf_counter() - lost[0] < 10
            assert chain.head.idle
            assert all(before[0].values())
            with trio.fail_after(5):
                while (  # noqa: ASYNC110 (polling is the test's business)
                    chain.load().cache_used or any(stages.held(survivor).values())
                ):
                    await trio.sleep(0.01)
            assert stages.by_peer[survivor].poll() is None
            nursery.cancel_scope.cancel()

    trio.run(main)
