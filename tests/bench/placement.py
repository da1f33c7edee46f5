"""Prediction against reality: what the planner says of 1, 2 and 3 stages, and what they do.

Each stage is a process of its own on this machine. Speeds are measured as a node measures them when
it has loaded a stage, delays as a node measures them on its links; more delay is added to every
message between stages. The reference of each figure is the prediction; the target is an error of a
quarter at most.

    python3 dev.py bench placement [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chain import CHAINS, CountingLinks, identity, model, open_stage

from inference.engines.stage_text import StageTextEngine
from inference.generation import Finish, GenerateRequest, SamplingParams
from inference.paged import StageConfig
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.gossip.advert import Wanted
from mesh.holdings import measure
from mesh.identity import PeerId, TrustStore
from mesh.loading import measure_stage
from mesh.relay.chain import ChainHead
from mesh.relay.generator import ChainGenerator
from mesh.relay.ring import Hop
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.routing.placement.facts import Connection, Machine, Network, Speed, Want
from mesh.routing.placement.from_view import want_of
from mesh.routing.placement.predict import Prediction, predict
from mesh.transport import Transport, TransportConfig
from mesh.transport.linkbench import ECHO
from mesh.wants import describe_model

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"
DELAYS = (0.0, 0.005, 0.020, 0.050)
PROMPT = 64
TOKENS = 48
TARGET = 0.75  # of the smaller to the larger of prediction and reality


class SlowLinks(CountingLinks):
    """Messages between stages leave so many seconds late."""

    delay = 0.0

    async def send(
        self, peer: PeerId, kind: str, body: Any, payload: Any = b"", **how: Any
    ) -> None:
        await trio.sleep(self.delay)
        await super().send(peer, kind, body, payload, **how)


@asynccontextmanager
async def open_node(
    name: str, now: float, folder: Path
) -> AsyncIterator[tuple[Transport, Relay, SlowLinks, dict[PeerId, Any]]]:
    own, root = identity(name, now)
    known: dict[PeerId, Any] = {}
    trust = TrustStore("bench", [root], folder / name)
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), own, trust) as transport:
        links = SlowLinks(transport, lambda peer: known.get(peer, ()))
        relay = Relay(links)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_relay, relay, transport)
            yield transport, relay, links, known
            nursery.cancel_scope.cancel()


async def work(name: str, first: int, last: int, now: float, folder: Path) -> None:
    """The life of a process that holds one stage: until its standard input ends."""
    manifest = model()
    stage = open_stage(manifest, first, last, 2)
    speed = measure_stage(stage)
    async with (
        open_node(name, now, folder) as (transport, relay, links, known),
        relay.stage(stage, manifest.digest),
    ):
        said = {"peer": transport.peer_id, "addresses": transport.addresses, "speed": speed}
        print(json.dumps(said), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            told = json.loads(line)
            known.update(told.get("addresses", {}))
            links.delay = told.get("delay", links.delay)
            print("ok", flush=True)


def per_layer(want: Want, first: int, last: int, speed: dict[str, float]) -> Speed:
    """As a node learns it from a holding."""
    head = want.model.head_layers if last == want.model.layers else 0.0
    return Speed(
        speed["prefill_seconds"] / (last - first), speed["decode_seconds"] / (last - first + head)
    )


async def generate(source: Any, number: int) -> Finish:
    request = GenerateRequest(
        model="bench",
        prompt_tokens=tuple(1000 + (number * 7919 + i * 104_729) % 40_000 for i in range(PROMPT)),
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )
    finish: Finish | None = None
    async with aclosing(source.generate(request)) as events:
        async for event in events:
            finish = event.finish
    if finish is None:
        raise RuntimeError("no end")
    return finish


async def tokens_per_second(source: Any, runs: int) -> float:
    found = []
    for number in range(runs + 1):
        finish = await generate(source, number)
        if number:  # the first one warms up
            found.append((finish.completion_tokens - 1) / finish.decode_seconds)
    return statistics.median(found)


class Bench:
    def __init__(self, manifest: ModelManifest, folder: Path, runs: int) -> None:
        self.manifest, self.folder, self.runs = manifest, folder, runs
        wanted = Wanted.model_validate(
            {**describe_model(manifest), "version": 1, "publisher": "bench"}
        )
        self.want = want_of(wanted)
        self.figures: list[dict[str, Any]] = []

    def take(self, stages: int, delay: float, predicted: Prediction, actual: float) -> None:
        guess = predicted.tokens_per_second
        error = abs(guess - actual) / actual
        print(
            f"{stages} stages, {delay * 1e3:.0f} ms added: predicted {guess:.1f}, actual "
            f"{actual:.1f} tokens/s, off by {error:.0%}{'' if error < 0.25 else '  MISSED'}"
        )
        self.figures.append(
            {
                "figure": f"tokens per second, {stages} stages, {delay * 1e3:.0f} ms added",
                "unit": "tokens/s",
                "ours": actual,
                "reference": "predicted",
                "reference_value": guess,
                "ratio": min(guess, actual) / max(guess, actual),
                "target": TARGET,
                "runs": self.runs,
            }
        )

    async def whole(self) -> None:
        engine = await StageTextEngine.open(
            self.manifest, StageConfig(threads=2, kv_bytes=512 << 20)
        )
        try:
            speed = per_layer(self.want, 0, self.manifest.layers, await measure(engine))
            machine = Machine(PeerId("here"), 1 << 40, {self.manifest.digest: speed})
            guess = predict(self.want, [(machine, 0, self.manifest.layers)], Network({}))
            self.take(1, 0.0, guess, await tokens_per_second(engine, self.runs))
        finally:
            await engine.aclose()

    async def chain(self, stages: int) -> None:
        cuts, now = CHAINS[stages], time.time()
        ranges = list(itertools.pairwise(cuts))
        async with AsyncExitStack() as stack:
            transport, relay, links, known = await stack.enter_async_context(
                open_node(f"p-head-{stages}", now, self.folder)
            )
            stage = open_stage(self.manifest, *ranges[0], 2)
            speeds = [await trio.to_thread.run_sync(measure_stage, stage)]
            await stack.enter_async_context(relay.stage(stage, self.manifest.digest))
            peers = [transport.peer_id]
            known[transport.peer_id] = transport.addresses
            workers: list[subprocess.Popen[str]] = []
            stack.callback(lambda: [(w.kill(), w.wait()) for w in workers])
            for first, last in ranges[1:]:
                worker = start_worker(f"p-{stages}-{first}", first, last, now, self.folder)
                workers.append(worker)
                assert worker.stdout is not None
                said = json.loads(await trio.to_thread.run_sync(worker.stdout.readline))
                peers.append(said["peer"])
                known[said["peer"]] = said["addresses"]
                speeds.append(said["speed"])
            route = [Hop(p, *layers) for p, layers in zip(peers, ranges, strict=True)]
            await self.tell(workers, {"addresses": known})
            head = ChainHead(
                relay, self.manifest.digest, self.manifest.layers, route, spare=lambda *_: None
            )
            generator = ChainGenerator(head, self.manifest, Tokenizer(self.manifest))
            await generate(generator, 99)
            rtt = statistics.median([await round_trip(transport, p) for p in peers[1:]])
            machines = [
                Machine(peer, 1 << 40, {self.manifest.digest: per_layer(self.want, *r, speed)})
                for peer, r, speed in zip(peers, ranges, speeds, strict=True)
            ]
            for delay in DELAYS:
                links.delay = delay
                await self.tell(workers, {"delay": delay})
                between = Connection(rtt / 2 + delay, 100e6)
                network = Network(dict.fromkeys(itertools.combinations(peers, 2), between))
                placed = [(m, *r) for m, r in zip(machines, ranges, strict=True)]
                guess = predict(self.want, placed, network, prompt=PROMPT)
                self.take(stages, delay, guess, await tokens_per_second(generator, self.runs))

    async def tell(self, workers: list[subprocess.Popen[str]], what: Any) -> None:
        for worker in workers:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps(what) + "\n")
            worker.stdin.flush()
            await trio.to_thread.run_sync(worker.stdout.readline)


async def round_trip(transport: Transport, peer: PeerId) -> float:
    link = transport.link(peer)
    assert link is not None
    times = []
    for _ in range(20):
        began = trio.current_time()
        await link.request(ECHO, None, b"")
        times.append(trio.current_time() - began)
    return statistics.median(times)


def start_worker(
    name: str, first: int, last: int, now: float, folder: Path
) -> subprocess.Popen[str]:
    arguments = map(str, (name, first, last, now, folder))
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="placement-") as folder:
        bench = Bench(model(), Path(folder), 2 if options.quick else 5)
        await bench.whole()
        for stages in (2, 3):
            await bench.chain(stages)
    if options.json:
        options.json.write_text(json.dumps(bench.figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, first, last, now, folder = sys.argv[2:]
        trio.run(work, name, int(first), int(last), float(now), Path(folder))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--json", type=Path)
        trio.run(main, parser.parse_args())
