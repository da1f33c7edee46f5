"""Why a stage does not do what it was asked to."""

from __future__ import annotations

from typing import Literal, cast, get_args

RefusalCode = Literal[
    "malformed",  # not a message of this protocol
    "bad_size",  # the payload is not what the header says
    "not_finite",  # an activation is infinite or NaN
    "unknown_model",  # no stage of a model with that digest is loaded
    "wrong_range",  # the model is here, but another range of its layers
    "wrong_rank",  # the place in the chain does not go with the range
    "wrong_encoding",  # activations in a form that this node does not take
    "wrong_peer",  # it comes from a node that has no business in this chain
    "chain_mismatch",  # another description of a chain that is open
    "unknown_chain",
    "unknown_session",
    "session_exists",
    "stale_epoch",  # the chain has been fenced since
    "wrong_position",  # not where the session's tokens end
    "beyond_capacity",  # more tokens than the session has reserved
    "no_free_blocks",  # KV memory is taken
    "context_length",  # more tokens than the model can attend to
    "next_unreachable",  # no link to the next stage, or to the head
    "not_kept",  # activations that were to be sent again are no longer here
    "engine_failed",  # the runtime under the stage failed
    "closing",  # the stage is being shut down
]
_CODES: frozenset[str] = frozenset(get_args(RefusalCode))


class Refusal(Exception):
    """``code`` is for programs, ``message`` says what was wrong and what would be right."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: RefusalCode = code
        self.message = message

    @classmethod
    def told(cls, code: str, message: str) -> Refusal:
        """A refusal that a peer sent; a code that is not known here is its engine's failure."""
        known = cast(RefusalCode, code) if code in _CODES else "engine_failed"
        return cls(known, message)
