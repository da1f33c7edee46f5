"""Commands that ask the running node and print what it says."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesh.cli.exits import CommandError, Exit
from mesh.cli.local import local_node, node_within
from mesh.cli.terminal import printable
from mesh.config import NodeConfig

ANSWER_TIME = 15.0  # s that a node may take to hear that it is to stop
END_TIME = 60.0  # s for a node to end that was told to; it gives others' work some seconds
LOOK_AGAIN = 0.5  # s
MAX_SHORT = 20  # characters of a list that stays on one line


def status(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        answer = node.get("/control/status")
    if options.json:
        return _print_json(answer)
    for key, value in answer.items():
        shown = ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else value
        print(f"{key.replace('_', ' '):12} {shown}")
    return Exit.OK


def peers(config: NodeConfig, options: argparse.Namespace) -> int:
    return _print_rows(
        config,
        options,
        "/control/peers",
        ("name", "status", "admission", "why", "path", "rtt_ms", "roles", "holds", "peer"),
        "no peers",
    )


def models(config: NodeConfig, options: argparse.Namespace) -> int:
    return _print_rows(
        config, options, "/control/models", ("model", "ready", "served_by"), "no models"
    )


def discover(config: NodeConfig, options: argparse.Namespace) -> int:
    return _print_rows(
        config,
        options,
        "/control/discovered",
        ("peer", "connected", "addresses"),
        "nothing seen on the local network",
    )


def stop(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        process = node.process()
        node.http.timeout = httpx2.Timeout(ANSWER_TIME)
        node.post("/control/stop")
    _wait_ended(process)
    return Exit.OK


def drain(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        process = node.process()
        node.http.timeout = httpx2.Timeout(options.timeout + ANSWER_TIME)
        done = node.post("/control/drain", timeout=options.timeout)["done"]
    print("all work has ended" if done else "what still ran was handed over", flush=True)
    _wait_ended(process)
    return Exit.OK


def _wait_ended(process: psutil.Process | None) -> None:
    """Wait for a node that stops, so that its home and ports are free for the next one."""
    end = time.monotonic() + END_TIME
    while process is not None and not _has_ended(process):
        if time.monotonic() >= end:
            raise CommandError(
                Exit.TIMEOUT,
                f"the node was told to stop, but its process {process.pid} still runs after "
                f"{END_TIME:g} s",
            )


def _has_ended(process: psutil.Process) -> bool:
    """Wait a moment for that. Whoever started the node may not have asked yet how it ended: then
    its number is still there, and :meth:`psutil.Process.wait` would wait for that too."""
    try:
        process.wait(LOOK_AGAIN)
        return True
    except psutil.TimeoutExpired:
        pass
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def crl(config: NodeConfig, options: argparse.Namespace) -> int:
    try:
        content = Path(options.file).read_bytes()
    except OSError as error:
        raise CommandError(Exit.FAILED, f"{options.file}: {error.strerror}") from error
    with local_node(config.home) as node:
        news = node.post("/control/crl", content)["news"]
    print("in force, and on its way to every node" if news else "known already")
    return Exit.OK


def wait(config: NodeConfig, options: argparse.Namespace) -> int:
    start = time.monotonic()
    node = node_within(config.home, options.timeout)
    left = max(0.0, options.timeout - (time.monotonic() - start))
    query: dict[str, str | int | float] = {"peers": options.peers, "timeout": left}
    if options.wanted:
        query["model"] = options.wanted
    if not node.get("/control/wait", **query)["done"]:
        wanted = [f"{options.peers} peers"] if options.peers else []
        wanted += [f"model {options.wanted}"] if options.wanted else []
        raise CommandError(
            Exit.TIMEOUT, f"after {options.timeout:g} s still not true: {' and '.join(wanted)}"
        )
    return Exit.OK


def _print_rows(
    config: NodeConfig,
    options: argparse.Namespace,
    path: str,
    columns: Sequence[str],
    nothing: str,
) -> int:
    with local_node(config.home) as node:
        rows = node.get(path)
    if options.json:
        return _print_json(rows)
    if not rows:
        print(nothing)
        return Exit.OK
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        # Text, not markup: names and addresses come from other machines.
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    # Into a pipe or a log there is no width to keep to.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return Exit.OK


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        items = [printable(str(item)) for item in value]
        short = ", ".join(items)
        return short if len(short) <= MAX_SHORT else "\n".join(items)
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))


def _print_json(answer: Any) -> int:
    json.dump(answer, sys.stdout, indent=2)
    print()
    return Exit.OK
