"""Replicas in processes of their own that are killed, stopped and paused in the middle."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest, SamplingParams, TokenEvent
from mesh.forward.answer import Surroundings, answer
from mesh.forward.events import Completed
from mesh.identity import Identity, PeerId, TrustStore
from mesh.receipts import Bundle, Expected, VerifiedReceipt, verify
from mesh.routing.route import Hop, Replica, RequestFacts, Route
from mesh.transport import Link, Transport, TransportConfig

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
SECONDS_PER_TOKEN = 0.02
REQUEST = GenerateRequest(
    model="counting", prompt="count", max_tokens=100, sampling=SamplingParams(seed=3)
)


def load_nodes() -> ModuleType:
    path = HERE.parents[1] / "integration" / "forward" / "conftest.py"
    spec = importlib.util.spec_from_file_location("counting_nodes", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["counting_nodes"] = module
    spec.loader.exec_module(module)
    return module


NODES = load_nodes()


class Replicas:
    def __init__(self, folder: Path, authority: Any) -> None:
        self.folder = folder
        self.authority = authority
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: dict[PeerId, str] = {}

    def start(self, *names: str) -> list[tuple[subprocess.Popen[str], PeerId]]:
        """Start one process for each name; routes prefer them in this order."""
        command = [sys.executable, str(HERE / "serving_process.py")]
        started = [
            subprocess.Popen(
                [*command, name, str(self.folder / name), str(SECONDS_PER_TOKEN)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        ]
        self.processes += started
        peers = []
        for process in started:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            peers.append(PeerId(address.rsplit("/", 1)[1]))
            self.addresses[peers[-1]] = address
        return list(zip(started, peers, strict=True))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def replicas(tmp_path: Path, authority: Any) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path, authority)
    yield replicas
    replicas.close()


@asynccontextmanager
async def entry_node(replicas: Replicas) -> AsyncIterator[Surroundings]:
    identity: Identity = replicas.authority.identity("entry")
    trust = TrustStore("test", [replicas.authority.root], replicas.folder / "entry")
    config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
    async with Transport.open(config, identity, trust) as transport:

        def choose(facts: RequestFacts) -> Route:
            for peer in replicas.addresses:
                if peer not in facts.exclude:
                    hop = Hop(peer, "replica", 0, 0, 30, "CPU", 0)
                    return Replica("counting", NODES.MODEL.digest, (hop,), NODES.COST, "", (), ())
            raise GenerationError("model_not_found", "nobody is left")

        async def reach(peer: PeerId) -> Link:
            return await transport.link_to(peer, [replicas.addresses[peer]])

        def run_here(request: GenerateRequest, route: Route) -> Any:
            raise GenerationError("model_not_found", "not here")

        for peer in replicas.addresses:
            await reach(peer)
        yield Surroundings(
            identity=identity,
            trust=trust,
            choose_route=choose,
            run_here=run_here,
            reach=reach,
            track=lambda route: lambda: None,
            clock=time.time,
        )


async def ask(around: Surroundings, at: dict[int, Callable[[], None]]) -> tuple[list[Any], float]:
    """The events of an answer, with something done at some tokens; and the longest pause."""
    events: list[Any] = []
    longest, before = 0.0, trio.current_time()
    async with aclosing(answer(REQUEST, "r", around)) as source:
        async for event in source:
            now = trio.current_time()
            longest, before = max(longest, now - before), now
            if isinstance(event, TokenEvent):
                at.pop(sum(isinstance(e, TokenEvent) for e in events), lambda: None)()
            events.append(event)
    return events, longest


def check(around: Surroundings, events: list[Any]) -> VerifiedReceipt:
    done = events[-1]
    assert isinstance(done, Completed)
    engine = NODES.CountingEngine()
    assert done.token_ids == tuple(engine.token(REQUEST, i) for i in range(100))
    text = "".join(event.text for event in events if isinstance(event, TokenEvent))
    assert text == engine.decode(done.token_ids)
    return verify(
        Bundle.from_bytes(done.receipt),
        around.trust.roots,
        network="test",
        now=time.time(),
        expected=Expected(request=REQUEST, token_ids=done.token_ids, text=text),
    )


def run(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        with trio.fail_after(60):
            await main()

    trio.run(bounded)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_hangs_is_replaced(replicas: Replicas, how: signal.Signals) -> None:
    (first, first_peer), (_, second_peer) = replicas.start("one", "two")

    async def main() -> None:
        async with entry_node(replicas) as around:
            events, pause = await ask(around, {30: lambda: os.kill(first.pid, how)})
            verified = check(around, events)
            assert [(s.node, s.evidence) for s in verified.segments] == [
                (first_peer, "lost"),
                (second_peer, "signer"),
            ]
            print(f"{how.name}: the longest pause was {pause:.2f} s")
            assert pause < 5.0

    run(main)


def test_two_losses_in_one_answer(replicas: Replicas) -> None:
    started = replicas.start("one", "two", "three")

    async def main() -> None:
        async with entry_node(replicas) as around:
            kills = {
                20: lambda: os.kill(started[0][0].pid, signal.SIGKILL),
                60: lambda: os.kill(started[1][0].pid, signal.SIGSTOP),
            }
            events, _ = await ask(around, kills)
            verified = check(around, events)
            assert [s.node for s in verified.segments] == [peer for _, peer in started]
            assert [s.tokens[1] for s in verified.unsigned][-1] >= 60

    run(main)


def test_a_pause_of_a_second_loses_no_session(replicas: Replicas) -> None:
    (first, first_peer), _ = replicas.start("one", "two")

    async def main() -> None:
        async with entry_node(replicas) as around, trio.open_nursery() as nursery:

            async def go_on() -> None:
                await trio.sleep(0.9)
                os.kill(first.pid, signal.SIGCONT)

            def pause() -> None:
                os.kill(first.pid, signal.SIGSTOP)
                nursery.start_soon(go_on)

            events, longest = await ask(around, {30: pause})
            assert longest > 0.8
            assert [s.node for s in check(around, events).segments] == [first_peer]

    run(main)


def test_a_pause_of_the_entry_node_itself_loses_no_session(replicas: Replicas) -> None:
    (_, first_peer), _ = replicas.start("one", "two")

    async def main() -> None:
        async with entry_node(replicas) as around:
            events, _ = await ask(around, {30: lambda: time.sleep(3.0)})
            assert [s.node for s in check(around, events).segments] == [first_peer]

    run(main)


def test_without_a_spare_the_error_comes_soon(replicas: Replicas) -> None:
    ((first, _),) = replicas.start("one")

    async def main() -> None:
        async with entry_node(replicas) as around:
            with trio.fail_after(10), pytest.raises(GenerationError) as caught:
                await ask(around, {30: lambda: os.kill(first.pid, signal.SIGKILL)})
            assert caught.value.code == "node_lost"

    run(main)
