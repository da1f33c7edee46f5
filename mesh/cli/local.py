"""Talking to the node that runs in a home, through its control endpoint.

A running node listens on a loopback port of its own and writes ``control.json`` (readable by its
user only) with the URL and a token that is new at each start. Whoever can read the home can
control the node, nobody else can; it is the same on every operating system.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil

from mesh.cli.exits import CommandError, Exit
from mesh.home import CONTROL_FILE

MAX_CONTROL_FILE = 4096
_START_RETRY = 0.1  # s


class LocalNode:
    """An HTTP client for one running node. Close it, or use :func:`local_node`."""

    def __init__(self, home: Path) -> None:
        try:
            with (home / CONTROL_FILE).open("rb") as file:
                control = json.loads(file.read(MAX_CONTROL_FILE))
            url, token = str(control["url"]), str(control["token"])
            self.pid = int(control["pid"])
        except FileNotFoundError:
            raise CommandError(
                Exit.NOT_RUNNING, f"no node runs in {home}; start one with `meshnode start`"
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CommandError(
                Exit.FAILED, f"{home / CONTROL_FILE} cannot be read: {error}"
            ) from error
        self.home = home
        # The proxies of the environment are for other machines, never for our own node.
        self.http = httpx2.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(10.0, read=None),
            trust_env=False,
        )

    # ``exits`` says for HTTP statuses what the command is to end with, where that is not FAILED.

    def get(self, path: str, exits: Mapping[int, Exit] = {}, /, **query: str | int | float) -> Any:
        return self._answer("GET", path, exits, params=query)

    def post(
        self,
        path: str,
        content: bytes = b"",
        exits: Mapping[int, Exit] = {},
        /,
        **query: str | int | float,
    ) -> Any:
        return self._answer("POST", path, exits, content=content, params=query)

    def process(self) -> psutil.Process | None:
        """The process of the node; None when it has ended, or cannot be seen from here."""
        try:
            return psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None

    def _answer(self, method: str, path: str, exits: Mapping[int, Exit], **arguments: Any) -> Any:
        try:
            response = self.http.request(method, path, **arguments)
        except httpx2.TransportError as error:
            slow = isinstance(error, httpx2.ReadTimeout)
            raise CommandError(
                Exit.TIMEOUT if slow else Exit.NOT_RUNNING,
                f"the node in {self.home} does not answer: {error}",
            ) from error
        if response.status_code >= 400:
            code = exits.get(response.status_code, Exit.FAILED)
            raise CommandError(code, error_message(response))
        return response.json()


def error_message(response: httpx2.Response) -> str:
    """The message of an OpenAI-shaped error, or whatever the body says."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"


@contextmanager
def local_node(home: Path) -> Iterator[LocalNode]:
    node = LocalNode(home)
    try:
        yield node
    finally:
        node.http.close()


def node_within(home: Path, timeout: float) -> LocalNode:
    """The node of this home, which may still be starting.

    A process that does not exist yet can send no event: this is the one place that looks again.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            node = LocalNode(home)
            node.get("/control/status")
            return node
        except CommandError:
            if time.monotonic() >= end:
                raise
            time.sleep(_START_RETRY)
