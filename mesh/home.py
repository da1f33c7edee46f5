"""A node's home: the folder that holds all its state, one node at a time."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from ca.files import make_private_folder, write_atomic

_log = logging.getLogger(__name__)

LOCK_FILE = "node.lock"
CONTROL_FILE = "control.json"
BOOT_FILE = "boot"


class HomeLock:
    """Holds a home for this process. :attr:`held` is False when another node runs in it."""

    def __init__(self, home: Path) -> None:
        make_private_folder(home)
        self._lock = FileLock(home / LOCK_FILE, timeout=0)
        self.held = False

    def __enter__(self) -> Self:
        with suppress(Timeout):
            self._lock.acquire()
            self.held = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.held:
            self._lock.release()
            self.held = False


@contextmanager
def control_file(home: Path, *, url: str, token: str) -> Iterator[None]:
    """While the node runs, ``control.json`` tells its user's commands how to reach it."""
    path = home / CONTROL_FILE
    content = json.dumps({"url": url, "token": token, "pid": os.getpid()})
    write_atomic(path, content.encode(), mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def next_boot(home: Path, now: float) -> int:
    """A number greater than at any earlier start: milliseconds since 1970, or the last plus one.

    Peers order what a node says by it, also when the clock was set back.
    """
    last = 0
    try:
        last = int((home / BOOT_FILE).read_text(encoding="ascii")[:32])
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read: %s", home / BOOT_FILE, error)
    boot = max(int(now * 1000), last + 1)
    remember_boot(home, boot)
    return boot


def remember_boot(home: Path, boot: int) -> None:
    try:
        write_atomic(home / BOOT_FILE, str(boot).encode())
    except OSError as error:
        _log.warning("%s cannot be written: %s", home / BOOT_FILE, error)
