"""The bodies of the OpenAI API, as strictly as this node can honour them.

A field that is not here is refused by name. Three kinds of fields are here without doing anything:

* *hints*, whose effect nobody could observe (``user``, ``metadata``, ``safety_identifier``,
  ``prompt_cache_key``, ``parallel_tool_calls`` where there are no tools);
* fields with one value that describes what happens anyway (``store: false``, ``tools: []``,
  ``response_format: {"type": "text"}``): they accept just that value;
* fields that must be absent or null (``audio``, ``prediction``...): clients send such nulls.

Bounds on sampling parameters are not repeated here: :class:`SamplingParams` has them. ``null``
means "the default" everywhere, as in the original.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from inference.generation import MAX_MESSAGES

MAX_CHOICES = 64  # generations that one HTTP request may start: prompts times n
MAX_FIELDS = 64  # of one object
MAX_PARTS = 1024  # text parts of one message

# fail_fast: a hostile list of a million wrong items would otherwise become a million errors.
_Tokens = Annotated[list[int], Field(fail_fast=True, min_length=1)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Nothing = Annotated[list[Any], Field(max_length=0)]
_Hint = Annotated[str, Field(max_length=4096)]


def _at_most(limit: int) -> BeforeValidator:
    """Bounds a dictionary before pydantic looks at its entries: each wrong one is an error."""

    def check(data: Any) -> Any:
        if isinstance(data, dict) and len(data) > limit:
            raise ValueError(f"at most {limit} entries")
        return data

    return BeforeValidator(check)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        # Each unknown field becomes an error of its own, so their number has to be bounded first.
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"an object with more than {MAX_FIELDS} fields")
        return data


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(_Body):
    type: Literal["text"]


class _Common(_Body):
    """What chat and legacy completions share."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    stop: str | _Texts | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], _at_most(1024)] | None = None
    # Beyond OpenAI, under the names that vLLM and llama.cpp gave them.
    top_k: int | None = None  # -1 and 0: no limit
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    user: _Hint | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of text. Tool calls, pictures and sound are refused by name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]
    )
    # What the official client's message objects carry when they are sent back as history.
    refusal: None = None
    annotations: _Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: _Nothing | None = None


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Hints.
    metadata: Annotated[dict[str, str], _at_most(16)] | None = None
    safety_identifier: _Hint | None = None
    prompt_cache_key: _Hint | None = None
    parallel_tool_calls: bool | None = None
    # One value.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    tools: _Nothing | None = None
    functions: _Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    # None at all.
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    web_search_options: None = None


class CompletionRequest(_Common):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
        | _Tokens
        | Annotated[list[_Tokens], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: int | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None  # only the same as n
