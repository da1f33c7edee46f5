"""A generation on this node, with the receipt that this node signs for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, Generator, TokenEvent
from mesh.forward.wire import Assignment
from mesh.identity import Identity
from mesh.receipts import (
    Counts,
    ModelIdentity,
    Part,
    Receipt,
    Segment,
    SignedReceipt,
    Timings,
    request_digest,
    response_digest,
    sign,
)
from mesh.receipts.record import serial_text


class Run(Generator, Protocol):
    """One request on this node: a whole model's engine, or a chain of which this node is rank 0."""

    @property
    def model(self) -> ModelIdentity: ...

    def parts(self, tokens: tuple[int, int]) -> tuple[Part, ...]:
        """Who ran which layers for these output tokens; each layer of each token once."""
        ...


@dataclass(frozen=True)
class WholeModel:
    """A :class:`Run` of an engine that holds every layer."""

    engine: Generator
    model: ModelIdentity
    identity: Identity

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        return self.engine.generate(request)

    def parts(self, tokens: tuple[int, int]) -> tuple[Part, ...]:
        certificate = self.identity.certificate
        return (
            Part(
                peer=certificate.peer_id,
                serial=serial_text(certificate.serial),
                stage=(0, self.model.layers),
                tokens=tokens,
            ),
        )


class Execution:
    """Runs an assignment and signs for what came out. A :class:`Generator` for one request.

    :attr:`receipt` is there when the event with ``finish`` is. ``entry`` is the PeerId of the node
    that asked, as its link or this process proves it; ``clock`` gives seconds since 1970.
    """

    def __init__(
        self,
        run: Run,
        assignment: Assignment,
        *,
        entry: str,
        identity: Identity,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._assignment = assignment
        self._entry = entry
        self._identity = identity
        self._clock = clock
        self._request: bytes | None = None
        self._token_ids = list(assignment.resume)
        self._texts = [assignment.text]
        self.receipt: SignedReceipt | None = None

    @property
    def position(self) -> int:
        """How many output tokens there are, those that were resumed from included."""
        return len(self._token_ids)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        wanted = self._assignment.model_digest
        if wanted is not None and wanted != self._run.model.digest:
            raise GenerationError(
                "model_not_found", f"other weights of {request.model!r} are here", param="model"
            )
        try:
            self._request = request_digest(request)
        except ValueError as error:
            raise GenerationError(
                "invalid_value", f"messages: {error}", param="messages"
            ) from error
        async with aclosing(self._run.generate(request)) as events:
            async for event in events:
                if event.token_id is not None:
                    self._token_ids.append(event.token_id)
                self._texts.append(event.text)
                if event.finish is not None:
                    self.receipt = self._sign(event.finish)
                yield event

    def cut(self, position: int) -> SignedReceipt | None:
        """A receipt for the output tokens before ``position`` of a generation that goes on
        elsewhere. Its reader has these: one more may have been made and not handed over."""
        first = len(self._assignment.resume)
        del self._token_ids[max(first, position) :]
        del self._texts[1 + self.position - first :]
        if self._request is None or self.position == first:
            return None
        return self._sign(None)

    def _sign(self, finish: Finish | None) -> SignedReceipt:
        if self._request is None:
            raise ValueError("nothing has been run")
        text = "".join(self._texts)
        made = (len(self._assignment.resume), self.position)
        node = self._identity.peer_id
        segment = Segment(node=node, tokens=made, evidence="signer", parts=self._run.parts(made))
        return sign(
            Receipt(
                request=self._request,
                response=response_digest(self._token_ids, text),
                text_bytes=len(text.encode()),
                model=self._run.model,
                entry=self._entry,
                segments=(*self._assignment.earlier, segment),
                created=int(self._clock() * 1000),
                nonce=self._assignment.nonce,
                counts=Counts(
                    prompt=finish.prompt_tokens if finish else 0,
                    completion=finish.completion_tokens if finish else self.position,
                    cached=finish.cached_tokens if finish else 0,
                ),
                timings=Timings(
                    queue=_microseconds(finish.queue_seconds if finish else 0.0),
                    prefill=_microseconds(finish.prefill_seconds if finish else 0.0),
                    decode=_microseconds(finish.decode_seconds if finish else 0.0),
                ),
                finish=finish.reason if finish else None,
            ),
            self._identity,
        )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
