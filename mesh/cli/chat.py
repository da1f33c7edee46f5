"""`meshnode chat`: one question to the mesh through the local node, the answer as it is made."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

import httpx2

from mesh.cli.exits import CommandError, Exit
from mesh.cli.local import error_message, local_node
from mesh.cli.terminal import printable
from mesh.config import NodeConfig

_EXITS = {400: Exit.USAGE, 404: Exit.MODEL}  # by HTTP status


def chat(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        body: dict[str, Any] = {
            "model": options.wanted or _any_model(node.get("/v1/models")),
            "messages": [{"role": "user", "content": options.text}],
            "stream": True,
        }
        if options.system:
            body["messages"].insert(0, {"role": "system", "content": options.system})
        for name in ("max_tokens", "seed", "temperature"):
            if getattr(options, name) is not None:
                body[name] = getattr(options, name)
        try:
            with node.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    code = _EXITS.get(response.status_code, Exit.FAILED)
                    raise CommandError(code, error_message(response))
                with _saving(options.save) as saved:
                    for line in response.iter_lines():
                        if saved is not None:
                            saved.write(line + "\n")
                        for text in _texts(line):
                            sys.stdout.write(printable(text))
                            sys.stdout.flush()
                answered_by = response.headers.get("X-Mesh-Node", "")
        except httpx2.TransportError as error:
            raise CommandError(Exit.FAILED, f"the answer broke off: {error}") from error
    print()
    print(f"answered by {answered_by}", file=sys.stderr)
    return Exit.OK


def _saving(path: str | None) -> AbstractContextManager[TextIO | None]:
    """The file for the response, opened before it comes."""
    if path is None:
        return nullcontext()
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise CommandError(Exit.FAILED, f"cannot write {path}: {error.strerror}") from error


def _any_model(listing: dict[str, Any]) -> str:
    models = [str(entry["id"]) for entry in listing["data"]]
    if not models:
        raise CommandError(Exit.MODEL, "no node of this mesh serves a model")
    return models[0]


def _texts(line: str) -> Iterator[str]:
    """The text of one line of a server-sent event stream; an error event ends the command."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise CommandError(Exit.FAILED, str(event["error"].get("message")))
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text
