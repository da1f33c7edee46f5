"""Chains over real transports on loopback, with stages of the real demo model."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from inference.engines.stage_text import StageTextEngine
from inference.generation import GenerateRequest
from inference.paged import StageConfig
from inference.split import Splittable, read_splittable
from inference.stage import Stage
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer
from mesh.identity import Identity, PeerId, TrustStore
from mesh.relay.chain import ChainHead
from mesh.relay.generator import ChainGenerator
from mesh.relay.host import StageHost
from mesh.relay.links import TransportLinks
from mesh.relay.ring import Hop
from mesh.relay.service import Relay
from mesh.relay.serving import serve_relay
from mesh.transport import Transport, TransportConfig

LOOPBACK = "/ip4/127.0.0.1/udp/0/quic-v1"
CONFIG = StageConfig(kv_bytes=96 << 20)


class Node:
    """A transport with a relay, and at most one stage."""

    def __init__(self, transport: Transport, mesh: Mesh) -> None:
        self.transport = transport
        self.peer: PeerId = transport.peer_id
        self.relay = Relay(TransportLinks(transport, mesh.addresses))
        self.scope = trio.CancelScope()
        self.host: StageHost | None = None
        self.stage: Stage | None = None

    @property
    def hop(self) -> Hop:
        assert self.host is not None
        return Hop(self.peer, self.host.facts.first, self.host.facts.last)


class Mesh:
    """Nodes of one network in this process."""

    def __init__(self, folder: Path, authority: Any, model: ModelManifest, cut: Splittable) -> None:
        self.folder = folder
        self.authority = authority
        self.model = model
        self.cut = cut
        self.tokenizer = Tokenizer(model)
        self.nodes: dict[PeerId, Node] = {}
        self.nursery: trio.Nursery | None = None

    def addresses(self, peer: PeerId) -> Sequence[str]:
        node = self.nodes.get(peer)
        return node.transport.addresses if node is not None else ()

    async def add(
        self, name: str, first: int | None = None, last: int = 0, **certificate: Any
    ) -> Node:
        assert self.nursery is not None
        identity = self.authority.identity(name, now=time.time(), **certificate)
        node: Node = await self.nursery.start(self._run, name, identity, first, last)
        return node

    async def _run(
        self,
        name: str,
        identity: Identity,
        first: int | None,
        last: int,
        task_status: trio.TaskStatus[Node],
    ) -> None:
        trust = TrustStore(self.authority.network, [self.authority.root], self.folder / name)
        async with AsyncExitStack() as stack:
            opened = Transport.open(TransportConfig(listen=(LOOPBACK,)), identity, trust)
            transport = await stack.enter_async_context(opened)
            node = Node(transport, self)
            with node.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(serve_relay, node.relay, transport)
                    if first is not None:
                        node.stage = await trio.to_thread.run_sync(self._stage, first, last)
                        serving = node.relay.stage(node.stage, self.model.digest)
                        node.host = await stack.enter_async_context(serving)
                    self.nodes[node.peer] = node
                    task_status.started(node)
                    await trio.sleep_forever()

    def _stage(self, first: int, last: int) -> Stage:
        return Stage(self.cut.cut(first, last), CONFIG, context_length=self.model.context_length)

    def spare(
        self, model: str, first: int, last: int, unwanted: frozenset[PeerId]
    ) -> PeerId | None:
        return next(
            (
                node.peer
                for node in self.nodes.values()
                if node.host is not None
                and (node.host.facts.first, node.host.facts.last) == (first, last)
                and node.peer not in unwanted
            ),
            None,
        )

    def generator(self, nodes: Sequence[Node], **options: Any) -> ChainGenerator:
        head = ChainHead(
            nodes[0].relay,
            self.model.digest,
            self.model.layers,
            [node.hop for node in nodes],
            spare=self.spare,
            **options,
        )
        return ChainGenerator(head, self.model, self.tokenizer)

    async def chain(self, cuts: Sequence[int], **options: Any) -> ChainGenerator:
        """A chain of new nodes, cut at these layers."""
        bounds = [0, *cuts, self.model.layers]
        nodes = [
            await self.add(f"node-{a}-{b}-{len(self.nodes)}", a, b)
            for a, b in itertools.pairwise(bounds)
        ]
        return self.generator(nodes, **options)

    async def empty(self) -> None:
        """Wait until no stage holds anything of a session."""
        with trio.fail_after(10):
            for node in self.nodes.values():
                while node.host is not None and (  # noqa: ASYNC110 (polling is the test's business)
                    node.host.table.used or node.host.kept.bytes or node.stage.sessions
                ):
                    await trio.sleep(0.01)


@pytest.fixture(scope="session")
def cut_model(demo_model: ModelManifest) -> Splittable:
    return read_splittable(demo_model.file("openvino_model.xml"))


@pytest.fixture
def open_mesh(
    tmp_path: Path, make_authority: Callable[..., Any], demo_model: ModelManifest, cut_model: Any
) -> Callable[[], Any]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Mesh]:
        authority = make_authority("testnet", time.time() - 86_400)
        async with trio.open_nursery() as nursery:
            mesh = Mesh(tmp_path, authority, demo_model, cut_model)
            mesh.nursery = nursery
            yield mesh
            nursery.cancel_scope.cancel()

    return opened


PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three laws of thermodynamics say that",
    "Water boils at",
    "My favourite recipe begins with two eggs and",
    "In 1969 the first people",
    "A haiku about autumn:",
    "List of prime numbers: 2, 3, 5,",
    "Dear Sir or Madam,",
    "The difference between a virus and a bacterium is",
    "SELECT name FROM users WHERE",
    "Why is the sky blue?",
    "The quick brown fox",
    "To be or not to be,",
    "Photosynthesis is the process by which",
    "The stock market fell today because",
    "She opened the door and saw",
    "Machine learning is",
    "The best way to learn a language is",
    "A short history of the bicycle. " * 20,
)


@pytest.fixture(scope="session")
def requests(demo_model: ModelManifest) -> Callable[..., list[GenerateRequest]]:
    def made(count: int, tokens: int, *, seeded: bool) -> list[GenerateRequest]:
        return [
            GenerateRequest.model_validate(
                {
                    "model": demo_model.name,
                    "prompt": PROMPTS[number % len(PROMPTS)],
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "sampling": {"temperature": 0.8, "seed": number, "top_p": 0.9}
                    if seeded
                    else {"temperature": 0.0},
                }
            )
            for number in range(count)
        ]

    return made


async def tokens_of(generator: Any, request: GenerateRequest) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    async for event in generator.generate(request):
        if event.token_id is not None:
            ids.append(event.token_id)
        text += event.text
    return ids, text


@pytest.fixture(scope="session")
def read_all() -> Any:
    return tokens_of


@pytest.fixture(scope="session")
def uncut(demo_model: ModelManifest) -> Callable[[Sequence[GenerateRequest]], list[Any]]:
    """What the whole model's engine gives for each request, one by one."""

    def answers(requests: Sequence[GenerateRequest]) -> list[Any]:
        async def main() -> list[Any]:
            engine = await StageTextEngine.open(demo_model, CONFIG)
            found: list[Any] = [None] * len(requests)

            async def one(number: int) -> None:
                found[number] = await tokens_of(engine, requests[number])

            try:
                async with trio.open_nursery() as nursery:
                    for number in range(len(requests)):
                        nursery.start_soon(one, number)
            finally:
                await engine.aclose()
            return found

        return trio.run(main)

    return answers
