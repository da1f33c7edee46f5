"""The token ids of a request's prompt, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence

from inference.errors import GenerationError
from inference.generation import GenerateRequest
from inference.tokenizer import Tokenizer


def prompt_tokens(
    request: GenerateRequest, tokenizer: Tokenizer, *, vocabulary: int, context: int
) -> list[int]:
    """Token ids of what ``request`` asks to continue, without those that came by ``resume``.

    ``vocabulary`` is the number of tokens of the model and ``context`` how many fit into it, output
    included. Blocks for as long as tokenizing takes (about 10 million tokens per second at best).
    Raises :class:`GenerationError`: ``invalid_value`` for what cannot be a prompt of this model,
    ``context_length_exceeded`` when prompt and ``max_tokens`` do not fit.
    """
    param = "prompt"
    if request.prompt_tokens is not None:
        tokens = list(request.prompt_tokens)
        _check_ids(tokens, vocabulary, param)
    elif request.messages is not None:
        param = "messages"
        # The template writes all that the model expects around a chat.
        chat = tokenizer.apply_chat_template(request.messages)
        tokens = tokenizer.encode(chat, special=False)
    else:
        tokens = tokenizer.encode(request.prompt or "")
    if not tokens:
        raise GenerationError("invalid_value", "the prompt is empty", param=param)
    wanted = request.max_tokens or 1
    if len(tokens) + wanted > context:
        raise GenerationError(
            "context_length_exceeded",
            f"the context is {context} tokens; the prompt has {len(tokens)} and "
            + (f"max_tokens asks for {wanted}" if request.max_tokens else "leaves no room"),
            param="max_tokens" if request.max_tokens and len(tokens) < context else param,
        )
    return tokens


def check_request(request: GenerateRequest, vocabulary: int) -> None:
    """Raise :class:`GenerationError` when a request names, beside its prompt, a token that the
    model does not have."""
    _check_ids(request.resume, vocabulary, "resume")
    _check_ids(list(request.sampling.logit_bias), vocabulary, "logit_bias")


def _check_ids(ids: Sequence[int], vocabulary: int, param: str) -> None:
    """Raise :class:`GenerationError` when ``ids`` has one that the model does not have.

    The runtime would read past its tables.
    """
    if ids and max(ids) >= vocabulary:
        raise GenerationError(
            "invalid_value",
            f"{param} has the token {max(ids)}, but the vocabulary has {vocabulary}",
            param=param,
        )
