"""`meshnode bench PEER`: round trips, throughput and loss of one link, measured by the node."""

from __future__ import annotations

import argparse
import json
from typing import Any

import httpx2
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mesh.cli.exits import CommandError, Exit
from mesh.cli.local import LocalNode, error_message, local_node
from mesh.config import NodeConfig


def bench(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        figures = _measure(node, options.peer)
    if options.json:
        print(json.dumps(figures, indent=2))
        return Exit.OK
    print(f"{figures['peer']}, {figures['path']}")
    for trips in figures["round_trips"]:
        size = f"{trips['bytes'] // 1024} KB"
        print(f"round trip {size:>6}  {trips['median_ms']:.2f} ms, p99 {trips['p99_ms']:.2f} ms")
    print(f"up {figures['up_mb_s']:.1f} MB/s, down {figures['down_mb_s']:.1f} MB/s")
    if figures["loss"] is not None:
        print(f"loss {100 * figures['loss']:.2f} %, congestion control {figures['congestion']}")
    return Exit.OK


def _measure(node: LocalNode, peer: str) -> dict[str, Any]:
    """Follow the measurement with a progress bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("connecting", total=1.0)
        try:
            with node.http.stream("GET", "/control/bench", params={"peer": peer}) as response:
                if response.status_code != 200:
                    response.read()
                    raise CommandError(Exit.FAILED, error_message(response))
                for text in response.iter_lines():
                    line: dict[str, Any] = json.loads(text)
                    if "error" in line:
                        raise CommandError(Exit.FAILED, line["error"])
                    if "result" in line:
                        result: dict[str, Any] = line["result"]
                        return result
                    bar.update(task, completed=line["done"], description=line["what"])
        except httpx2.TransportError as error:
            raise CommandError(Exit.FAILED, f"the measurement broke off: {error}") from error
    raise CommandError(Exit.FAILED, "the measurement ended without figures")
