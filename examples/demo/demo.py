"""A whole mesh on one machine: a CA, nodes with certificates, a question, a verified answer.

    python3 dev.py demo             a node without the model asks two that hold it
    python3 dev.py demo --sharded   three nodes hold a third of the model each
    python3 dev.py demo --once      end after the answer

Everything here is done with the commands a person would type; they are printed as they run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France, and what is it known for?"
BIN = Path(sys.executable).parent
WHOLE = {"desk-1": ["--model", MODEL], "desk-2": ["--model", MODEL], "desk-3": []}
SHARDED = {
    "desk-1": ["--stage", f"{MODEL}:0-10"],
    "desk-2": ["--stage", f"{MODEL}:10-20"],
    "desk-3": ["--stage", f"{MODEL}:20-30"],
    "desk-4": [],
}


@dataclass
class RunningNode:
    name: str
    process: subprocess.Popen[str]
    api: str
    listen: str


class Demo:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[RunningNode] = []
        self.environment = {**os.environ, "MESHCA_PASSPHRASE": secrets.token_urlsafe(16)}

    def run(self, *command: str | Path, check: bool = True) -> int:
        print(f"\n$ {shlex.join(map(str, command))}", flush=True)
        program, *rest = map(str, command)
        done = subprocess.run([str(BIN / program), *rest], env=self.environment, cwd=self.folder)
        if check and done.returncode != 0:
            raise SystemExit(f"demo: {program} ended with exit code {done.returncode}")
        return done.returncode

    def home(self, name: str) -> Path:
        return self.folder / name

    def admit(self, name: str) -> None:
        """Key and request on the node's side, certificate on the admin's."""
        home = self.home(name)
        csr = self.folder / f"{name}.csr"
        self.run("meshnode", "init", "--home", home, "--name", name, "--csr", csr)
        self.run(
            "meshca", "--dir", self.folder / "ca", "issue", csr, "--roles", "serve,use",
            "-o", home / "node.pem",
        )  # fmt: skip

    def start(self, name: str, *flags: str) -> None:
        known = [flag for node in self.nodes for flag in ("--peer", node.listen)]
        command = [
            "meshnode", "start", "--home", str(self.home(name)), "--api", "127.0.0.1:0",
            "--listen", "/ip4/127.0.0.1/udp/0/quic-v1", "--no-mdns", *flags, *known,
        ]  # fmt: skip
        print(f"\n$ {shlex.join(command)}", flush=True)
        log = (self.folder / f"{name}.log").open("w")
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            # Ctrl-C is for the demo, which then stops its nodes one by one.
            start_new_session=True,
        )
        # The log goes to a file, and to the screen until the node serves: a first start downloads.
        starting = threading.Event()

        def copy_log() -> None:
            for line in process.stderr or ():
                log.write(line)
                log.flush()
                if not starting.is_set():
                    print(f"  {name}: {line.rstrip()}", flush=True)

        threading.Thread(target=copy_log, daemon=True).start()
        ready = process.stdout.readline() if process.stdout else ""
        starting.set()
        if not ready.startswith("ready "):
            raise SystemExit(f"demo: {name} did not start (exit code {process.wait()})")
        print(ready.rstrip(), flush=True)
        said = dict(field.split("=", 1) for field in ready.split()[1:])
        self.nodes.append(RunningNode(name, process, said["api"], said["listen"].split(",")[0]))

    def stop(self) -> None:
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            try:
                node.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="dev.py demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--sharded", action="store_true", help="no node holds the whole model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshnode-demo-") as folder:
        demo = Demo(Path(folder))
        try:
            return play(demo, SHARDED if options.sharded else WHOLE, once=options.once)
        except KeyboardInterrupt:
            return 0
        finally:
            demo.stop()


def play(demo: Demo, layout: dict[str, list[str]], *, once: bool) -> int:
    ca = demo.folder / "ca"
    demo.run("meshca", "--dir", ca, "init", "--network", "demo")
    for name in layout:
        demo.admit(name)
    for name, flags in layout.items():
        demo.start(name, *flags)
    entry = demo.nodes[-1]
    home = demo.home(entry.name)
    others = str(len(layout) - 1)
    demo.run("meshnode", "wait", "--home", home, "--peers", others, "--model", MODEL)
    demo.run("meshnode", "peers", "--home", home)
    response = demo.folder / "response.sse"
    print(f"\n{entry.name} holds nothing of {MODEL}; it is asked:")
    demo.run(
        "meshnode", "chat", "--home", home, "--model", MODEL, "--max-tokens", "96",
        "--temperature", "0", "--save", response, QUESTION,
    )  # fmt: skip
    demo.run("meshnode", "verify", response, "--ca", ca / "ca.pem")
    if not once:
        print("\nThe mesh answers at:")
        for node in demo.nodes:
            print(f"  {node.name}  {node.api}/v1")
        print("Ctrl-C stops it.", flush=True)
        for node in demo.nodes:
            node.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
