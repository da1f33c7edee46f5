"""What can go wrong with a generation, in words a client can act on.

The codes are those of the OpenAI API where it has one. An error travels unchanged from the node
that found it to the client, so it must say what was wrong and what would be right.
"""

from __future__ import annotations

from typing import Literal

ErrorCode = Literal[
    "context_length_exceeded",  # prompt (+ max_tokens) does not fit the model's context
    "invalid_value",  # a parameter is outside what is possible
    "unsupported_parameter",  # a parameter that this engine cannot honour
    "model_not_found",  # nobody serves this model
    "overloaded",  # bounded queues are full; try again after `retry_after`
    "node_lost",  # the node that worked on it is gone and there is no other way
    "engine_failed",  # the runtime under the model failed
]


class GenerationError(Exception):
    """A generation that cannot start or go on.

    ``param`` names the request parameter at fault, where there is one; ``retry_after`` is in
    seconds and only set when trying again can help.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
