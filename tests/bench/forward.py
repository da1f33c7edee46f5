"""What it costs to ask another node: time to first token and tokens per second over HTTP.

Two `meshnode start` processes on this machine, with real certificates and the demo model: one
holds it, the other does not and forwards over QUIC. The same request goes to both, taking turns, so
that a busy machine hits both alike; every prompt is new, so that none is served from a prefix
cache. Medians.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL = "smollm2-135m-instruct"
BIN = Path(sys.executable).parent
WORDS = 60  # of a prompt: with the chat template about a hundred tokens
SESSIONS = (1, 8)


@dataclass(frozen=True)
class Node:
    api: str
    peer: str
    listen: str


@dataclass(frozen=True)
class Timing:
    first_token: float  # s from the request on
    decode: float  # s from the first token to the last
    tokens: int


class Mesh:
    """A CA and running nodes in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, "MESHCA_PASSPHRASE": secrets.token_urlsafe(16)}
        self.run("meshca", "--dir", folder / "ca", "init", "--network", "bench")

    def run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [str(BIN / program), *map(str, arguments)],
            env=self.environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def start(self, name: str, *flags: str) -> Node:
        home, csr = self.folder / name, self.folder / f"{name}.csr"
        if not (home / "node.pem").exists():
            self.run("meshnode", "init", "--home", home, "--name", name, "--csr", csr)
            self.run(
                *("meshca", "--dir", self.folder / "ca", "issue", csr),
                *("--roles", "serve,use", "-o", home / "node.pem"),
            )
        process = subprocess.Popen(
            [
                *(str(BIN / "meshnode"), "start", "--home", str(home), "--api", "127.0.0.1:0"),
                *("--listen", "/ip4/127.0.0.1/udp/0/quic-v1", "--no-mdns", *flags),
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise SystemExit(f"{name} did not start: exit code {process.wait()}")
        said = dict(field.split("=", 1) for field in line.split()[1:])
        return Node(said["api"], said["peer"], said["listen"].split(",")[0])

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def mesh_of_two() -> Iterator[tuple[Node, Node]]:
    """``(holder, entry)``; the entry node sees the model at the holder."""
    with tempfile.TemporaryDirectory(prefix="meshnode-bench-") as folder:
        mesh = Mesh(Path(folder))
        try:
            holder = mesh.start("holder", "--model", MODEL)
            entry = mesh.start("entry", "--peer", holder.listen)
            mesh.run(
                *("meshnode", "wait", "--home", Path(folder) / "entry"),
                *("--peers", "1", "--model", MODEL, "--timeout", "60"),
            )
            yield holder, entry
        finally:
            mesh.stop()


def ask(client: httpx.Client, node: Node, holder: Node, prompt: str, tokens: int) -> Timing:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    began = time.perf_counter()
    first = last = 0.0
    made = 0
    with client.stream("POST", f"{node.api}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        if response.headers["x-mesh-node"] != holder.peer:
            raise SystemExit("the answer came from elsewhere")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"the answer broke off: {chunk['error']}")
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                last = time.perf_counter()
                first = first or last
            if "mesh" in chunk:
                made = len(chunk["mesh"]["token_ids"])
    return Timing(first - began, last - first, made)


def prompt_of(number: int) -> str:
    """A prompt of its own for each request; the first word decides about prefix caches."""
    return f"{number} " + " ".join(f"word{(number * 31 + i * 7) % 97}" for i in range(WORDS))


def round_of(
    node: Node, holder: Node, first_prompt: int, sessions: int, tokens: int
) -> tuple[list[float], float]:
    """Times to the first token, and tokens per second of all sessions together."""
    with (
        httpx.Client(timeout=600, limits=httpx.Limits(max_connections=sessions)) as client,
        concurrent.futures.ThreadPoolExecutor(sessions) as pool,
    ):
        client.get(f"{node.api}/health")  # the connection is there before the clock starts
        asked = [
            pool.submit(ask, client, node, holder, prompt_of(first_prompt + i), tokens)
            for i in range(sessions)
        ]
        timings = [one.result() for one in asked]
    speed = sum((t.tokens - 1) / t.decode for t in timings if t.decode > 0)
    return [t.first_token for t in timings], speed


def measure(tokens: int, runs: int) -> list[dict[str, object]]:
    figures: list[dict[str, object]] = []
    with mesh_of_two() as (holder, entry):
        prompt = 0
        for sessions in SESSIONS:
            firsts: dict[str, list[float]] = {"here": [], "there": []}
            speeds: dict[str, list[float]] = {"here": [], "there": []}
            for run in range(runs + 1):  # the first warms up
                order = (("here", holder), ("there", entry))
                for where, node in order if run % 2 else reversed(order):
                    prompt += sessions
                    first, speed = round_of(node, holder, prompt, sessions, tokens)
                    if run:
                        firsts[where] += first
                        speeds[where].append(speed)
            here, there = (statistics.median(firsts[where]) for where in ("here", "there"))
            figures.append(
                figure(f"time to first token, {sessions} at once", "s", there, here, here / there)
                | {"runs": runs}
            )
            here, there = (statistics.median(speeds[where]) for where in ("here", "there"))
            figures.append(
                figure(f"decode speed, {sessions} at once", "tokens/s", there, here, there / here)
                | {"runs": runs}
            )
    return figures


def figure(name: str, unit: str, ours: float, reference: float, ratio: float) -> dict[str, object]:
    return {
        "figure": f"{name}, through another node",
        "unit": unit,
        "ours": round(ours, 4),
        "reference": "the same request at the node that holds the model",
        "reference_value": round(reference, 4),
        "ratio": round(ratio, 3),
        "target": 0.95,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    figures = measure(*((24, 2) if options.quick else (128, 9)))
    for one in figures:
        met = "met" if float(str(one["ratio"])) >= float(str(one["target"])) else "missed"
        print(
            f"{one['figure']}: {one['ours']} {one['unit']} against {one['reference_value']}, "
            f"ratio {one['ratio']} (target {one['target']}: {met})"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
