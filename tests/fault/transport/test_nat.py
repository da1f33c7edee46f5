"""Two nodes behind port-restricted NATs: through a relay first, then directly through both NATs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# The names are this process's own: other tests may run on this machine at the same time.
OUTSIDE, *INSIDES = (f"mesh-nat-{name}-{os.getpid()}" for name in ("out", "a", "b"))
RELAY_IP, PUBLIC_IPS = "10.91.0.1", ("10.91.0.11", "10.91.0.12")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[None]:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and iproute2")
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("there is no /dev/net/tun")
    made = []
    try:
        for name in (OUTSIDE, *INSIDES):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"namespaces are not permitted here: {error.stderr.decode().strip()}")
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for address in (RELAY_IP, *PUBLIC_IPS):
            ip("-n", OUTSIDE, "addr", "add", f"{address}/32", "dev", "lo")
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Node:
    """One node process; what it says is read line by line."""

    def __init__(self, namespace: str, name: str, address: str) -> None:
        self._process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                namespace,
                sys.executable,
                str(HERE / "nat_node.py"),
                name,
                address,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._others: list[dict[str, Any]] = []  # that nobody has waited for
        hello = self.read()
        self.peer: str = hello["peer"]
        self.addresses: list[str] = hello["addresses"]

    def read(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the node ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def until(self, **wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            message = next((m for m in self._others if wanted.items() <= m.items()), None)
            if message is not None:
                self._others.remove(message)
                return message
            self._others.append(self.read())
        raise TimeoutError(str(wanted))

    def tell(self, **command: Any) -> None:
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def nats(namespaces: None) -> Iterator[None]:
    processes = []
    try:
        for inside, public in zip(INSIDES, PUBLIC_IPS, strict=True):
            process = subprocess.Popen(
                [sys.executable, str(HERE / "user_nat.py"), inside, OUTSIDE, public],
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("nats")
def test_relayed_then_punched() -> None:
    nodes = []
    try:
        relay = Node(OUTSIDE, "relay", RELAY_IP)
        nodes.append(relay)
        a, b = (
            Node(inside, name, "0.0.0.0") for inside, name in zip(INSIDES, ("a", "b"), strict=True)
        )
        nodes += [a, b]
        for node in (a, b):
            node.tell(link=relay.peer, addresses=relay.addresses)
            node.until(linked=relay.peer)
        time.sleep(0.5)  # the relay has said how it sees them
        a.tell(link=b.peer, addresses=b.addresses, ask=300)
        up = a.until(event="LinkUp", peer=b.peer)
        assert up["path"] == "relayed"
        moved = a.until(event="LinkMoved", peer=b.peer)
        assert moved["path"] == "punched"
        # 0.04 s, unless one of the two had no processor when it was its turn. Then there is another
        # attempt after 2 s or 5 s, and maybe nothing is asked any more while the link moves.
        assert moved["at"] - up["at"] < 6.0
        assert b.until(event="LinkMoved", peer=a.peer)["path"] == "punched"
        a.until(asked=300)  # every request was answered, before, while and after it moved
        a.tell(link=b.peer, addresses=b.addresses, ask=50)
        a.until(asked=50)
        a.tell(facts=True)
        facts = a.until(reachable=False)
        # A NAT that lets in only whom it was used toward is not reachable, whatever it looks like.
        assert facts["reachable"] is False
    finally:
        for node in nodes:
            node.close()
