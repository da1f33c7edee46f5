"""Reading a JSON body from somebody who may mean harm: bounded, strict, and with clear errors."""

from __future__ import annotations

from typing import Any

import jiter
import trio
from starlette.requests import ClientDisconnect, Request

from mesh.api.errors import ApiError

# Room for a million token ids, and for any text that fits a context of that length.
MAX_BODY = 8 << 20  # bytes
# A body of that size over a bad mobile link; what takes longer only holds a connection open.
BODY_SECONDS = 60.0
# Of all requests together while they are read. Parsing happens for one at a time.
MAX_HELD = 64 << 20  # bytes


class BodyReader:
    """Reads the bodies of one server, within one bound on their memory."""

    def __init__(self) -> None:
        self._held = 0

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body.

        Raises :class:`ApiError` (400, 408, 413, 415, 503), and ``ClientDisconnect`` when the client
        left. Demanding the content type also keeps web pages out: a browser sends
        ``application/json`` to another origin only after asking, and this server never says yes.
        """
        _check_type(request)
        value = _parse(await self._read(request))
        if not isinstance(value, dict):
            raise ApiError(400, "invalid_json", "the body must be a JSON object")
        return value

    async def _read(self, request: Request) -> bytes:
        too_large = ApiError(413, "request_too_large", f"the body is larger than {MAX_BODY} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY:
            raise too_large
        body = bytearray()
        try:
            with trio.move_on_after(BODY_SECONDS):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    if len(body) + len(part) > MAX_BODY:
                        raise too_large
                    if self._held + len(part) > MAX_HELD:
                        raise ApiError(
                            503,
                            "overloaded",
                            "too many large requests at once",
                            headers={"retry-after": "1"},
                        )
                    body += part
                    self._held += len(part)
                    if not message.get("more_body", False):
                        return bytes(body)
        finally:
            self._held -= len(body)
        raise ApiError(408, "request_timeout", f"the body took longer than {BODY_SECONDS:g} s")


def _check_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise ApiError(
            415, "unsupported_media_type", "send the body with Content-Type: application/json"
        )
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip(' "').lower() not in (
            "utf-8",
            "utf8",
        ):
            raise ApiError(415, "unsupported_media_type", "JSON is UTF-8; other charsets are not")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "unsupported_media_type", "compressed bodies are not accepted")


def _parse(body: bytes) -> Any:
    # jiter refuses invalid UTF-8, lone surrogates, NaN, depth beyond 200 and numbers of thousands
    # of digits. A key given twice is refused because the two readers of such a body (a proxy that
    # filters, this node) may each believe the other value.
    try:
        return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
