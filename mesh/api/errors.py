"""Errors in the shape of the OpenAI API, the only shape a client of this server ever sees.

Three sources end up here: what pydantic says about a body, what a generation says
(:class:`inference.errors.GenerationError`), and what HTTP itself demands (404, 405, 413...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json
from starlette.responses import Response

from inference.errors import ErrorCode, GenerationError

# A client chooses the names of unknown fields; an answer need not carry megabytes of one back.
MAX_PARAM = 200
MAX_MESSAGE = 2000


class ApiError(Exception):
    """An error that goes to the client as it is: HTTP status and the four OpenAI fields."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message[:MAX_MESSAGE]
        self.param = None if param is None else param[:MAX_PARAM]
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``: the body of a response, or the data of an event in a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


def json_response(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response. What JSON cannot say (NaN, infinities) becomes null."""
    return Response(
        to_json(content, inf_nan_mode="null"),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def internal_error() -> ApiError:
    """For what nobody foresaw. The cause goes to the log; the client gets no internals."""
    return ApiError(
        500, "internal_error", "the node failed to handle this request; its log says why"
    )


_STATUS: dict[ErrorCode, int] = {
    "context_length_exceeded": 400,
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "model_not_found": 404,
    "overloaded": 503,
    "node_lost": 502,
    "engine_failed": 500,
}


def from_generation(error: GenerationError, names: Mapping[str, str]) -> ApiError:
    """The HTTP form of a generation's error; ``names``: what the body calls its fields."""
    headers = {}
    retry_after = error.retry_after
    if retry_after is None and error.code == "overloaded":
        retry_after = 1.0
    if retry_after is not None and math.isfinite(retry_after):
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    param = error.param
    if param is None:
        if error.code == "context_length_exceeded":
            param = "prompt"
        elif error.code == "model_not_found":
            param = "model"
    if param is not None:
        param = names.get(param, param)
    return ApiError(_STATUS[error.code], error.code, error.message, param=param, headers=headers)


def from_validation(
    error: ValidationError, data: Any, names: Mapping[str, str] | None = None
) -> ApiError:
    """A 400 that names the field. ``data``: what the client sent; ``names``: its names of fields
    that are called otherwise in what was validated.
    """
    details = error.errors(include_url=False, include_input=False)
    paths = [_path(detail, data, names or {}) for detail in details]
    # Of the first field at fault, the complaint that looked deepest: for a union, pydantic lists
    # what every member said, and the member that got furthest is the one that the client meant.
    head = paths[0][:1]
    depth = max(len(path) for path in paths if path[:1] == head)
    chosen = [
        (path, detail)
        for path, detail in zip(paths, details, strict=True)
        if path[:1] == head and len(path) == depth
    ]
    path, detail = chosen[0]
    same = [other for other_path, other in chosen if other_path == path]
    param = _spell(path)
    code, text = _explain(detail, same, param)
    return ApiError(400, code, text, param=param or None)


def _path(detail: ErrorDetails, data: Any, names: Mapping[str, str]) -> tuple[int | str, ...]:
    """The part of ``loc`` that exists in the data: pydantic mixes in the names of union members."""
    path: list[int | str] = []
    here = data
    for at, part in enumerate(detail["loc"]):
        if at == 0 and isinstance(part, str):
            part = names.get(part, part)
        if _has(here, part):
            here = here[part]
        elif not (detail["type"] == "missing" and at == len(detail["loc"]) - 1):
            continue
        path.append(part)
    return tuple(path)


def _has(value: Any, part: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _spell(path: tuple[int | str, ...]) -> str:
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            spelled += f".{part}" if spelled else part
    return spelled


def _explain(detail: ErrorDetails, same: list[ErrorDetails], param: str) -> tuple[str, str]:
    """Code and message for one complaint (``same``: all that union members said at that place)."""
    kind = detail["type"]
    name = param[:MAX_PARAM]
    if kind == "extra_forbidden":
        return "unsupported_parameter", f"{name!r} is not a parameter that this node can honour"
    if kind == "missing":
        return "missing_required_parameter", f"{name!r} is required"
    kinds = {other["type"] for other in same}
    if kinds == {"none_required"}:
        return "unsupported_parameter", f"{name!r} cannot be honoured by this node; leave it out"
    if "too_long" in kinds and any(d.get("ctx", {}).get("max_length") == 0 for d in same):
        return "unsupported_value", f"{name!r} can only be empty on this node"
    messages = list(dict.fromkeys(_lower(other["msg"]) for other in same))
    text = " or ".join(messages)
    code = "unsupported_value" if kinds == {"literal_error"} else "invalid_value"
    if not name:
        return code, text
    return code, f"{name!r}: {text}"


def _lower(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
