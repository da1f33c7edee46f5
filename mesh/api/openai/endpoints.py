"""The routes of the OpenAI API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mesh.api.body import BodyReader
from mesh.api.errors import ApiError, json_response
from mesh.api.openai.answering import Answering
from mesh.api.openai.kept import kept_routes
from mesh.api.openai.shapes import make_shape
from mesh.api.openai.translate import Ask, chat_ask, completion_ask
from mesh.api.ports import ModelInfo, Node
from mesh.forward.kept import key_of


def openai_routes(node: Node, closing: trio.Event) -> list[Route]:
    """``/v1/models``, ``/v1/chat/completions``, ``/v1/completions``, and the rest of streams."""
    bodies = BodyReader()

    async def models(request: Request) -> Response:
        listed = sorted(node.models(), key=lambda info: info.name)
        return json_response({"object": "list", "data": [_model(info) for info in listed]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for info in node.models():
            if info.name == name:
                return json_response(_model(info))
        raise ApiError(
            404, "model_not_found", f"no node of this mesh serves {name[:256]!r}", param="model"
        )

    def completion(
        ask_of: Callable[[dict[str, Any], Callable[[], int]], Ask],
    ) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Answering:
            ask = ask_of(await bodies.read_json(request), _draw_seed)
            request_id = request.state.request_id
            shape = make_shape(ask, request_id, int(time.time()))
            if not ask.stream or len(ask.requests) > 1:
                return Answering(node.answer, ask, shape, request_id, closing)
            secret = secrets.token_urlsafe(32)
            answer = partial(node.answer, keep=key_of(secret))
            return Answering(answer, ask, shape, request_id, closing, secret=secret)

        return endpoint

    return [
        Route("/v1/models", models),
        # Names of models may contain slashes, as those of hub repositories do.
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", completion(chat_ask), methods=["POST"]),
        Route("/v1/completions", completion(completion_ask), methods=["POST"]),
        *kept_routes(node, closing),
    ]


def _draw_seed() -> int:
    return secrets.randbits(63)


def _model(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mesh",
        "mesh": {
            "nodes": list(info.nodes),
            "digest": info.digest,
            "context_length": info.context_length,
        },
    }
