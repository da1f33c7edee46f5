"""Nodes in one process: real transports on loopback, real certificates, an engine that can count.

The engine stands in for a model only in what it says: it keeps the rules of a real one (resuming,
stop strings by the shared detokenizer, ``max_tokens``, counts), so that what is tested here does
not depend on how fast a model happens to be.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from ca.naming import Role
from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent, TokenLogprob
from inference.text import TextStream
from mesh.forward.answer import Surroundings
from mesh.forward.execution import Run, WholeModel
from mesh.forward.serving import ForwardServer
from mesh.identity import Identity, PeerId, TrustStore
from mesh.receipts import ModelIdentity
from mesh.routing.route import Cost, Hop, Local, Replica, RequestFacts, Route
from mesh.transport import Link, Transport, TransportConfig

MODEL = ModelIdentity(name="counting", digest="cd" * 32, layers=30)
COST = Cost(wait=0.0, prefill=0.0, decode=0.0, link=0.0)


class CountingEngine:
    """Counts: output token ``n`` depends on the seed and on ``n`` alone, and so does its text."""

    def __init__(self, seconds_per_token: float = 0.0, context: int = 4096) -> None:
        self.seconds_per_token = seconds_per_token
        self.context = context
        self.made = 0
        self.running = 0
        self.on_token: Callable[[int], None] = lambda position: None

    def decode(self, ids: Sequence[int]) -> str:
        # Every third token is half of a two-byte character, whose other half follows.
        data = b"".join((f" {i}".encode(), f"{i}".encode() + b"\xc3", b"\xa9")[i % 3] for i in ids)
        return data.decode("utf-8", "replace")

    def token(self, request: GenerateRequest, position: int) -> int:
        return (request.sampling.seed % 1000) * 3 + position

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        prompt = len(request.prompt or "")
        if prompt > self.context:
            raise GenerationError("context_length_exceeded", "too long", param="prompt")
        text = TextStream(self.decode, request.stop)
        for token_id in request.resume:
            text.feed(token_id)
        position = len(request.resume)
        self.running += 1
        try:
            while True:
                await trio.sleep(self.seconds_per_token)
                self.made += 1
                self.on_token(position)
                token_id = self.token(request, position)
                position += 1
                shown = text.feed(token_id)
                finish = None
                if text.stopped or position == request.max_tokens:
                    shown += text.finish()
                    finish = Finish(
                        reason="stop" if text.stopped else "length",
                        prompt_tokens=prompt,
                        completion_tokens=position,
                        prefill_seconds=0.25,
                    )
                logprob = None
                if request.sampling.logprobs is not None:
                    logprob = TokenLogprob(
                        token_id=token_id, token=str(token_id), logprob=-float(position)
                    )
                yield TokenEvent(token_id=token_id, text=shown, logprob=logprob, finish=finish)
                if finish is not None:
                    return
        finally:
            self.running -= 1


@dataclass
class Node:
    """A node without gossip: routes are what the test says they are."""

    identity: Identity
    trust: TrustStore
    transport: Transport
    engine: Any
    model: ModelIdentity
    server: ForwardServer
    routes: list[Node] = field(default_factory=list)
    asked: list[RequestFacts] = field(default_factory=list)
    under_way: int = 0

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    def run(self, request: GenerateRequest, route: Route | None = None) -> Run:
        if request.model != self.model.name:
            raise GenerationError("model_not_found", f"no {request.model} here", param="model")
        return WholeModel(self.engine, self.model, self.identity)

    def choose_route(self, facts: RequestFacts) -> Route:
        self.asked.append(facts)
        for node in self.routes:
            if node.peer not in facts.exclude:
                name, layers = node.identity.certificate.name, node.model.layers
                hop = Hop(node.peer, name, 0, 0, layers, "CPU", 0)
                kind = Local if node is self else Replica
                return kind(facts.model, node.model.digest, (hop,), COST, "said so", (), ())
        raise GenerationError("model_not_found", "nobody is left")

    def track(self, route: Route) -> Callable[[], None]:
        self.under_way += 1

        def ended() -> None:
            self.under_way -= 1

        return ended

    async def reach(self, peer: PeerId) -> Link:
        addresses = [a for node in self.routes if node.peer == peer for a in node.addresses]
        return await self.transport.link_to(peer, addresses)

    @property
    def addresses(self) -> list[str]:
        return self.transport.addresses

    @property
    def around(self) -> Surroundings:
        return Surroundings(
            identity=self.identity,
            trust=self.trust,
            choose_route=self.choose_route,
            run_here=self.run,
            reach=self.reach,
            track=self.track,
            clock=time.time,
        )


@pytest.fixture
def run() -> Callable[..., None]:
    """``run(main, seconds)``: ``await main(stack)`` in trio, with the stack closed afterwards."""

    def run(main: Callable[[AsyncExitStack], Any], seconds: float = 60.0) -> None:
        async def all_of_it() -> None:
            with trio.fail_after(seconds):
                async with AsyncExitStack() as stack:
                    await main(stack)

        try:
            trio.run(all_of_it)
        except BaseExceptionGroup as group:
            # Every nursery on the way out wraps the failure once more.
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    return run


@pytest.fixture
def start(authority: Any, tmp_path: Path) -> Callable[..., Any]:
    """``async with start("a", ...) as node``."""

    @asynccontextmanager
    async def start(
        name: str,
        engine: Any = None,
        model: ModelIdentity = MODEL,
        roles: Sequence[Role] = (Role.SERVE, Role.USE),
    ) -> AsyncIterator[Node]:
        identity = authority.identity(name, roles)
        trust = TrustStore(authority.network, [authority.root], tmp_path / name)
        config = TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))
        async with Transport.open(config, identity, trust) as transport:
            server = ForwardServer(identity, lambda request, _: node.run(request))
            node = Node(identity, trust, transport, engine or CountingEngine(), model, server)
            async with server.serving(transport):
                yield node

    return start
