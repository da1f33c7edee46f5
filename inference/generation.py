"""The one interface for running a language model: a request in, token events out.

Three things implement :class:`Generator`: an engine in this process, a peer that runs the request,
and a chain of stages. Whoever consumes one cannot tell which it is.

Resuming rests on two rules that every implementation keeps:

* Sampling at position ``n`` of the output depends only on the request and on ``n`` (randomness is
  counter-based from ``sampling.seed``), never on what ran before in the same process.
* The text of an event depends only on the token ids up to and including that event. So a generation
  that starts with ``resume`` emits exactly the events that the lost one still owed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20
MAX_TEXT = 4 << 20  # characters of one prompt or of one message
MAX_MESSAGES = 4096
MAX_TOKENS = 1 << 20

# A tuple here is a list on the wire; its items stay strict.
_Listed = Strict(False)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
FinishReason = Literal["stop", "length"]


class _Frozen(BaseModel):
    """Immutable and strict: these objects are also built from what a peer sent."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class SamplingParams(_Frozen):
    """How a token is drawn from logits. Defaults leave the model's distribution as it is."""

    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)  # 0: greedy
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, le=1 << 20)  # 0: no limit
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=10.0, allow_inf_nan=False)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, max_length=1024
    )
    # The entry node draws a seed when the client gave none, so that any node can resume.
    seed: int = Field(0, ge=0, lt=1 << 63)
    # None: no logprobs. 0: of the chosen token only. k: and of the k most likely.
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class GenerateRequest(_Frozen):
    """One completion of one prompt. Exactly one of ``messages``, ``prompt``, ``prompt_tokens``."""

    model: str = Field(min_length=1, max_length=256)
    messages: Annotated[tuple[dict[str, Any], ...], _Listed] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES
    )
    prompt: str | None = Field(None, max_length=MAX_TEXT)
    prompt_tokens: Annotated[tuple[TokenId, ...], _Listed] | None = Field(
        None, min_length=1, max_length=MAX_TOKENS
    )
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)  # None: up to the context's end
    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...], _Listed] = (
        Field((), max_length=MAX_STOP_STRINGS)
    )
    ignore_eos: bool = False
    # Token ids of the output that the client has already got, oldest first.
    resume: Annotated[tuple[TokenId, ...], _Listed] = Field((), max_length=MAX_TOKENS)

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        given = [p is not None for p in (self.messages, self.prompt, self.prompt_tokens)]
        if sum(given) != 1:
            raise ValueError("give exactly one of messages, prompt, prompt_tokens")
        if self.max_tokens is not None and len(self.resume) >= self.max_tokens:
            raise ValueError("resume already holds max_tokens tokens")
        return self


class TokenLogprob(_Frozen):
    """Log probability (natural) of a token, with its text and bytes as the tokenizer decodes it."""

    token_id: TokenId
    token: str = Field(max_length=4096)
    logprob: float


class Finish(_Frozen):
    """How a generation ended. Token counts include what came by ``resume``."""

    reason: FinishReason
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    cached_tokens: int = Field(0, ge=0)  # of the prompt, taken from a prefix cache
    queue_seconds: float = Field(0.0, ge=0.0)
    prefill_seconds: float = Field(0.0, ge=0.0)
    decode_seconds: float = Field(0.0, ge=0.0)


class TokenEvent(_Frozen):
    """One step of the output.

    ``token_id`` is None only for a last event that carries no token of its own. ``text`` is what
    became certain with this token: it can be empty (half of a character; the possible beginning of
    a stop string) and can release text that was held back. The last event has ``finish``.
    """

    token_id: TokenId | None
    text: str = Field("", max_length=1 << 16)
    logprob: TokenLogprob | None = None
    top_logprobs: Annotated[tuple[TokenLogprob, ...], _Listed] = Field(
        (), max_length=MAX_TOP_LOGPROBS
    )
    finish: Finish | None = None


class Generator(Protocol):
    """Something that answers requests for one or more models.

    ``generate`` raises :class:`inference.errors.GenerationError`, before the first event when the
    request cannot be run at all. Consumers close the iterator (``contextlib.aclosing``); closing it
    or cancelling the consumer stops the work within one token, wherever it runs. Implementations
    hold no nursery and no cancel scope open across a ``yield``.
    """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]: ...
