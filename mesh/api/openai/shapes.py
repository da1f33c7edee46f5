"""The JSON of answers: chat and legacy completions, whole and in chunks. Pure.

A shape is made for one HTTP request and may remember what it has already shown of each choice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from inference.generation import FinishReason, TokenEvent, TokenLogprob
from mesh.api.openai.translate import Ask

Json = dict[str, Any]


class Shape(ABC):
    """How an answer of one kind looks. ``created`` is in seconds since 1970."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        self._ask = ask
        self._id = f"{self.id_prefix}-{request_id}"
        self._created = created

    def whole(self, choices: Sequence[Json], usage: Json, mesh: Json) -> Json:
        """The body of a plain response."""
        head = self._head(self.whole_object)
        return {**head, "choices": list(choices), "usage": usage, "mesh": mesh}

    def chunk(self, choice: Json | None, usage: Json | None = None) -> Json:
        """One event of a stream. Without a choice: the last one, which carries the usage.

        Where usage was asked for, every earlier chunk says ``"usage": null``.
        """
        head = self._head(self.chunk_object)
        chunk = {**head, "choices": [] if choice is None else [choice]}
        if self._ask.include_usage:
            chunk["usage"] = usage
        return chunk

    def _head(self, name: str) -> Json:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._ask.model,
        }

    @abstractmethod
    def whole_choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> Json:
        """A complete choice for a plain response."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """What a stream says of a choice before its first text; None: nothing."""

    @abstractmethod
    def delta(self, index: int, event: TokenEvent) -> Json | None:
        """What an event adds to a choice; None when it adds nothing."""

    @abstractmethod
    def closing(self, index: int, reason: FinishReason) -> Json:
        """The choice that a stream ends with."""


class ChatShape(Shape):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> Json:
        text = "".join(event.text for event in events)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if self._ask.logprobs is None else _chat_logprobs(events),
            "finish_reason": reason,
        }

    def opening(self, index: int) -> Json | None:
        return _chat_chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, index: int, event: TokenEvent) -> Json | None:
        logprobs = None
        if self._ask.logprobs is not None and event.logprob is not None:
            logprobs = _chat_logprobs([event])
        if not event.text and logprobs is None:
            return None
        return _chat_chunk(index, {"content": event.text}, logprobs=logprobs)

    def closing(self, index: int, reason: FinishReason) -> Json:
        return _chat_chunk(index, {}, reason=reason)


class CompletionShape(Shape):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, ask: Ask, request_id: str, created: int) -> None:
        super().__init__(ask, request_id, created)
        self._offsets = [0] * len(ask.requests)

    def whole_choice(self, index: int, events: Sequence[TokenEvent], reason: FinishReason) -> Json:
        text = "".join(event.text for event in events)
        return self._choice(index, text, self._logprobs(index, events), reason)

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, event: TokenEvent) -> Json | None:
        if not event.text and (self._ask.logprobs is None or event.logprob is None):
            return None
        return self._choice(index, event.text, self._logprobs(index, [event]))

    def closing(self, index: int, reason: FinishReason) -> Json:
        return self._choice(index, "", None, reason)

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: Json | None, reason: FinishReason | None = None
    ) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, events: Sequence[TokenEvent]) -> Json | None:
        """Four lists side by side. ``text_offset`` counts characters of the tokens' own texts."""
        if self._ask.logprobs is None:
            return None
        tokens, values, offsets, tops = [], [], [], []
        for event in events:
            chosen = event.logprob
            if chosen is None:
                continue
            tokens.append(chosen.token)
            values.append(_finite(chosen.logprob))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(chosen.token)
            tops.append(_by_text([*event.top_logprobs, chosen]))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "text_offset": offsets,
            "top_logprobs": tops if self._ask.logprobs else None,
        }


def make_shape(ask: Ask, request_id: str, created: int) -> Shape:
    kind = ChatShape if ask.kind == "chat" else CompletionShape
    return kind(ask, request_id, created)


def _chat_chunk(
    index: int, delta: Json, *, logprobs: Json | None = None, reason: FinishReason | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _chat_logprobs(events: Sequence[TokenEvent]) -> Json:
    content = [
        {**_token(event.logprob), "top_logprobs": [_token(top) for top in event.top_logprobs]}
        for event in events
        if event.logprob is not None
    ]
    return {"content": content, "refusal": None}


def _token(entry: TokenLogprob) -> Json:
    # A token that is part of a character decodes to U+FFFD: then its text does not give its bytes.
    known = "\ufffd" not in entry.token
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.token.encode()) if known else None,
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; the original writes -9999 for a token that cannot happen."""
    return logprob if math.isfinite(logprob) else -9999.0


def _by_text(entries: Sequence[TokenLogprob]) -> dict[str, float]:
    """Log probabilities by text; of several tokens with the same text, the likeliest."""
    ranked = sorted(entries, key=lambda entry: entry.logprob)
    return {entry.token: _finite(entry.logprob) for entry in ranked}
