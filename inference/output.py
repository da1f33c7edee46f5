"""From the tokens of one generation to what its client gets: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from inference.generation import Finish, FinishReason, GenerateRequest, TokenEvent, TokenLogprob
from inference.text import TextStream
from inference.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_LONGEST_PIECE = 4096  # characters of one token that are shown beside its logprob


class Course(Protocol):
    """When a generation was asked for, started, and had its first token, in seconds of one clock;
    0 for what has not happened. ``prompt`` is the number of the prompt's tokens."""

    @property
    def prompt(self) -> int: ...
    @property
    def asked(self) -> float: ...
    @property
    def started(self) -> float: ...
    @property
    def first_token(self) -> float: ...


class Output:
    """Makes events of tokens. Text depends on token ids alone, so a generation that is resumed goes
    on with the next character; what came by ``request.resume`` is with the client already."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self.ends = frozenset[int]() if request.ignore_eos else tokenizer.eos_token_ids
        self.produced = len(request.resume)
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.decode, request.stop)
        self._over = False
        for token in request.resume:
            if token in self.ends:
                self._over = True
                break
            self._text.feed(token)

    def nothing_left(self, room: int) -> FinishReason | None:
        """Why a resumed generation has nothing left to compute, if so; ``room`` is how many tokens
        the whole output may have."""
        if self._over or self._text.stopped:
            return "stop"
        return "length" if self.produced >= room else None

    def end(self, reason: FinishReason, course: Course, now: float) -> TokenEvent:
        """The only event of a generation that has nothing left."""
        rest = "" if self._text.stopped else self._text.finish()
        return TokenEvent(token_id=None, text=rest, finish=self._finish(reason, course, now, 0))

    def event(
        self,
        token_id: int,
        reason: FinishReason | None,
        course: Course,
        now: float,
        *,
        logprob: float | None = None,
        top: Iterable[tuple[int, float]] = (),
        cached: int = 0,
    ) -> TokenEvent:
        """The next token. ``reason``: why it is the last, as far as the engine knows; a stop string
        ends the output as well. ``top`` has other tokens with their logprobs, and ``cached`` is how
        many of the prompt's tokens needed no computing."""
        self.produced += 1
        # A token that ends the output is none of its text.
        text = "" if reason == "stop" else self._text.feed(token_id)
        if reason is not None and not self._text.stopped:
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        return TokenEvent(
            token_id=token_id,
            text=text,
            logprob=None if logprob is None else self._token_logprob(token_id, logprob),
            top_logprobs=tuple(self._token_logprob(*pair) for pair in top),
            finish=None if reason is None else self._finish(reason, course, now, cached),
        )

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        piece = self._tokenizer.piece(token_id).decode("utf-8", "replace")
        return TokenLogprob(
            token_id=token_id,
            token=piece[:_LONGEST_PIECE],
            logprob=max(logprob, _LEAST_LOGPROB),
        )

    def _finish(self, reason: FinishReason, course: Course, now: float, cached: int) -> Finish:
        asked, started, first = course.asked, course.started or now, course.first_token or now
        return Finish(
            reason=reason,
            prompt_tokens=course.prompt,
            completion_tokens=self.produced,
            cached_tokens=cached,
            queue_seconds=max(0.0, started - (asked or now)),
            prefill_seconds=max(0.0, first - started),
            decode_seconds=max(0.0, now - first),
        )
