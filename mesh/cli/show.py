"""Commands that ask the running node and print what it says."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesh.cli.exits import CommandError, Exit
from mesh.cli.local import local_node, node_within
from mesh.cli.terminal import printable
from mesh.config import NodeConfig


def status(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        answer = node.get("/control/status")
    if options.json:
        return _print_json(answer)
    for key, value in answer.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
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
        node.post("/control/stop")
    return Exit.OK


def drain(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        done = node.post("/control/drain", timeout=options.timeout)["done"]
    print("all work has ended" if done else "what still ran was handed over")
    return Exit.OK


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
        return "\n".join(printable(str(item)) for item in value)
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))


def _print_json(answer: Any) -> int:
    json.dump(answer, sys.stdout, indent=2)
    print()
    return Exit.OK
