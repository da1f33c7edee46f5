"""HTTP/1.1 and HTTP/2 on hypercorn, inside the node's own nursery.

hypercorn's protocol classes do the protocol. Its server loop is not used, because a node needs
three things of it that it does not have: an error in one connection must not end the node, a client
that stops reading must not hold its generation (or the shutdown) for ever, and the number of
connections must have a bound.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from mesh.api.auth import is_loopback
from mesh.api.connection import Connection, PatientStream

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
GRACE_SECONDS = 5.0  # for answers under way when the node stops
FAREWELL_SECONDS = 1.0  # for their last event to get out

BindReason = Literal["malformed", "key_required", "port_taken", "unusable"]


class BindError(Exception):
    """An address that cannot be served. ``reason`` says why in a word, the message in a line."""

    def __init__(self, reason: BindReason, message: str) -> None:
        super().__init__(message)
        self.reason: BindReason = reason


async def open_listeners(binds: Sequence[str], *, api_key: str | None) -> list[trio.SocketListener]:
    """Listen on ``HOST:PORT`` addresses (``[V6]:PORT``; port 0: any).

    Without a key only loopback is allowed: a name is resolved first, and every address that it has
    must be loopback. Raises :class:`BindError`; then nothing is left open.
    """
    if api_key is not None and not (
        api_key.isascii() and api_key.isprintable() and api_key.strip()
    ):
        raise BindError("malformed", "the API key must be printable ASCII")
    listeners: list[trio.SocketListener] = []
    try:
        for bind in binds:
            listeners += await _open(bind, api_key)
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


async def _open(bind: str, api_key: str | None) -> list[trio.SocketListener]:
    host, port = _parse(bind)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BindError("port_taken", f"cannot serve HTTP on {bind}: port taken") from error
        raise BindError("unusable", f"cannot serve HTTP on {bind}: {error}") from error
    # Nothing has been accepted yet, so looking at the result is as good as looking ahead.
    if api_key is None and not all(is_loopback(_address(one)[0]) for one in listeners):
        for listener in listeners:
            listener.socket.close()
        raise BindError(
            "key_required",
            f"{bind} can be reached from other machines: set an API key, or bind to 127.0.0.1",
        )
    return list(listeners)


def _parse(bind: str) -> tuple[str, int]:
    host, colon, port = bind.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise BindError("malformed", f"{bind!r} is not HOST:PORT")
    return host, int(port)


def _address(listener: trio.SocketListener) -> tuple[str, int]:
    host, port, *_ = listener.socket.getsockname()
    return str(host), int(port)


def urls_of(listeners: Sequence[trio.SocketListener]) -> list[str]:
    """The base URLs of listeners, with real ports."""
    addresses = [_address(listener) for listener in listeners]
    return [
        f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        for host, port in addresses
    ]


async def serve(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    *,
    stop: trio.Event,
    closing: trio.Event | None = None,
    task_status: Any = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve ``app`` until ``stop`` is set; ``started`` with the base URLs when it accepts.

    Then no new connection is accepted, idle ones close, and answers under way get
    ``GRACE_SECONDS``. After those, ``closing`` (the event given to ``create_app``) makes them end
    with an error event, and what is still open after that is cut off. Cancelling cuts everything
    off at once.
    """
    server = _Server(app)
    async with trio.open_nursery() as connections:
        try:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(
                        trio.serve_listeners,
                        server.handle,
                        list(listeners),
                        handler_nursery=connections,
                    )
                )
                task_status.started(urls_of(listeners))
                await stop.wait()
                accepting.cancel_scope.cancel()
            await server.finish(closing)
        finally:
            # hypercorn shields its writes from cancellation; a closed socket ends them.
            server.cut_off()
            connections.cancel_scope.cancel()


class _Server:
    """The connections of one endpoint."""

    def __init__(self, app: ASGIApp) -> None:
        self._config = Config()
        self._config.errorlog = logger
        self._config.include_server_header = False
        self._app = wrap_app(app, self._config.wsgi_max_body_size, "asgi")
        self._context = WorkerContext(None)
        self._streams: set[PatientStream] = set()
        self._empty = trio.Event()
        self._empty.set()

    async def handle(self, connection: trio.SocketStream) -> None:
        """One connection from accept to close. Nothing that goes wrong in it gets out."""
        if len(self._streams) >= MAX_CONNECTIONS:
            logger.warning("more than %d HTTP connections: one refused", MAX_CONNECTIONS)
            connection.socket.close()
            return
        stream = PatientStream(connection)
        if not self._streams:
            self._empty = trio.Event()
        self._streams.add(stream)
        try:
            state = ConnectionState({})
            await Connection(self._app, self._config, self._context, state, stream).run()
        except Exception:
            logger.exception("an HTTP connection failed")
        finally:
            connection.socket.close()
            self._streams.discard(stream)
            if not self._streams:
                self._empty.set()

    async def finish(self, closing: trio.Event | None) -> None:
        await self._context.terminated.set()  # closes idle connections, and busy ones after use
        with trio.move_on_after(GRACE_SECONDS):
            await self._empty.wait()
        if closing is not None:
            closing.set()
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._empty.wait()

    def cut_off(self) -> None:
        for stream in self._streams:
            stream.socket.close()
