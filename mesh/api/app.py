"""The ASGI application: routes, and the envelope that every response leaves in."""

from __future__ import annotations

import logging
import secrets

import trio
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh.api.auth import Guard
from mesh.api.errors import ApiError, internal_error, json_response
from mesh.api.openai.endpoints import openai_routes
from mesh.api.ports import Node

logger = logging.getLogger(__name__)

# How much of a refused request's body is read and thrown away, so that the client gets to read the
# refusal: closing a TCP connection with unread data in it destroys what was sent to the client.
DRAIN_BYTES = 32 << 20
DRAIN_SECONDS = 5.0


def create_app(
    node: Node, *, api_key: str | None = None, closing: trio.Event | None = None
) -> Starlette:
    """The application that serves ``node``; made and run under trio.

    ``api_key`` None means: reachable over loopback only (the caller sees to that, see
    :func:`mesh.api.server.open_listeners`). When ``closing`` is set, answers under way end with an
    error that says that this node stops.
    """
    closing = trio.Event() if closing is None else closing
    app = Starlette(
        routes=[*openai_routes(node, closing), *_node_routes(node)],
        middleware=[Middleware(Envelope), Middleware(Guard, api_key=api_key)],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    # A redirect to the path without a slash would lose the body and the OpenAI error shape.
    app.router.redirect_slashes = False
    return app


def _node_routes(node: Node) -> list[Route]:
    async def health(request: Request) -> Response:
        return json_response({"status": "ok", "peer": node.health().peer})

    async def ready(request: Request) -> Response:
        health = node.health()
        if health.ready:
            return json_response({"ready": True, "waiting_for": []})
        waiting = list(health.waiting_for)
        error = ApiError(503, "not_ready", "not ready: " + ("; ".join(waiting) or "starting"))
        return json_response({"ready": False, "waiting_for": waiting, **error.body()}, status=503)

    async def view(request: Request) -> Response:
        return json_response(node.view())

    async def plan(request: Request) -> Response:
        return json_response(node.plan())

    async def capabilities(request: Request) -> Response:
        return json_response(node.capabilities())

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/v1/mesh/view", view),
        Route("/v1/mesh/plan", plan),
        Route("/v1/mesh/capabilities", capabilities),
    ]


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette's router raises: no such path, no such method."""
    if not isinstance(error, HTTPException):
        raise error
    # Not `request.url`: that is built from the Host header, which may be anything.
    path, method = request.scope["path"][:200], request.method
    if error.status_code == 404:
        found = ApiError(404, "unknown_url", f"there is nothing at {path}")
    elif error.status_code == 405:
        found = ApiError(405, "method_not_allowed", f"{path} does not take {method}")
    else:
        found = ApiError(error.status_code, "http_error", error.detail)
    found.headers.update(error.headers or {})
    return found.response()


class Envelope:
    """ASGI middleware around everything: the request id, the last resort, the rest of the body.

    Every response has ``X-Mesh-Request``. An exception that nobody handled becomes a 500 in the
    usual shape and a log entry with its traceback, under that id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(secrets.token_hex(16), receive, send)
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            logger.debug("request %s: the client left", exchange.request_id)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            if not exchange.started:
                await internal_error().response()(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its response, as seen on the way in and out."""

    def __init__(self, request_id: str, receive: Receive, send: Send) -> None:
        self.request_id = request_id
        self.started = False
        self._body_ended = False
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # also a disconnect: nothing more will come
            self._body_ended = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            await self._drain()
            MutableHeaders(scope=message)["x-mesh-request"] = self.request_id
        # With the last part of a response hypercorn reports the end of the exchange, just as if the
        # client had left, and then makes the connection ready for the next one. Whoever cancels
        # work on that report must not cancel that: the connection would never be used or closed.
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        with trio.CancelScope(shield=last):
            await self._send(message)

    async def _drain(self) -> None:
        drained = 0
        with trio.move_on_after(DRAIN_SECONDS):
            while not self._body_ended and drained < DRAIN_BYTES:
                drained += len((await self.receive()).get("body", b""))
