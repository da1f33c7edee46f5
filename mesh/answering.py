"""Requests at this node: those of its own clients, and those that peers send it to run.

Which way a request goes, what runs it here, and what can be told of it afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from inference.errors import GenerationError
from inference.generation import GenerateRequest
from mesh import explain
from mesh.forward.answer import Surroundings, answer
from mesh.forward.events import AnswerEvent, Completed
from mesh.forward.execution import Run, WholeModel
from mesh.forward.following import Follower, Wanted, find
from mesh.forward.serving import ForwardServer
from mesh.forward.wire import Assignment
from mesh.gossip.service import GossipService
from mesh.holdings import Holdings
from mesh.identity import (
    Identity,
    PeerId,
    TrustStore,
)
from mesh.routing import Affinity, Chain, InFlight, RequestFacts, Route, choose
from mesh.routing.placement.from_view import verdicts_in
from mesh.routing.slowness import Slowness
from mesh.transport import (
    Link,
    Message,
    Request,
    Transport,
    TransportError,
)

if TYPE_CHECKING:
    from mesh.chains import Chains


class Answering:
    """``chains`` gives the chains that begin here, once there are any; ``rejected`` the peers that
    the admission test has turned away."""

    def __init__(
        self,
        identity: Identity,
        trust: TrustStore,
        transport: Transport,
        gossip: GossipService,
        holdings: Holdings,
        *,
        chains: Callable[[], Chains | None],
        rejected: Callable[[], frozenset[PeerId]],
        rng: random.Random,
    ) -> None:
        self._identity = identity
        self._trust = trust
        self._transport = transport
        self._gossip = gossip
        self._holdings = holdings
        self._chains = chains
        self._rejected = rejected
        self._rng = rng
        self._in_flight = InFlight()
        self._affinity = Affinity()
        self._explanations = explain.Explanations()
        self._slowness = Slowness()
        self.forward = ForwardServer(identity, self._run)

    def serve(self) -> None:
        """Answer peers that ask what a response took here."""
        self._transport.serve(explain.EXPLAIN_KIND, self._tell_seconds)

    def _run(self, request: GenerateRequest, assignment: Assignment) -> Run:
        """What runs a request on this node, its own or a peer's. Raises GenerationError."""
        if assignment.chain:
            chains = self._chains()
            if chains is None:
                raise GenerationError("node_lost", "no stage is loaded here")
            run = chains.run(request.model, assignment.model_digest, assignment.chain)
            self._explanations.heads(assignment.response, run.seconds)
            return run
        replica = self._holdings.replica(request.model, assignment.model_digest)
        if replica is None:
            raise GenerationError(
                "model_not_found", f"{request.model!r} is not served here", param="model"
            )
        return WholeModel(replica.engine, replica.identity, self._identity)

    def _choose_route(self, response: str, facts: RequestFacts) -> Route:
        view, now = self._gossip.view, trio.current_time()
        facts = replace(
            facts,
            slow=self._slowness.factors(now),
            cached=self._affinity.cached(facts.marks, tuple(view.nodes), now),
            rejected=self._rejected(),
            unfit=frozenset(p for p, verdict in verdicts_in(view).items() if verdict.state),
        )
        pick = partial(choose, view, rng=self._rng, in_flight=self._in_flight)
        try:
            route = pick(facts)
        except GenerationError:
            if not facts.unfit:
                raise
            route = pick(replace(facts, unfit=frozenset()))  # slowly rather than not at all
        self._affinity.remember(facts.marks, route, now)
        self._explanations.chosen(response, view, facts, route)
        return route

    def _track(self, route: Route) -> Callable[[], None]:
        ticket = self._in_flight.started(route, trio.current_time())
        return lambda: ticket.ended(trio.current_time())

    async def reach(self, peer: PeerId) -> Link:
        link = self._transport.link(peer)
        if link is not None:
            return link
        return await self._transport.link_to(peer, self.addresses(peer))

    def addresses(self, peer: PeerId) -> Sequence[str]:
        node = self._gossip.view.nodes.get(peer)
        return node.advert.addresses if node is not None else ()

    async def answer(
        self, request: GenerateRequest, request_id: str, *, keep: bytes | None = None
    ) -> AsyncGenerator[AnswerEvent, None]:
        around = Surroundings(
            identity=self._identity,
            trust=self._trust,
            choose_route=partial(self._choose_route, request_id),
            run_here=self._run,
            reach=self.reach,
            track=self._track,
            clock=time.time,
        )
        async with aclosing(answer(request, request_id, around, keep=keep)) as events:
            async for event in events:
                if isinstance(event, Completed):
                    self._completed(request_id, event)
                yield event

    def _completed(self, response: str, record: Completed) -> None:
        self._explanations.completed(response, record.timings, len(record.token_ids))
        surprise = self._explanations.surprise(response)
        if surprise is not None:
            self._slowness.observed(*surprise, trio.current_time())

    async def explain(self, response: str) -> dict[str, Any]:
        found = self._explanations.find(response)
        if found is None:
            raise ValueError("this node has not answered that response, or long ago")
        name = explain.plain_id(response)
        actual: dict[PeerId, explain.StageSeconds] = {}
        for choice in found.choices:
            head = choice.route.peer
            if head == self._identity.peer_id:
                actual[head] = self._explanations.stage_seconds(name)
            elif isinstance(choice.route, Chain):
                with suppress(TransportError, explain.NoFigures):
                    link = await self.reach(head)
                    told = await link.request(explain.EXPLAIN_KIND, name, timeout=5.0)
                    actual[head] = explain.parse_seconds(told.body)
        return explain.describe(self._gossip.view, found, actual)

    async def _tell_seconds(self, request: Request) -> Message:
        """What a chain that begins here has computed for a response, whose id only its entry node
        and client know."""
        body = request.message.body
        seconds = self._explanations.stage_seconds(body) if isinstance(body, str) else ()
        return Message([list(row) for row in seconds])

    async def kept(self, response: str, key: bytes, after: int) -> Follower:
        return await find(
            Wanted(response, key, after),
            identity=self._identity,
            trust=self._trust,
            here=self.forward.kept,
            links=list(self._transport.links.values()),
            clock=time.time,
        )
