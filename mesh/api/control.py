"""The control endpoint: what `meshnode status`, `peers`, `wait`, `stop` ask of the running node.

It is served on a loopback port of its own, behind a token that lies in the node's home, and it also
carries the whole public API so that the command line works whatever key the public one demands.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inference.store.errors import StoreError

MAX_WAIT = 24 * 3600.0  # s
MAX_WANTED = 4096  # bytes of a request to serve a model
MAX_CRL_FILE = 512 << 10  # bytes


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


def _timeout(request: Request) -> float:
    """Seconds, from the query. Raises ValueError."""
    return min(max(float(request.query_params.get("timeout", "60")), 0.0), MAX_WAIT)


class ControlPort(Protocol):
    """What the node lets its own user see and do. Answers are plain JSON values."""

    def status(self) -> dict[str, Any]: ...

    def peer_table(self) -> list[dict[str, Any]]: ...

    def model_table(self) -> list[dict[str, Any]]: ...

    def discovered_table(self) -> list[dict[str, Any]]: ...

    def revoke(self, crl: bytes) -> bool:
        """Take a revocation list (DER or PEM) and spread it; False when it is not news.

        Raises ValueError with what is wrong with it.
        """
        ...

    async def serve_model(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Publish that the mesh is to serve a model: ``model``, and if given ``replicas``,
        ``max_nodes``, ``context``, ``sessions``. Raises ValueError with what is wrong, StoreError
        when the model is not here."""
        ...

    async def plan_of(self, model: str | None, what_if: str) -> dict[str, Any]:
        """The layout, of one model if named, after changes such as ``add:16GB``.

        Raises ValueError with what is wrong, StoreError when the model is not here.
        """
        ...

    async def explain(self, response: str) -> dict[str, Any]:
        """Why a response took its route, and predicted and actual times. Raises ValueError."""
        ...

    def stop(self) -> None: ...

    async def drain(self, timeout: float) -> bool:
        """Take no new work, stop when what runs has ended; True if all of it could end in time."""
        ...

    async def bench(self, peer: str, report: Callable[[float, str], None]) -> dict[str, Any]:
        """Measure the link to a peer, given by name or PeerId; ``report`` hears the fraction done
        and what is being measured. Raises ValueError when there is no such link or it breaks."""
        ...

    async def wait(self, *, peers: int, model: str | None, timeout: float) -> bool:
        """True once so many peers are alive and the model can be used; False when time is up."""
        ...


class _Lines:
    """A response of JSON lines: ``{"done", "what"}`` while a task reports, then ``{"result"}`` or
    ``{"error"}``."""

    def __init__(
        self, task: Callable[[Callable[[float, str], None]], Awaitable[dict[str, Any]]]
    ) -> None:
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whoever reads too slowly misses some of the progress, never the result.
        lines, reading = trio.open_memory_channel[dict[str, Any]](64)

        def report(done: float, what: str) -> None:
            with suppress(trio.WouldBlock):
                lines.send_nowait({"done": done, "what": what})

        async def run() -> None:
            async with lines:
                try:
                    await lines.send({"result": await self._task(report)})
                except ValueError as error:
                    await lines.send({"error": str(error)})

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with trio.open_nursery() as nursery, reading:
            nursery.start_soon(gone)
            nursery.start_soon(run)
            async for line in reading:
                body = json.dumps(line).encode() + b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b""})


class _TokenGate:
    """Lets only requests with the token through."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                await _error(401, "wrong control token")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_control_app(node: ControlPort, api: ASGIApp, token: str) -> ASGIApp:
    """The ASGI app of the control endpoint; ``api`` is the public API without a key of its own."""

    async def status(_: Request) -> JSONResponse:
        return JSONResponse(node.status())

    async def peers(_: Request) -> JSONResponse:
        return JSONResponse(node.peer_table())

    async def models(_: Request) -> JSONResponse:
        return JSONResponse(node.model_table())

    async def discovered(_: Request) -> JSONResponse:
        return JSONResponse(node.discovered_table())

    async def stop(_: Request) -> JSONResponse:
        node.stop()
        return JSONResponse({"stopping": True})

    async def revoke(request: Request) -> JSONResponse:
        crl = bytearray()
        async for chunk in request.stream():
            crl += chunk
            if len(crl) > MAX_CRL_FILE:
                return _error(413, f"a revocation list has at most {MAX_CRL_FILE} bytes")
        try:
            return JSONResponse({"news": node.revoke(bytes(crl))})
        except ValueError as error:
            return _error(400, str(error))

    async def bench(request: Request) -> _Lines:
        return _Lines(partial(node.bench, request.query_params.get("peer", "")))

    async def drain(request: Request) -> JSONResponse:
        try:
            timeout = _timeout(request)
        except ValueError as error:
            return _error(400, str(error))
        return JSONResponse({"done": await node.drain(timeout)})

    async def wait(request: Request) -> JSONResponse:
        query = request.query_params
        try:
            count = int(query.get("peers", "0"))
            timeout = _timeout(request)
        except ValueError as error:
            return _error(400, str(error))
        done = await node.wait(peers=count, model=query.get("model"), timeout=timeout)
        return JSONResponse({"done": done})

    async def serve(request: Request) -> JSONResponse:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_WANTED:
                return _error(413, "too long")
        try:
            wanted = json.loads(body)
            if not isinstance(wanted, dict):
                return _error(400, "not a JSON object")
            return JSONResponse(await node.serve_model(wanted))
        except StoreError as error:
            return _error(404, str(error))
        except ValueError as error:
            return _error(400, str(error))

    async def plan(request: Request) -> JSONResponse:
        query = request.query_params
        try:
            found = await node.plan_of(query.get("model"), query.get("what_if", ""))
        except StoreError as error:
            return _error(404, str(error))
        except ValueError as error:
            return _error(400, str(error))
        return JSONResponse(found)

    async def explain(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await node.explain(request.query_params.get("response", "")))
        except ValueError as error:
            return _error(404, str(error))

    routes = [
        Route("/control/status", status),
        Route("/control/peers", peers),
        Route("/control/models", models),
        Route("/control/discovered", discovered),
        Route("/control/wait", wait),
        Route("/control/serve", serve, methods=["POST"]),
        Route("/control/plan", plan),
        Route("/control/explain", explain),
        Route("/control/crl", revoke, methods=["POST"]),
        Route("/control/bench", bench),
        Route("/control/drain", drain, methods=["POST"]),
        Route("/control/stop", stop, methods=["POST"]),
        Mount("/", app=api),
    ]
    return _TokenGate(Starlette(routes=routes), token)
