"""Who may talk to the HTTP endpoint.

With an API key: whoever has it. Without one the endpoint is bound to loopback only, and everybody
on this machine may. A web page that a user of this machine looks at is not "everybody on this
machine", though its requests come from loopback too, so without a key two more things must hold:
``Host`` names this machine (a page whose own name was rebound to 127.0.0.1 sends its own name), and
``Origin``, if there is one, is a page served by this machine. With a key neither matters: the page
does not have it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mesh.api.errors import ApiError

# Probes ask these before anybody could have handed them a key; they tell nothing about the mesh.
OPEN_PATHS = frozenset({"/health", "/ready"})


def is_loopback(host: str) -> bool:
    """Whether an address or name can only mean this machine. Names are not resolved."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


class Guard:
    """ASGI middleware that lets a request through or answers 401 / 403."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key_digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._key_digest is None:
            _check_local(headers)
        elif path not in OPEN_PATHS and not self._has_key(headers):
            raise ApiError(
                401,
                "invalid_api_key",
                "send this node's API key as Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or self._key_digest is None:
            return False
        # Digests have one length, so the comparison tells nothing about the key's.
        return hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._key_digest)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _check_local(headers: Headers) -> None:
    if not is_loopback(_host_of(headers.get("host", ""))):
        raise ApiError(
            403,
            "forbidden_host",
            "without an API key this node answers only to the name localhost (see the Host header)",
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_origin_host(origin)):
        raise ApiError(
            403, "forbidden_origin", "without an API key this node answers no page of another site"
        )


def _host_of(value: str) -> str:
    """The host in a Host header: ``name``, ``name:port``, ``[v6]:port``."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]


def _origin_host(origin: str) -> str:
    """The host of an Origin; empty for ``null`` and for what cannot be read."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
