"""Errors of the transport that callers are expected to handle."""

from __future__ import annotations

from typing import Any


class TransportError(Exception):
    """Base of all errors below."""


class ListenError(TransportError):
    """An address cannot be listened on. The message is fit for the user."""


class DialError(TransportError):
    """A peer could not be reached, or it refused."""


class NotAdmitted(TransportError):
    """A peer showed no certificate, or one that does not admit it."""


class LinkClosed(TransportError):
    """The link to the peer is gone; what was under way on it is lost."""


class DeadlineExceeded(TransportError):
    """The answer did not come in time. The other side has been told to stop."""


class MalformedFrame(TransportError):
    """A peer sent something that is not a frame of this protocol."""


class RemoteError(TransportError):
    """The handler on the other side refused or failed.

    Raised in a handler it travels to the caller as it is: ``code`` is for programs, ``message`` for
    people, ``data`` holds what a program needs beside the code (anything CBOR carries).
    """

    def __init__(self, code: str, message: str = "", data: dict[str, Any] | None = None) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.data = data or {}
