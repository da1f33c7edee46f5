"""From a checked body to the generations that it asks for. Pure: randomness is an argument.

One HTTP request can ask for several answers: ``n`` choices of each of several prompts. Each becomes
a :class:`GenerateRequest` of its own, in the order of their ``index`` in the response: all choices
of the first prompt, then those of the second, as in the original.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from inference.generation import GenerateRequest, SamplingParams
from mesh.api.errors import ApiError, from_validation
from mesh.api.openai.schema import MAX_CHOICES, ChatRequest, CompletionRequest, Message

# What the original takes for /v1/completions when the client says nothing. (In chat: no limit.)
DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Ask:
    """What a client wants: the generations, and how the answer is to look."""

    kind: Literal["chat", "completion"]
    model: str
    requests: tuple[GenerateRequest, ...]  # by index of the choice
    n: int  # choices of one prompt; len(requests) is a multiple
    stream: bool
    include_usage: bool
    names: Mapping[str, str]  # of fields of a GenerateRequest, where the body calls them otherwise

    @property
    def logprobs(self) -> int | None:
        """How many alternatives per token to show; None: no logprobs."""
        return self.requests[0].sampling.logprobs


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice`` of a prompt, in [0, 2**63).

    Choice 0 uses the seed itself, so that asking for more choices does not change the first. The
    others use the first 8 bytes of SHA-256 over ``meshnode-choice-seed-v1``, the seed (8 bytes)
    and the choice (4 bytes), big-endian, without the top bit.
    """
    if choice == 0:
        return seed
    data = b"meshnode-choice-seed-v1" + seed.to_bytes(8, "big") + choice.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") & _SEED_MASK


def chat_ask(data: dict[str, Any], draw_seed: Callable[[], int]) -> Ask:
    """Raises :class:`ApiError` 400 that names the field at fault."""
    try:
        body = ChatRequest.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data) from None
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs", "needs 'logprobs' to be true")
    limit_name, limit = _chat_limit(body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompts = [{"messages": [_plain(message) for message in body.messages]}]
    names = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit_name}
    return _ask("chat", body, data, prompts, limit, logprobs, names, draw_seed)


def completion_ask(data: dict[str, Any], draw_seed: Callable[[], int]) -> Ask:
    """Raises :class:`ApiError` 400 that names the field at fault."""
    try:
        body = CompletionRequest.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, data) from None
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of != n:
        raise _invalid("best_of", "can only be the same as 'n'", "unsupported_value")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompts = _prompts(body.prompt)
    names = {"prompt_tokens": "prompt", "messages": "prompt"}
    return _ask("completion", body, data, prompts, limit, body.logprobs, names, draw_seed)


def _ask(
    kind: Literal["chat", "completion"],
    body: ChatRequest | CompletionRequest,
    data: dict[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str],
    draw_seed: Callable[[], int],
) -> Ask:
    n = 1 if body.n is None else body.n
    if n * len(prompts) > MAX_CHOICES:
        raise _invalid("n", f"prompts times n can be at most {MAX_CHOICES}")
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "needs 'stream' to be true")
    # A negative seed is as good as any other; generations know only those below 2**63.
    seed = draw_seed() if body.seed is None else body.seed & _SEED_MASK
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        sampling = SamplingParams.model_validate(_sampling(body, seed, logprobs))
        firsts = [
            GenerateRequest.model_validate(
                {
                    "model": body.model,
                    "sampling": sampling,
                    "max_tokens": max_tokens,
                    "stop": stop,
                    "ignore_eos": bool(body.ignore_eos),
                    **prompt,
                }
            )
            for prompt in prompts
        ]
    except ValidationError as error:
        raise from_validation(error, data, names) from None
    variants = [
        sampling.model_copy(update={"seed": choice_seed(seed, choice)}) for choice in range(n)
    ]
    return Ask(
        kind=kind,
        model=body.model,
        requests=tuple(
            first.model_copy(update={"sampling": variant})
            for first in firsts
            for variant in variants
        ),
        n=n,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        names=names,
    )


def _sampling(
    body: ChatRequest | CompletionRequest, seed: int, logprobs: int | None
) -> dict[str, Any]:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": None if body.logit_bias is None else _biases(body.logit_bias),
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    return {**wanted, "seed": seed, "logprobs": logprobs}


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        # One spelling per token: "7" and "07" would be two entries for one token.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise _invalid("logit_bias", f"{key[:40]!r} is not a token id")
        biases[int(key)] = bias
    return biases


def _chat_limit(body: ChatRequest) -> tuple[str, int | None]:
    """The limit on new tokens, and the name that the client gave it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise _invalid("max_tokens", "differs from 'max_completion_tokens'; give one of them")
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _plain(message: Message) -> dict[str, Any]:
    # Templates know no "developer": it is the newer name of "system". Parts are paragraphs.
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    return {"role": role, "content": content}


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_tokens": prompt}]
    return [{"prompt": one} if isinstance(one, str) else {"prompt_tokens": one} for one in prompt]


def _invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, f"{param!r}: {message}", param=param)
