"""Prediction against reality: what the planner says of 1, 2 and 3 stages, and what they do.

Each stage is a process of its own on this machine; nodes reach each other through UDP proxies that
delay each datagram. Speeds are measured as a node measures them when it has loaded something, but
before each case, since a machine that has become busier meanwhile is no error of prediction; round
trips and bandwidth as it measures them on its links, delays included. One stage is a whole model,
asked through another node. The reference of each figure is the prediction; the target is an error
of a quarter at most.

    python3 dev.py bench placement [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chain import CHAINS, identity, model, open_stage

from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest, SamplingParams
from inference.paged import StageConfig
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.forward.execution import WholeModel
from mesh.forward.remote import RemoteGenerator
from mesh.forward.serving import ForwardServer
from mesh.forward.wire import Assignment
from mesh.gossip.advert import Wanted
from mesh.holdings import measure
from mesh.identity import PeerId, TrustStore
from mesh.loading import measure_stage
from mesh.receipts import ModelIdentity
from mesh.receipts.record import NONCE_BYTES
from mesh.relay.chain import ChainHead
from mesh.relay.generator import ChainGenerator, ChainRun
from mesh.relay.links import TransportLinks
from mesh.relay.ring import Hop
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.routing.placement.facts import Connection, Machine, Network, Speed, Want
from mesh.routing.placement.from_view import want_of
from mesh.routing.placement.predict import Prediction, predict
from mesh.transport import Link, Transport, TransportConfig, measure_link
from mesh.transport.linkbench import ECHO
from mesh.wants import describe_model

PROXY = Path(__file__).resolve().parents[1] / "fault" / "transport" / "udp_proxy.py"
LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"
DELAYS = (0, 5, 20, 50)  # ms added each way
PROMPT = 64
TOKENS = 32
KV = 128 << 20  # bytes
TARGET = 0.75  # of the smaller to the larger of prediction and reality


@asynccontextmanager
async def open_node(
    name: str, now: float, folder: Path
) -> AsyncIterator[tuple[Transport, Relay, dict[PeerId, Sequence[str]]]]:
    own, root = identity(name, now)
    known: dict[PeerId, Sequence[str]] = {}
    trust = TrustStore("bench", [root], folder / name)
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), own, trust) as transport:
        relay = Relay(TransportLinks(transport, lambda peer: known.get(peer, ())))
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_relay, relay, transport)
            yield transport, relay, known
            nursery.cancel_scope.cancel()


# -- other processes ------------------------------------------------------------------------------


async def work(name: str, first: int, last: int, now: float, folder: Path) -> None:
    """The life of a process that holds one stage, or the whole model: until its input ends."""
    manifest = model()
    async with AsyncExitStack() as stack:
        transport, relay, known = await stack.enter_async_context(open_node(name, now, folder))
        if (first, last) == (0, manifest.layers):
            engine = await open_whole(manifest)
            stack.push_async_callback(engine.aclose)
            own, _ = identity(name, now)
            run = WholeModel(engine, identity_of_model(manifest), own)
            server = ForwardServer(own, lambda request, assignment: run)
            await stack.enter_async_context(server.serving(transport))
            speed = partial(measure, engine)
        else:
            stage = open_stage(manifest, first, last, cores())
            await stack.enter_async_context(relay.stage(stage, manifest.digest))
            speed = partial(trio.to_thread.run_sync, measure_stage, stage)
        said = {"peer": transport.peer_id, "addresses": transport.addresses}
        print(json.dumps(said), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            told = json.loads(line)
            known.update(told)
            print(json.dumps({} if told else await speed()), flush=True)


def cores() -> int:
    return os.cpu_count() or 1


def identity_of_model(manifest: ModelManifest) -> ModelIdentity:
    return ModelIdentity(name=manifest.name, digest=manifest.digest, layers=manifest.layers)


async def open_whole(manifest: ModelManifest) -> StageTextEngine:
    return await StageTextEngine.open(manifest, StageConfig(threads=cores(), kv_bytes=KV))


class Process:
    """One that is told lines and answers each with one."""

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def heard(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("a process without output")
        line = await trio.to_thread.run_sync(self._process.stdout.readline)
        if not line:
            raise RuntimeError("a process of the benchmark has ended")
        return line

    async def tell(self, line: str) -> str:
        if self._process.stdin is None:
            raise RuntimeError("a process without input")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return await self.heard()

    async def speed(self) -> dict[str, float]:
        """Of a worker that is idle."""
        found: dict[str, float] = json.loads(await self.tell("{}"))
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


# -- what is compared -----------------------------------------------------------------------------


@dataclass
class Observed:
    """Tokens per second and seconds to the first one; where known what each stage and all hops
    together take in a step."""

    rate: float
    first: float
    stages: tuple[float, ...] = ()
    hops: float = 0.0


Measuring = Callable[[], Awaitable[dict[str, float]]]


@dataclass
class NodeSet:
    """One way to run the model: ``source`` makes a generator for one request, ``stages`` are peers
    with their layers and what measures their speed."""

    source: Any
    stages: list[tuple[PeerId, tuple[int, int], Measuring]]
    links: dict[PeerId, Link]  # from this process, to each of the others
    proxies: list[Process]


def per_layer(want: Want, first: int, last: int, speed: dict[str, float]) -> Speed:
    """As a node learns it from a holding."""
    head = want.model.head_layers if last == want.model.layers else 0.0
    return Speed(
        speed["prefill_seconds"] / (last - first), speed["decode_seconds"] / (last - first + head)
    )


async def generate(source: Any, number: int) -> Observed:
    request = GenerateRequest(
        model="bench",
        prompt_tokens=tuple(1000 + (number * 7919 + i * 104_729) % 40_000 for i in range(PROMPT)),
        max_tokens=TOKENS,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )
    began = time.perf_counter()
    stamps: list[float] = []
    before: list[float] = []
    async with aclosing(source.generate(request)) as events:
        async for _ in events:
            stamps.append(time.perf_counter())
            if isinstance(source, ChainRun) and not before:
                before = [seconds for _, seconds in source.seconds]
    took = (stamps[-1] - stamps[0]) / (TOKENS - 1)
    if not isinstance(source, ChainRun):
        return Observed(1 / took, stamps[0] - began)
    spent = [(s - b) / (TOKENS - 1) for (_, s), b in zip(source.seconds, before, strict=True)]
    return Observed(1 / took, stamps[0] - began, tuple(spent), took - sum(spent))


class Bench:
    def __init__(self, manifest: ModelManifest, folder: Path, runs: int, now: float) -> None:
        self.manifest, self.folder, self.runs, self.now = manifest, folder, runs, now
        wanted = Wanted.model_validate(
            {**describe_model(manifest), "version": 1, "publisher": "bench"}
        )
        self.want = want_of(wanted)
        self.figures: list[dict[str, Any]] = []
        self._number = itertools.count()

    def machine(self, peer: PeerId, first: int, last: int, speed: dict[str, float]) -> Machine:
        speeds = {self.manifest.digest: per_layer(self.want, first, last, speed)}
        return Machine(peer, 1 << 40, speeds)

    async def start(
        self, name: str, layers: tuple[int, int], stack: AsyncExitStack, into: list[Process]
    ) -> tuple[PeerId, list[str]]:
        """A worker behind a proxy of its own; returns the address that others are to use."""
        worker = Process(__file__, "--worker", name, *layers, self.now, self.folder)
        stack.callback(worker.end)
        said = json.loads(await worker.heard())
        address, proxy = await self.behind_proxy(said["addresses"][0], stack)
        into += [worker, proxy]
        return said["peer"], [address]

    async def behind_proxy(self, address: str, stack: AsyncExitStack) -> tuple[str, Process]:
        port = address.split("/")[4]
        proxy = Process(PROXY, "--to", f"127.0.0.1:{port}")
        stack.callback(proxy.end)
        front = (await proxy.heard()).strip()
        return address.replace(f"/udp/{port}/", f"/udp/{front}/"), proxy

    async def whole(self, stack: AsyncExitStack) -> NodeSet:
        transport, _, _ = await stack.enter_async_context(
            open_node("p-entry", self.now, self.folder)
        )
        processes: list[Process] = []
        layers = 0, self.manifest.layers
        peer, addresses = await self.start("p-whole", layers, stack, processes)
        worker, proxy = processes
        link = await transport.link_to(peer, addresses)

        def source() -> RemoteGenerator:
            response = f"bench-{next(self._number)}"
            nonce = os.urandom(NONCE_BYTES)
            return RemoteGenerator(link, Assignment(response=response, nonce=nonce))

        return NodeSet(source, [(peer, layers, worker.speed)], {peer: link}, [proxy])

    async def chain(self, stages: int, stack: AsyncExitStack) -> NodeSet:
        ranges = list(itertools.pairwise(CHAINS[stages]))
        transport, relay, known = await stack.enter_async_context(
            open_node(f"p-head-{stages}", self.now, self.folder)
        )
        stage = open_stage(self.manifest, *ranges[0], cores())
        measuring: list[Measuring] = [partial(trio.to_thread.run_sync, measure_stage, stage)]
        await stack.enter_async_context(relay.stage(stage, self.manifest.digest))
        own, proxy = await self.behind_proxy(transport.addresses[0], stack)
        peers = [transport.peer_id]
        known[transport.peer_id] = [own]
        workers: list[Process] = []
        proxies = [proxy]
        for layers in ranges[1:]:
            started: list[Process] = []
            name = f"p-{stages}-{layers[0]}"
            peer, addresses = await self.start(name, layers, stack, started)
            workers.append(started[0])
            proxies.append(started[1])
            peers.append(peer)
            known[peer] = addresses
            measuring.append(started[0].speed)
        for worker in workers:
            await worker.tell(json.dumps(known))
        route = [Hop(p, *layers) for p, layers in zip(peers, ranges, strict=True)]
        head = ChainHead(
            relay, self.manifest.digest, self.manifest.layers, route, spare=lambda *_: None
        )
        generator = ChainGenerator(head, self.manifest, Tokenizer(self.manifest))
        links = {peer: await transport.link_to(peer, known[peer]) for peer in peers[1:]}
        stages_of = list(zip(peers, ranges, measuring, strict=True))
        return NodeSet(generator.run, stages_of, links, proxies)

    async def compare(self, nodes: NodeSet) -> None:
        for delay in DELAYS:
            for proxy in nodes.proxies:
                await proxy.tell(f"delay {delay}")
            await generate(nodes.source(), next(self._number))  # warms up
            network = await self.measured(nodes)
            placed = [
                (self.machine(peer, *layers, await measure()), *layers)
                for peer, layers, measure in nodes.stages
            ]
            guess = predict(self.want, placed, network, prompt=PROMPT)
            found = [await generate(nodes.source(), next(self._number)) for _ in range(self.runs)]
            self.take(len(placed), delay, guess, found)

    async def measured(self, nodes: NodeSet) -> Network:
        """What the nodes would tell of their links: all are alike here."""
        found = [
            Connection(await round_trip(link) / 2, await bandwidth(link))
            for link in nodes.links.values()
        ]
        between = Connection(
            statistics.median(c.delay for c in found), min(c.bandwidth for c in found)
        )
        peers = [peer for peer, _, _ in nodes.stages]
        return Network(dict.fromkeys(itertools.combinations(peers, 2), between))

    def take(self, stages: int, delay: int, predicted: Prediction, found: list[Observed]) -> None:
        guess = predicted.tokens_per_second
        actual = statistics.median(one.rate for one in found)
        error = abs(guess - actual) / actual
        print(
            f"{stages} stage{'s' if stages > 1 else ''}, {delay} ms added: predicted {guess:.1f}, "
            f"actual {actual:.1f} tokens/s, off by {error:.0%}{'' if error < 0.25 else '  MISSED'}",
            flush=True,
        )
        if stages > 1:
            computed = [statistics.median(s) for s in zip(*(o.stages for o in found), strict=True)]
            hops = statistics.median(one.hops for one in found)
            print(
                f"    stages {_ms(predicted.stages)} predicted, {_ms(computed)} actual; "
                f"hops {_ms([sum(predicted.hops)])} predicted, {_ms([hops])} actual; "
                f"first token {_ms([predicted.first_token])} predicted, "
                f"{_ms([statistics.median(one.first for one in found)])} actual (ms)",
                flush=True,
            )
        self.figures.append(
            {
                "figure": f"tokens per second, {stages} stages, {delay} ms added",
                "unit": "tokens/s",
                "ours": actual,
                "reference": "predicted",
                "reference_value": guess,
                "ratio": min(guess, actual) / max(guess, actual),
                "target": TARGET,
                "runs": self.runs,
            }
        )


def _ms(seconds: Sequence[float]) -> str:
    return " + ".join(f"{one * 1e3:.2f}" for one in seconds)


async def round_trip(link: Link) -> float:
    times = []
    for _ in range(10):
        began = trio.current_time()
        await link.request(ECHO, None, b"")
        times.append(trio.current_time() - began)
    return statistics.median(times)


async def bandwidth(link: Link) -> float:
    found = await measure_link(link, megabytes=1, round_trips=1, seconds=2.0)
    return min(found.up_mb_s, found.down_mb_s) * 1e6


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="placement-") as folder:
        bench = Bench(model(), Path(folder), 2 if options.quick else 5, time.time())
        for stages in (1, 2, 3):
            async with AsyncExitStack() as stack:
                if stages == 1:
                    await bench.compare(await bench.whole(stack))
                else:
                    await bench.compare(await bench.chain(stages, stack))
    if options.json:
        options.json.write_text(json.dumps(bench.figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # A peer that tries this node's address from outside finds a proxy, which libp2p complains of.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    if sys.argv[1:2] == ["--worker"]:
        name, first, last, now, folder = sys.argv[2:]
        trio.run(work, name, int(first), int(last), float(now), Path(folder))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--quick", action="store_true")
        parser.add_argument("--json", type=Path)
        trio.run(main, parser.parse_args())
