"""Why a model cannot be cut."""

from __future__ import annotations

from typing import Literal

SplitReason = Literal[
    "no_token_input",
    "not_one_result",
    "no_data_flow",
    "not_stateful",
    "state_not_kv",  # state beside the KV cache: convolution, linear attention
    "not_layered",  # no single tensor carries everything between decoder layers
    "bad_range",
    "unknown_shape",  # a shape of an upstream tensor that a stage could not work out
]


class SplitError(Exception):
    """The model, or the range asked for, cannot be cut. Nothing has been written."""

    def __init__(self, reason: SplitReason, message: str) -> None:
        super().__init__(message)
        self.reason: SplitReason = reason
