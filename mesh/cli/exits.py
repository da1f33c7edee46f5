"""Exit codes of `meshnode`, one line each; the README lists them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # something went wrong that has no code of its own
    USAGE = 2  # a wrong flag, argument or setting
    CERTIFICATE = 3  # missing, expired, for another key, from an unknown CA
    ADDRESS = 4  # a port is taken or an address cannot be used
    MODEL = 5  # a model or device that is not here or cannot be used
    NOT_RUNNING = 6  # no node runs in this home (or, for `start`, one runs already)
    TIMEOUT = 7  # `wait`: not true in time; `stop`, `drain`: the node has not ended in time
    NOT_VERIFIED = 8  # `verify`: the receipt does not hold


class CommandError(Exception):
    """Ends the command with one line on standard error and an exit code."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
