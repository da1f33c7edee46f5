"""How a response goes on when the node that makes it is lost: the decisions, without I/O.

A response is made in *attempts*. Each has an epoch; what arrives from an earlier epoch is dropped.
The machine keeps every token id that went to the client and its text. When an attempt ends early,
the next one gets those ids as ``resume`` and owes exactly the events that the client has not seen:
positions say which ones those are, so nothing is lost and nothing comes twice.

    choosing --begin()--> running --event(finish)--> done
        ^                    |
        +------lost()--------+----> done (nothing left to try)

Nothing about the sampling has to be carried: penalties, stop strings, the seed and ``max_tokens``
are functions of the request and of the ids so far, and so are the token counts of the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inference.errors import ErrorCode, GenerationError
from inference.generation import GenerateRequest, TokenEvent
from mesh.receipts import Part, Segment, SignedReceipt

# Of one response. Each costs a prefill; a response that loses five nodes has another problem.
MAX_ATTEMPTS = 5

# The request itself is at fault, whoever runs it.
_HOPELESS: frozenset[ErrorCode] = frozenset(
    {"context_length_exceeded", "invalid_value", "unsupported_parameter"}
)


@dataclass(frozen=True)
class Continuation:
    """What the next attempt is to do.

    ``request`` carries the ids to resume from, ``text`` is their text and ``segments`` say who made
    them. ``avoid`` are the nodes that have failed this response.
    """

    epoch: int
    request: GenerateRequest
    text: str
    segments: tuple[Segment, ...]
    avoid: frozenset[str]


@dataclass(frozen=True)
class Worker:
    """Who works on an attempt: the replica or rank 0, and all parts as the route named them.

    The token ranges of ``parts`` are ignored: they follow from what arrives.
    """

    node: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class SignedCut:
    """A checked receipt of a node that stopped before the end, and the segment it states."""

    receipt: SignedReceipt
    segment: Segment
    text_bytes: int  # of all text so far


@dataclass
class Recovery:
    """The state of one response. ``request.resume`` must be empty: this machine fills it."""

    request: GenerateRequest
    max_attempts: int = MAX_ATTEMPTS
    state: Literal["choosing", "running", "done"] = field(default="choosing", init=False)
    epoch: int = field(default=0, init=False)
    token_ids: list[int] = field(default_factory=list, init=False)
    _texts: list[str] = field(default_factory=list, init=False)  # of each token
    _tail: str = field(default="", init=False)  # of a last event without a token
    _segments: list[Segment] = field(default_factory=list, init=False)
    _receipts: list[SignedReceipt] = field(default_factory=list, init=False)
    _avoid: set[str] = field(default_factory=set, init=False)
    _first: int = field(default=0, init=False)  # position where the running attempt began
    _failure: GenerationError | None = field(default=None, init=False)  # of the last attempt lost

    def __post_init__(self) -> None:
        if self.request.resume:
            raise ValueError("a response is recovered from its beginning")

    @property
    def text(self) -> str:
        """All text that went out."""
        return "".join(self._texts) + self._tail

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Who made the tokens of the attempts that were lost."""
        return tuple(self._segments)

    @property
    def receipts(self) -> tuple[SignedReceipt, ...]:
        """The receipts of those among :attr:`segments` that have one, in order."""
        return tuple(self._receipts)

    def begin(self) -> Continuation:
        """Start the next attempt."""
        self._must_be("choosing")
        self.epoch += 1
        self.state = "running"
        if len(self.token_ids) == self.request.max_tokens:
            # All tokens are here and only the end is missing. A request cannot resume from there,
            # so the last token is made again; it is dropped as a duplicate, its end is not.
            self._shorten()
            self._first = len(self.token_ids) - 1
        else:
            self._first = len(self.token_ids)
        return Continuation(
            self.epoch,
            self.request.model_copy(update={"resume": tuple(self.token_ids[: self._first])}),
            "".join(self._texts[: self._first]),
            self.segments,
            frozenset(self._avoid),
        )

    def event(self, epoch: int, position: int, event: TokenEvent) -> TokenEvent | None:
        """What the client gets for an event; None for nothing.

        ``position`` counts the output tokens before the event. Raises GenerationError when the
        event cannot belong to this response: the attempt is worthless, give it to :meth:`lost`.
        """
        if not self._is_current(epoch):
            return None
        known = len(self.token_ids)
        if event.token_id is None:
            if position != known:
                raise GenerationError("engine_failed", "the end came before all tokens did")
            self._tail = event.text
            self._end(event)
            return event
        if position > known:
            raise GenerationError("engine_failed", f"token {known} is missing")
        if position < known:
            return self._duplicate(position, event)
        if self.request.max_tokens is not None and known >= self.request.max_tokens:
            raise GenerationError("engine_failed", "more tokens than the request allows")
        self.token_ids.append(event.token_id)
        self._texts.append(event.text)
        if event.finish is not None:
            self._end(event)
        return event

    def lost(
        self,
        epoch: int,
        worker: Worker,
        error: GenerationError,
        signed: SignedCut | None = None,
    ) -> GenerationError | None:
        """``worker`` ended its attempt early. None: begin another; else the error for the client.

        ``signed``: what it signed for the tokens that it made, if it lived to do so.
        """
        if not self._is_current(epoch):
            return None
        self._failure = error
        self._close_segment(worker, signed)
        self._avoid.add(worker.node)
        # A node took the request and made tokens, so later refusals are the nodes' own.
        hopeless = error.code in _HOPELESS and not self.token_ids
        if hopeless or self.epoch >= self.max_attempts:
            self.state = "done"
            return self._final(error)
        self.state = "choosing"
        return None

    def no_route(self, epoch: int, error: GenerationError) -> GenerationError:
        """There is nobody to begin the attempt with; ``error`` is the router's reason.

        Returns the error for the client: what ended the attempt before says more, if there was one.
        """
        if not self._is_current(epoch):
            raise ValueError("not the running attempt")
        self.state = "done"
        return self._final(self._failure or error)

    def _final(self, error: GenerationError) -> GenerationError:
        """The first refusals say best what is wrong; after a token the response is broken off."""
        if not self.token_ids:
            return error
        return GenerationError(
            "node_lost",
            f"the response broke off after {len(self.token_ids)} tokens and no other node "
            f"can carry it on: {error.message}",
            retry_after=error.retry_after,
        )

    def _duplicate(self, position: int, event: TokenEvent) -> TokenEvent | None:
        """A token that the client has. Only an end that came with it is news."""
        if event.token_id != self.token_ids[position]:
            raise GenerationError(
                "engine_failed", f"token {position} came again and was another one"
            )
        if event.finish is None:
            return None
        sent = self._texts[position]
        if position != len(self.token_ids) - 1 or not event.text.startswith(sent):
            raise GenerationError("engine_failed", "the end came before all tokens did")
        rest = TokenEvent(token_id=None, text=event.text[len(sent) :], finish=event.finish)
        self._tail = rest.text
        self._end(rest)
        return rest

    def _end(self, event: TokenEvent) -> None:
        if event.finish is None:
            raise GenerationError("engine_failed", "an event without a token or an end")
        self.state = "done"

    def _close_segment(self, worker: Worker, signed: SignedCut | None) -> None:
        """Put on record who made the tokens of the attempt that ended."""
        made = (self._first, len(self.token_ids))
        if made[0] >= made[1]:
            return
        if (
            signed is not None
            and signed.segment.tokens == made
            and signed.segment.node == worker.node
            and signed.text_bytes == len("".join(self._texts).encode())
        ):
            segment = signed.segment.model_copy(
                update={"evidence": "receipt", "receipt": signed.receipt.digest}
            )
            self._segments.append(segment)
            self._receipts.append(signed.receipt)
        else:
            self._segments.append(_lost(worker.node, worker.parts, made))

    def _shorten(self) -> None:
        """Take the last token out of the record: the next attempt answers for it."""
        if not self._segments:
            return
        last = self._segments.pop()
        if last.evidence == "receipt":  # which states a token more than is now left to it
            self._receipts.pop()
        first, end = last.tokens
        if end - 1 > first:
            self._segments.append(_lost(last.node, last.parts, (first, end - 1)))

    def _is_current(self, epoch: int) -> bool:
        return self.state == "running" and epoch == self.epoch

    def _must_be(self, state: str) -> None:
        if self.state != state:
            raise ValueError(f"the response is {self.state}, not {state}")


def _lost(node: str, parts: Sequence[Part], tokens: tuple[int, int]) -> Segment:
    return Segment(
        node=node,
        tokens=tokens,
        evidence="lost",
        parts=tuple(part.model_copy(update={"tokens": tokens}) for part in parts),
    )
