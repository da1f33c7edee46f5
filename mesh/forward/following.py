"""The asking side of a response that has lost its entry node: find who keeps it, pass on the rest.

Every linked peer is asked at once, each with a proof of its own; the first that has the response
gives it. The receipt is checked as the first entry node would have checked it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import trio

from inference.errors import GenerationError
from mesh.forward.events import AnswerEvent, Completed, Started
from mesh.forward.kept import KeptResponses, proof_of
from mesh.forward.remote import next_message
from mesh.forward.wire import (
    KEPT_KIND,
    KeptCall,
    WireError,
    read_frame,
    read_kept,
    read_receipt,
    read_refusal,
)
from mesh.identity import Identity, TrustStore
from mesh.receipts import (
    Bundle,
    Expected,
    ReceiptError,
    VerifiedReceipt,
    show_nodes,
    verify,
)
from mesh.transport import Lane, Link, LinkClosed, Message, RemoteError, TransportError

_log = logging.getLogger(__name__)

FIND_SECONDS = 3.0


class NotKept(Exception):
    """Nobody has the response (``not_found``), or not all of what is asked for (``gone``)."""

    def __init__(self, reason: Literal["not_found", "gone"]) -> None:
        super().__init__(reason)
        self.reason: Literal["not_found", "gone"] = reason


@dataclass(frozen=True)
class Wanted:
    """What comes after the first ``after`` tokens of a response, whose client gave ``key``."""

    response: str
    key: bytes
    after: int


class Follower:
    """The rest of one response, from who keeps it. Use :meth:`events` once, or close it."""

    def __init__(
        self,
        node: str,
        after: int,
        first: Message,
        frames: AsyncGenerator[Message, None],
        check: Callable[[Bundle, Expected], VerifiedReceipt],
    ) -> None:
        self.node = node
        self.request, self._known = read_kept(first.body, first.payload)
        if len(self._known.token_ids) != after:
            raise WireError("the kept response begins elsewhere")
        self._frames = frames
        self._check = check

    async def aclose(self) -> None:
        await self._frames.aclose()

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Like those of :func:`mesh.forward.answer.answer`. Raises GenerationError."""
        began = trio.current_time()
        try:
            yield Started(self.node)  # a client that leaves here is a reader less, too
            ids, texts = list(self._known.token_ids), [self._known.text]
            async for message in self._frames:
                frame = read_frame(message.body)
                if frame is None:
                    continue
                if isinstance(frame, GenerationError):
                    raise frame
                position, event = frame
                if position != len(ids):
                    raise WireError(f"token {len(ids)} is missing")
                texts.append(event.text)
                if event.token_id is not None:
                    ids.append(event.token_id)
                if event.finish is None:
                    yield event
                    continue
                signed = read_receipt(message.payload)
                if signed is None:
                    raise WireError("the answer came without a receipt")
                bundle = Bundle((signed,))
                expected = Expected(
                    request=self.request,
                    token_ids=ids,
                    text="".join(texts),
                    finish=event.finish.reason,
                    model_name=self.request.model,
                )
                receipt = self._check(bundle, expected).receipt
                yield event
                yield Completed(
                    node=receipt.signer,
                    receipt=bundle.to_bytes(),
                    nodes=show_nodes(receipt),
                    timings={
                        "queue": event.finish.queue_seconds,
                        "prefill": event.finish.prefill_seconds,
                        "decode": event.finish.decode_seconds,
                        "total": trio.current_time() - began,
                    },
                    token_ids=tuple(ids),
                )
                return
            raise WireError("the answer ended without an end")
        except LinkClosed as error:
            raise GenerationError("node_lost", f"the link to {self.node} was lost") from error
        except RemoteError as error:
            raise read_refusal(error.code, error.message, error.data) from error
        except ReceiptError as error:
            raise GenerationError(
                "engine_failed", f"the receipt of {self.node} does not hold: {error.message}"
            ) from error
        except WireError as error:
            raise GenerationError("engine_failed", f"{self.node}: {error}") from error
        finally:
            await self._frames.aclose()


async def find(
    wanted: Wanted,
    *,
    identity: Identity,
    trust: TrustStore,
    here: KeptResponses,
    links: Iterable[Link],
    clock: Callable[[], float],
) -> Follower:
    """Find who keeps a response, this node included. Raises NotKept.

    ``clock`` gives seconds since 1970.
    """
    me = identity.peer_id

    def call_for(holder: str) -> KeptCall:
        proof = proof_of(wanted.key, wanted.response, asker=me, holder=holder)
        return KeptCall(response=wanted.response, proof=proof, after=wanted.after)

    def check(bundle: Bundle, expected: Expected) -> VerifiedReceipt:
        revoked = {key: kept.revoked for key, kept in trust.revocation_lists.items()}
        return verify(
            bundle,
            trust.roots,
            network=trust.network,
            now=clock(),
            revoked=revoked,
            expected=expected,
        )

    search = _Search()
    await search.ask(me, here.follow(me, call_for(me)))
    if search.found is None:
        with trio.move_on_after(FIND_SECONDS):
            async with trio.open_nursery() as nursery:
                search.end = nursery.cancel_scope.cancel
                for link in links:
                    frames = _frames(link, call_for(link.peer))
                    nursery.start_soon(search.ask, link.peer, frames)
    if search.found is None:
        raise NotKept("gone" if search.gone else "not_found")
    holder, first, frames = search.found
    try:
        return Follower(holder, wanted.after, first, frames, check)
    except WireError as error:
        await frames.aclose()
        raise GenerationError("engine_failed", f"{holder}: {error}") from error


class _Search:
    """The first who has the response ends the search."""

    def __init__(self) -> None:
        self.found: tuple[str, Message, AsyncGenerator[Message, None]] | None = None
        self.gone = False
        self.end: Callable[[], None] = lambda: None

    async def ask(self, peer: str, frames: AsyncGenerator[Message, None]) -> None:
        try:
            first = await anext(frames)
        except RemoteError as error:
            self.gone = self.gone or error.code == "gone"
        except (TransportError, GenerationError, WireError) as error:
            _log.debug("%s was asked for a response: %s", peer, error)
        else:
            if self.found is None:
                self.found = peer, first, frames
                self.end()
                return
        await frames.aclose()


async def _frames(link: Link, call: KeptCall) -> AsyncGenerator[Message, None]:
    answer = await link.open(KEPT_KIND, call.model_dump(mode="python"), lane=Lane.CONTROL)
    try:
        while True:
            yield await next_message(link, answer)
    finally:
        await answer.aclose()
