"""What a client notices when a node of its chain is lost: the longest pause in its stream.

Real `meshnode start` processes on this machine, an entry node and others: first two that hold the
whole demo model, then six with three ranges of its layers, each range at two of them. At a random
token one node that works on the response is killed or stopped (a hang). The reference is a full
restart of the request: the time that an undisturbed client waits from asking to the same token,
without the time to notice the loss, which the pause includes. Prompts are token ids, new ones for
each run; replicas, which remember prompts, get new ones for each fault too. Nodes that were killed
are started again before the next fault. Every response is compared with that of an unbroken run.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from forward import MODEL, Mesh, Node

WHOLE = ("all",)
RANGES = ("0-10", "10-20", "20-30")
TOKENS = 40
Fault = tuple[int, signal.Signals]  # rank, what happens to it
REPLICA_FAULTS: dict[str, Fault] = {
    "replica killed": (0, signal.SIGKILL),
    "replica hangs": (0, signal.SIGSTOP),
}
CHAIN_FAULTS: dict[str, Fault] = {
    "middle stage killed": (1, signal.SIGKILL),
    "last stage killed": (2, signal.SIGKILL),
    "rank 0 killed": (0, signal.SIGKILL),
    "middle stage hangs": (1, signal.SIGSTOP),
    "last stage hangs": (2, signal.SIGSTOP),
    "rank 0 hangs": (0, signal.SIGSTOP),
}
WAIT = 120.0  # s for the mesh to be whole again


@dataclass
class Stage:
    """A node that holds the layers of one rank."""

    name: str
    rank: int
    node: Node
    process: subprocess.Popen[str]


@dataclass
class Heard:
    """When the tokens of one response came, in seconds since it was asked for."""

    at: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Holders:
    """The processes that are measured: two for each of ``ranges``, and an entry node."""

    def __init__(self, mesh: Mesh, ranges: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.ranges = ranges
        self.http = httpx.Client(timeout=600)
        self.entry = mesh.start("entry")
        self.stages: dict[str, Stage] = {}
        for rank in range(len(ranges)):
            for twin in "ab":
                self.bring(f"{twin}{rank}", rank)
        self.wait()

    def bring(self, name: str, rank: int) -> None:
        stage = ("--stage", f"{MODEL}:{self.ranges[rank]}")
        holds = ("--model", MODEL) if self.ranges == WHOLE else stage
        node = self.mesh.start(name, *holds, "--peer", self.entry.listen)
        self.stages[name] = Stage(name, rank, node, self.mesh.processes[-1])

    def wait(self) -> None:
        """Return when every node sees every other, ready and idle."""
        end = time.monotonic() + WAIT
        for node in (self.entry, *(stage.node for stage in self.stages.values())):
            while not self._whole(self._view(node)):
                if time.monotonic() > end:
                    raise SystemExit("the mesh does not become whole again")
                time.sleep(0.1)

    def _view(self, node: Node) -> list[Any]:
        nodes: list[Any] = self.http.get(f"{node.api}/v1/mesh/view").json()["nodes"]
        return nodes

    def _whole(self, nodes: list[Any]) -> bool:
        return {n["name"] for n in nodes} == {"entry", *self.stages} and all(
            n["status"] == "alive" and all(h["ready"] and not h["active"] for h in n["holdings"])
            for n in nodes
        )

    def worker(self, rank: int) -> Stage:
        """Who runs the one session there."""
        for stage in self.stages.values():
            if stage.rank == rank:
                (own,) = (n for n in self._view(stage.node) if n["name"] == stage.name)
                if any(h["active"] for h in own["holdings"]):
                    return stage
        raise SystemExit(f"nobody works at rank {rank}")

    def ask(self, prompt: list[int], on_token: Callable[[int], None]) -> Heard:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
        }
        heard = Heard()
        began = time.perf_counter()
        url = f"{self.entry.api}/v1/completions"
        with self.http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(f"the answer broke off: {chunk['error']}")
                for choice in chunk["choices"]:
                    for _ in (choice["logprobs"] or {}).get("tokens", ()):
                        heard.at.append(time.perf_counter() - began)
                        on_token(len(heard.at))
                if "mesh" in chunk:
                    heard.token_ids = chunk["mesh"]["token_ids"]
        if len(heard.token_ids) != TOKENS:
            raise SystemExit(f"{len(heard.token_ids)} tokens came instead of {TOKENS}")
        return heard

    def hurt(
        self, prompt: list[int], rank: int, how: signal.Signals, at: int
    ) -> tuple[Heard, Stage]:
        """Ask, and do ``how`` to the worker of ``rank`` when ``at`` tokens have come."""
        victim: list[Stage] = []

        def on_token(count: int) -> None:
            if count == 1:
                victim.append(self.worker(rank))
            if count == at:
                victim[0].process.send_signal(how)

        heard = self.ask(prompt, on_token)
        return heard, victim[0]

    def repair(self, victim: Stage, how: signal.Signals) -> None:
        if how == signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
        else:
            victim.process.wait()
            self.bring(victim.name, victim.rank)
        self.wait()


@contextmanager
def holders(ranges: tuple[str, ...]) -> Iterator[Holders]:
    with tempfile.TemporaryDirectory(prefix="meshnode-bench-") as folder:
        mesh = Mesh(Path(folder))
        try:
            yield Holders(mesh, ranges)
        finally:
            mesh.stop()


def pause(heard: Heard, at: int) -> float:
    """The longest one from token ``at`` on, in seconds."""
    times = heard.at[at - 1 :]
    return max(after - before for before, after in pairwise(times))


def measure(
    ranges: tuple[str, ...], faults: dict[str, Fault], contexts: tuple[int, ...], runs: int
) -> list[dict[str, Any]]:
    drawn = random.Random(7)
    figures: list[dict[str, Any]] = []
    with holders(ranges) as mesh:
        mesh.ask([5] * 64, lambda _: None)  # warms up
        for context in contexts:
            pauses: dict[str, list[float]] = {fault: [] for fault in faults}
            restarts: dict[str, list[float]] = {fault: [] for fault in faults}
            for _ in range(runs):
                prompt: list[int] = []
                for fault, (rank, how) in faults.items():
                    if not prompt or ranges == WHOLE:
                        prompt = [drawn.randrange(100, 40_000) for _ in range(context)]
                        whole = mesh.ask(prompt, lambda _: None)
                        mesh.wait()
                    at = drawn.randrange(4, TOKENS - 16)
                    heard, victim = mesh.hurt(prompt, rank, how, at)
                    if heard.token_ids != whole.token_ids:
                        raise SystemExit(f"{fault}: the tokens are not those of an unbroken run")
                    pauses[fault].append(pause(heard, at))
                    restarts[fault].append(whole.at[at])
                    mesh.repair(victim, how)
            for fault in faults:
                figures.append(figure(fault, context, pauses[fault], restarts[fault]))
                show(figures[-1])
    return figures


def figure(fault: str, context: int, pauses: list[float], restarts: list[float]) -> dict[str, Any]:
    median, restart = statistics.median(pauses), statistics.median(restarts)
    return {
        "figure": f"pause, {fault}, {context} tokens of context (worst {max(pauses):.2f} s)",
        "unit": "s",
        "ours": round(median, 3),
        "reference": "a full restart of the request, once the loss is known",
        "reference_value": round(restart, 3),
        "ratio": round(restart / median, 3),
        "target": None,
        "runs": len(pauses),
    }


def show(one: dict[str, Any]) -> None:
    print(
        f"{one['figure']}: median {one['ours']} s; restart {one['reference_value']} s, "
        f"ratio {one['ratio']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run each, short contexts")
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault and context")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    if sys.platform == "win32":
        raise SystemExit("this benchmark stops processes with signals that Windows lacks")
    contexts, runs = ((128,), 1) if options.quick else ((128, 1024, 4096), options.runs)
    figures = measure(WHOLE, REPLICA_FAULTS, contexts, runs)
    figures += measure(RANGES, CHAIN_FAULTS, contexts, runs)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
