"""Requests at this node: those of its own clients, and those that peers send it to run.

Which way a request goes, what runs it here, and what can be told of it afterwards.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
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

MAX_ASKING = 16  # heads of chains that are asked at a time


class Answering:
    """``chains`` gives the chains that begin here, once there are any; ``rejected`` the peers that
    the admission test has turned away. ``began`` is called when a request comes in, ``used`` with
    the peers of its route when it is done."""

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
        began: Callable[[], None],
        used: Callable[[Iterable[PeerId]], None],
        rng: random.Random,
    ) -> None:
        self._identity = identity
        self._trust = trust
        self._transport = transport
        self._gossip = gossip
        self._holdings = holdings
        self._chains = chains
        self._rejected = rejected
        self._began = began
        self._used = used
        self._rng = rng
        self._in_flight = InFlight()
        self._affinity = Affinity()
        self._explanations = explain.Explanations()
        self._slowness = Slowness()
        self.active = 0  # requests of this node's own clients
        self._nursery: trio.Nursery | None = None
        self._asking = 0
        self.forward = ForwardServer(identity, self._run)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer peers that ask what a response took here, and ask them, until cancelled."""
        self._transport.serve(explain.EXPLAIN_KIND, self._tell_seconds)
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

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
        self.active += 1
        self._began()
        try:
            async with aclosing(answer(request, request_id, around, keep=keep)) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        self._completed(request_id, event)
                    yield event
        finally:
            self.active -= 1

    def _completed(self, response: str, record: Completed) -> None:
        self._explanations.completed(response, record.timings, len(record.token_ids))
        found = self._explanations.find(response)
        if found is None:
            return
        route = found.choices[-1].route
        self._used(hop.peer for hop in route.hops)
        if isinstance(route, Chain) and route.peer != self._identity.peer_id:
            if self._asking < MAX_ASKING and self._nursery is not None:
                self._nursery.start_soon(self._learn_later, response, route.peer)
        else:
            self._learn(response, self._explanations.stage_seconds(response))

    async def _learn_later(self, response: str, head: PeerId) -> None:
        """What the stages of a chain have computed only its head knows."""
        self._asking += 1
        try:
            self._learn(response, await self._seconds_at(head, response))
        finally:
            self._asking -= 1

    def _learn(self, response: str, stages: explain.StageSeconds) -> None:
        for peer, predicted, actual in self._explanations.work(response, stages):
            self._slowness.observed(peer, predicted, actual, trio.current_time())

    async def _seconds_at(self, head: PeerId, response: str) -> explain.StageSeconds:
        """Empty when the head of the chain does not tell."""
        with suppress(TransportError, explain.NoFigures):
            link = await self.reach(head)
            told = await link.request(explain.EXPLAIN_KIND, response, timeout=5.0)
            return explain.parse_seconds(told.body)
        return ()

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
                actual[head] = await self._seconds_at(head, name)
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
