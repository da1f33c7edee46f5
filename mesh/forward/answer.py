"""The entry node's part: find who answers, pass the answer on, and vouch for it.

An answer's last event goes out only when the receipts for it hold: for this request, these token
ids and this text, made for this node, with the weights that were chosen.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import trio
from pydantic import ValidationError

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.forward.events import AnswerEvent, Completed, Started
from mesh.forward.execution import Execution, Run
from mesh.forward.recovery import Continuation, Recovery, SignedCut, Worker
from mesh.forward.remote import RemoteGenerator
from mesh.forward.resuming import PATIENCE, Patience, ResumingGenerator
from mesh.forward.wire import Assignment, ChainHop
from mesh.identity import Identity, PeerId, TrustStore
from mesh.receipts import (
    Bundle,
    Counts,
    Expected,
    Part,
    ReceiptError,
    SignedReceipt,
    VerifiedReceipt,
    show_nodes,
    verify,
)
from mesh.receipts.record import NONCE_BYTES, serial_text
from mesh.routing.affinity import facts_of
from mesh.routing.route import Chain, RequestFacts, Route
from mesh.transport import Link, TransportError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What an answer needs from the node around it.

    ``choose_route`` and ``run_here`` raise GenerationError; ``reach`` raises TransportError.
    ``track`` is told that a request takes a route and returns what to call when it has ended.
    ``clock`` gives seconds since 1970.
    """

    identity: Identity
    trust: TrustStore
    choose_route: Callable[[RequestFacts], Route]
    run_here: Callable[[GenerateRequest, Assignment], Run]
    reach: Callable[[PeerId], Awaitable[Link]]
    track: Callable[[Route], Callable[[], None]]
    clock: Callable[[], float]


async def answer(
    request: GenerateRequest,
    request_id: str,
    around: Surroundings,
    *,
    keep: bytes | None = None,
    patience: Patience = PATIENCE,
) -> AsyncGenerator[AnswerEvent, None]:
    """Answer a request, wherever that is best, and go on elsewhere when a node is lost.

    ``keep`` is the key (:func:`mesh.forward.kept.key_of`) with which another node can ask for the
    response when this one is lost.

    Yields ``Started`` for each node that takes the request (right before its first token),
    ``TokenEvent``, the last one with ``finish``, and ``Completed``. Raises GenerationError.
    """
    response = _Response(request, request_id, around, keep)
    resuming = ResumingGenerator(response.begin, patience=patience)
    began = trio.current_time()
    first_token: float | None = None
    node: str | None = None
    async with aclosing(resuming.generate(request)) as events:
        async for event in events:
            attempt, recovery = resuming.attempt, resuming.recovery
            if attempt is None or recovery is None:
                raise GenerationError("engine_failed", "tokens came from nowhere")
            if attempt.node != node:
                node = attempt.node
                yield Started(node)
            if first_token is None:
                first_token = trio.current_time() - began
            if event.finish is None:
                yield event
                continue
            verified, bundle = response.vouch(recovery, event.finish)
            yield event
            yield Completed(
                node=verified.receipt.signer,
                receipt=bundle.to_bytes(),
                nodes=show_nodes(verified.receipt),
                timings={
                    "queue": event.finish.queue_seconds,
                    "prefill": event.finish.prefill_seconds,
                    "decode": event.finish.decode_seconds,
                    "first_token": first_token,
                    "total": trio.current_time() - began,
                },
                token_ids=tuple(recovery.token_ids),
            )


def chain_of(route: Route) -> tuple[ChainHop, ...]:
    """The stages of a route that is a chain; empty for a whole model."""
    if not isinstance(route, Chain):
        return ()
    return tuple(ChainHop(peer=hop.peer, first=hop.first, last=hop.last) for hop in route.hops)


class _Response:
    """One response: what stays the same over all attempts at it."""

    def __init__(
        self,
        request: GenerateRequest,
        request_id: str,
        around: Surroundings,
        keep: bytes | None,
    ) -> None:
        self._request = request
        self._keep = keep
        self._id = request_id
        self._around = around
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._digest: str | None = None
        self._attempt: _Attempt | None = None

    async def begin(self, continuation: Continuation) -> _Attempt:
        """Choose a route and get an attempt ready."""
        request = continuation.request
        # Tokens that are out came from certain weights; only those can carry on.
        pinned = self._digest if request.resume else None
        route = self._around.choose_route(
            facts_of(
                request,
                digest=pinned,
                exclude=frozenset(PeerId(peer) for peer in continuation.avoid),
            )
        )
        self._digest = route.digest
        try:
            assignment = Assignment(
                response=self._id,
                nonce=self._nonce,
                model_digest=route.digest,
                resume=request.resume,
                text=continuation.text,
                earlier=continuation.segments,
                chain=chain_of(route),
                keep=self._keep,
            )
        except ValidationError as error:
            raise GenerationError(
                "node_lost", "the response is too long to be carried on by another node"
            ) from error
        self._attempt = _Attempt(route, assignment, self._around, self._check)
        return self._attempt

    def vouch(self, recovery: Recovery, finish: Finish) -> tuple[VerifiedReceipt, Bundle]:
        """Check the receipts of the whole response. Raises GenerationError."""
        attempt = self._attempt
        signed = attempt.receipt if attempt is not None else None
        if attempt is None or signed is None:
            raise GenerationError("engine_failed", "the answer came without a receipt")
        counts = Counts(
            prompt=finish.prompt_tokens,
            completion=finish.completion_tokens,
            cached=finish.cached_tokens,
        )
        try:
            return self._check(recovery, signed, finish, counts)
        except ReceiptError as error:
            _log.warning("the receipt of %s does not hold: %s", attempt.node, error)
            raise GenerationError(
                "engine_failed", f"the receipt of {attempt.node} does not hold: {error.message}"
            ) from error

    def _check(
        self,
        recovery: Recovery,
        signed: SignedReceipt,
        finish: Finish | None = None,
        counts: Counts | None = None,
    ) -> tuple[VerifiedReceipt, Bundle]:
        around = self._around
        bundle = Bundle((*recovery.receipts, signed))
        verified = verify(
            bundle,
            around.trust.roots,
            network=around.trust.network,
            now=around.clock(),
            revoked={key: kept.revoked for key, kept in around.trust.revocation_lists.items()},
            expected=Expected(
                request=self._request,
                token_ids=recovery.token_ids,
                text=recovery.text,
                finish=finish.reason if finish is not None else None,
                counts=counts,
                entry=around.identity.peer_id,
                nonce=self._nonce,
                model_name=self._request.model,
                model_digest=self._digest,
            ),
        )
        return verified, bundle


class _Attempt:
    """One route, tried."""

    def __init__(
        self,
        route: Route,
        assignment: Assignment,
        around: Surroundings,
        check: Callable[[Recovery, SignedReceipt], tuple[VerifiedReceipt, Bundle]],
    ) -> None:
        self._route = route
        self._assignment = assignment
        self._around = around
        self._check = check
        self._link: Link | None = None
        self._generator: Execution | RemoteGenerator | None = None

    @property
    def node(self) -> str:
        return self._route.peer

    @property
    def receipt(self) -> SignedReceipt | None:
        return self._generator.receipt if self._generator is not None else None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        ended = self._around.track(self._route)
        try:
            generator = self._generator = await self._ready(request)
            async with aclosing(generator.generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            ended()

    def worker(self) -> Worker:
        serials = {self._around.identity.peer_id: self._around.identity.certificate.serial}
        if self._link is not None:
            serials[self._link.peer] = self._link.certificate.serial
        return Worker(
            self.node,
            tuple(
                Part(
                    peer=hop.peer,
                    serial=serial_text(serials[hop.peer]) if hop.peer in serials else None,
                    stage=(hop.first, hop.last),
                    tokens=(0, 0),
                )
                for hop in self._route.hops
            ),
        )

    def cut(self, recovery: Recovery) -> SignedCut | None:
        here = self._generator if isinstance(self._generator, Execution) else None
        signed = here.cut(len(recovery.token_ids)) if here is not None else self.receipt
        if signed is None:
            return None
        try:
            verified, _ = self._check(recovery, signed)
        except ReceiptError as error:
            _log.warning("the receipt of %s does not hold: %s", self.node, error)
            return None
        receipt = verified.receipt
        return SignedCut(signed, receipt.segments[-1], receipt.text_bytes)

    async def _ready(self, request: GenerateRequest) -> Execution | RemoteGenerator:
        around = self._around
        if self.node == around.identity.peer_id:
            return Execution(
                around.run_here(request, self._assignment),
                self._assignment,
                entry=around.identity.peer_id,
                identity=around.identity,
                clock=around.clock,
            )
        try:
            self._link = await around.reach(self._route.peer)
        except TransportError as error:
            raise GenerationError("node_lost", f"{self.node} cannot be reached: {error}") from error
        return RemoteGenerator(self._link, self._assignment)
