"""What it costs to run a model over several processes: chains of 2 and 3 stages against one stage.

Each stage is a process of its own on this machine, with a certificate, linked over QUIC on
loopback; this process is the head and holds rank 0. The reference is the same engine with the whole
model in this process. They take turns in every round, so that a busy machine hits all alike;
figures are medians. All stages together have the cores of the machine, as the one stage has.

The time that a hop adds is what is left of the time per token when the compute time of all stages
is taken off, divided by the hops of the ring (a chain of two stages has two: there and back).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbor2
import platformdirs
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ca.certificate import load_root
from ca.issue import issue, make_root
from ca.naming import Role
from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest, SamplingParams
from inference.paged import StageConfig
from inference.split import read_splittable
from inference.stage import Stage
from inference.store.demo import DEMO_MODEL
from inference.store.download import pull
from inference.store.manifest import ModelManifest
from inference.store.store import ModelStore
from inference.tokenizer import Tokenizer
from mesh.identity import Identity, PeerId, TrustStore, identity_of
from mesh.relay.chain import ChainHead
from mesh.relay.frames import STEP_KIND
from mesh.relay.generator import ChainGenerator, ChainRun
from mesh.relay.links import TransportLinks
from mesh.relay.ring import Hop
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.transport import Transport, TransportConfig

NETWORK = "bench"
LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"
CHAINS = {2: (0, 15, 30), 3: (0, 10, 20, 30)}
PROMPT = 64  # tokens


def model() -> ModelManifest:
    usual = platformdirs.user_cache_path("meshnode", appauthor=False) / "models"
    return pull(ModelStore(Path(os.environ.get("MESHNODE_MODELS") or usual)), DEMO_MODEL)


def identity(name: str, now: float) -> tuple[Identity, Any]:
    """A node of a network whose CA every process of this benchmark makes for itself, the same."""
    key = Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32, b".")[:32])
    ca = Ed25519PrivateKey.from_private_bytes(b"benchmark".ljust(32, b"."))
    root = load_root(make_root(ca, NETWORK, serial=1, now=now))
    der = issue(
        ca,
        root.der,
        network=NETWORK,
        name=name,
        public_key=key.public_key(),
        roles=[Role.SERVE, Role.USE],
        serial=1000 + sum(name.encode()),
        now=now,
        days=1,
    )
    return identity_of(key, [der], [root], now=now), root


class CountingLinks(TransportLinks):
    """Counts what step frames of single tokens take on their way out."""

    tokens = 0
    bytes = 0

    def try_send(self, peer: PeerId, kind: str, body: Any, payload: Any = b"", **how: Any) -> bool:
        sent = super().try_send(peer, kind, body, payload, **how)
        if sent and kind == STEP_KIND and all(row[2] == 1 for row in body["rows"]):
            self.tokens += len(body["rows"])
            self.bytes += len(cbor2.dumps({"k": kind, "b": body})) + len(payload)
        return sent


@dataclass
class Node:
    transport: Transport
    relay: Relay
    links: CountingLinks
    addresses: dict[PeerId, Sequence[str]]


@asynccontextmanager
async def open_node(name: str, now: float, folder: Path) -> AsyncIterator[Node]:
    own, root = identity(name, now)
    trust = TrustStore(NETWORK, [root], folder / name)
    known: dict[PeerId, Sequence[str]] = {}
    async with Transport.open(TransportConfig(listen=(LOOPBACK,)), own, trust) as transport:
        links = CountingLinks(transport, lambda peer: known.get(peer, ()))
        relay = Relay(links)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_relay, relay, transport)
            yield Node(transport, relay, links, known)
            nursery.cancel_scope.cancel()


def open_stage(manifest: ModelManifest, first: int, last: int, threads: int) -> Stage:
    cut = read_splittable(manifest.file("openvino_model.xml")).cut(first, last)
    config = StageConfig(threads=threads, kv_bytes=512 << 20)
    return Stage(cut, config, context_length=manifest.context_length)


async def work(name: str, first: int, last: int, threads: int, now: float, folder: Path) -> None:
    """The life of a process that holds one stage: until its standard input ends."""
    manifest = model()
    stage = open_stage(manifest, first, last, threads)
    async with open_node(name, now, folder) as node, node.relay.stage(stage, manifest.digest):
        peer, addresses = node.transport.peer_id, node.transport.addresses
        print(json.dumps({"peer": peer, "addresses": addresses}), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            node.addresses.update(json.loads(line))


class Chain:
    """Worker processes of one chain, and its head in this process."""

    def __init__(self, stages: int, threads: int) -> None:
        self.stages = stages
        self.threads = threads
        self.name = f"{stages} stages of {threads} thread{'s' if threads > 1 else ''}"

    @asynccontextmanager
    async def open(self, manifest: ModelManifest, folder: Path) -> AsyncIterator[Chain]:
        now = time.time()
        cuts = CHAINS[self.stages]
        processes = []
        async with AsyncExitStack() as stack:
            self.node = await stack.enter_async_context(
                open_node(f"head-{self.stages}-{self.threads}", now, folder)
            )
            stage = open_stage(manifest, cuts[0], cuts[1], self.threads)
            self.host = await stack.enter_async_context(
                self.node.relay.stage(stage, manifest.digest)
            )
            route = [Hop(self.node.transport.peer_id, cuts[0], cuts[1])]
            addresses = {self.node.transport.peer_id: self.node.transport.addresses}
            try:
                for first, last in itertools.pairwise(cuts[1:]):
                    process = start_worker(
                        f"s{self.stages}-{self.threads}-{first}",
                        first,
                        last,
                        self.threads,
                        now,
                        folder,
                    )
                    processes.append(process)
                    assert process.stdout is not None
                    said = json.loads(await trio.to_thread.run_sync(process.stdout.readline))
                    addresses[said["peer"]] = said["addresses"]
                    route.append(Hop(said["peer"], first, last))
                self.node.addresses.update(addresses)
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write(json.dumps(addresses) + "\n")
                    process.stdin.flush()
                head = ChainHead(
                    self.node.relay, manifest.digest, manifest.layers, route, spare=lambda *_: None
                )
                self.generator = ChainGenerator(head, manifest, Tokenizer(manifest))
                yield self
            finally:
                for process in processes:
                    process.kill()
                    process.wait()


def start_worker(
    name: str, first: int, last: int, threads: int, now: float, folder: Path
) -> subprocess.Popen[str]:
    arguments = [name, first, last, threads, now, folder]
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@dataclass
class Run:
    """One round of one contender. ``hop`` is in seconds a token and hop."""

    decode: float  # tokens per second from the last session's first token on
    first: float  # s to the first token, mean
    hop: float


async def measure(contender: StageTextEngine | Chain, sessions: int, tokens: int, turn: int) -> Run:
    firsts: list[float] = []
    stamps: list[float] = []
    runs: list[ChainRun] = []

    spent: list[float] = []  # compute seconds when the first token was there

    async def one(number: int) -> None:
        seed = turn * 64 + number
        request = GenerateRequest(
            model="bench",
            # Each its own prompt, so that none is served from another's prefix.
            prompt_tokens=tuple(1000 + (seed * 7919 + i * 104_729) % 40_000 for i in range(PROMPT)),
            max_tokens=tokens,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.0),
        )
        began = time.perf_counter()
        source: Any = contender
        if isinstance(contender, Chain):
            source = contender.generator.run()
            runs.append(source)
        seen = 0
        async for _ in source.generate(request):
            stamps.append(time.perf_counter())
            if not seen:
                firsts.append(stamps[-1] - began)
                starts.append(stamps[-1])
                if isinstance(source, ChainRun):
                    spent.append(sum(seconds for _, seconds in source.seconds))
            seen += 1

    starts: list[float] = []
    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            nursery.start_soon(one, number)
    begin = max(starts)
    decode = sum(stamp > begin for stamp in stamps) / (max(stamps) - begin)
    hop = 0.0
    if runs and sessions == 1:
        compute = sum(seconds for _, seconds in runs[0].seconds) - spent[0]
        hop = (max(stamps) - begin - compute) / (tokens - 1) / len(runs[0].seconds)
    return Run(decode, statistics.mean(firsts), hop)


async def compare(rounds: int, tokens: int, sessions_list: Sequence[int]) -> list[dict[str, Any]]:
    manifest = model()
    cores = os.cpu_count() or 1
    figures: list[dict[str, Any]] = []
    chains = [Chain(2, cores), Chain(2, max(1, cores // 2)), Chain(3, cores)]
    with tempfile.TemporaryDirectory(prefix="meshnode-bench-") as folder:
        async with AsyncExitStack() as stack:
            config = StageConfig(threads=cores, kv_bytes=512 << 20)
            whole = await StageTextEngine.open(manifest, config)
            stack.push_async_callback(whole.aclose)
            for chain in chains:
                await stack.enter_async_context(chain.open(manifest, Path(folder)))
            contenders: list[StageTextEngine | Chain] = [whole, *chains]
            for contender in contenders:
                await measure(contender, 2, 8, 999)  # first use
            turn = 0
            for sessions in sessions_list:
                runs: list[list[Run]] = [[] for _ in contenders]
                for _ in range(rounds):
                    turn += 1
                    for number, contender in enumerate(contenders):
                        runs[number].append(await measure(contender, sessions, tokens, turn))
                figures += figures_of(chains, runs, sessions, rounds)
            for chain in chains[:1]:
                links = chain.node.links
                figures.append(
                    figure(
                        "bytes per token and hop, one session or more, hidden size "
                        f"{manifest.hidden_size} in f32",
                        "bytes",
                        links.bytes / links.tokens,
                        "the activations alone",
                        manifest.hidden_size * 4.0,
                        None,
                        rounds,
                        lower=True,
                    )
                )
    return figures


def figures_of(
    chains: Sequence[Chain], runs: Sequence[Sequence[Run]], sessions: int, rounds: int
) -> list[dict[str, Any]]:
    whole = statistics.median(run.decode for run in runs[0])
    whole_first = statistics.median(run.first for run in runs[0])
    found = []
    for chain, own in zip(chains, runs[1:], strict=True):
        who = f"{chain.name}, {sessions} session{'s' if sessions > 1 else ''}"
        target = 0.95 if chain.stages == 2 and sessions == 1 and chain.threads > 1 else None
        decode = statistics.median(run.decode for run in own)
        entry = figure(f"decode, {who}", "tokens/s", decode, "one stage", whole, target, rounds)
        # Of the ratios of each round: the machine is another one a minute later.
        ratios = [ours.decode / alone.decode for ours, alone in zip(own, runs[0], strict=True)]
        found.append(entry | {"ratio": round(statistics.median(ratios), 3)})
        first = statistics.median(run.first for run in own)
        found.append(
            figure(
                f"first token after a prompt of {PROMPT}, {who}", "s", first, "one stage",
                whole_first, None, rounds, lower=True,
            )
        )  # fmt: skip
        if sessions == 1:
            hop = statistics.median(run.hop for run in own) * 1000
            found.append(
                figure(
                    f"added per hop, {who}", "ms/token", hop, "budget", 1.0, 1.0, rounds, lower=True
                )
            )
    return found


def figure(
    text: str,
    unit: str,
    ours: float,
    reference: str,
    value: float,
    target: float | None,
    runs: int,
    *,
    lower: bool = False,
) -> dict[str, Any]:
    ratio = value / ours if lower else ours / value
    return {
        "figure": text,
        "unit": unit,
        "ours": round(ours, 4),
        "reference": reference,
        "reference_value": round(value, 4),
        "ratio": round(ratio, 3),
        "target": target,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sessions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, first, last, threads, now, folder = options.worker
        trio.run(work, name, int(first), int(last), int(threads), float(now), Path(folder))
        return
    sessions = (1, 16) if options.quick else (1, 4, 8, 16)
    figures = trio.run(compare, 2 if options.quick else 5, 32 if options.quick else 96, sessions)
    for entry in figures:
        target = entry["target"]
        missed = target is not None and entry["ratio"] < target
        print(
            f"{entry['figure']}: {entry['ours']:g} {entry['unit']}; {entry['reference']} "
            f"{entry['reference_value']:g}: {entry['ratio']:.2f}"
            + (f" (target {target:g}{', missed' if missed else ''})" if target else "")
        )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
