"""A mesh of real node processes that is hurt while clients read streams from it."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from ca.certificate import load_root
from ca.pem import read_bundle
from inference.store.manifest import ModelManifest
from mesh.receipts import Bundle, Expected, VerifiedReceipt, verify

RANGES = ("0-10", "10-20", "20-30")
ISOLATED = str(Path(__file__).with_name("isolated_node.py"))
PROMPT = "Once upon a time there was a little robot who"
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}


@dataclass
class Heard:
    """What a client has read of one stream."""

    lines: list[str] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # monotonic seconds, of each token
    finish: str | None = None
    error: dict[str, Any] | None = None
    mesh: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ended: float = 0.0
    counted: int = 0  # tokens, as the stream says

    @property
    def tokens(self) -> list[int]:
        assert self.mesh is not None, self.error
        tokens: list[int] = self.mesh["token_ids"]
        return tokens

    def longest_pause(self, begin: int = 0, end: int | None = None) -> float:
        at = self.at[begin:end]
        return max((b - a for a, b in pairwise(at)), default=0.0)

    def take(self, line: str) -> int:
        """How many tokens the line of the stream brought."""
        self.lines.append(line)
        if not line.startswith("data: {"):
            return 0
        chunk = json.loads(line[6:])
        self.error = chunk.get("error", self.error)
        self.mesh = chunk.get("mesh", self.mesh)
        self.counted = chunk.get("mesh_tokens", self.counted)
        before = len(self.at)
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish
            made = (choice["logprobs"] or {}).get("token_logprobs", ())
            self.logprobs += made
            self.at += [time.monotonic()] * len(made)
        return len(self.at) - before


def body(model: str, tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "logprobs": 1,
        "ignore_eos": True, **sampling,
    }  # fmt: skip


def read(
    api: str, request: dict[str, Any], on_token: Callable[[int], None] = lambda _: None
) -> Heard:
    """Stream a completion; ``on_token`` is called with how many tokens have been read.

    A connection that breaks is an end like any other: see ``finish``.
    """
    heard = Heard()
    with httpx2.stream(
        "POST", f"{api}/v1/completions", json=request, timeout=240, trust_env=False
    ) as response:
        take_all(heard, response, on_token)
    return heard


def read_rest(api: str, heard: Heard) -> None:
    """Fetch at another node what has not come."""
    response_id, secret = heard.headers["x-mesh-request"], heard.headers["x-mesh-resume"]
    with httpx2.stream(
        "GET", f"{api}/v1/mesh/responses/{response_id}", params={"after": heard.counted},
        headers={"X-Mesh-Resume": secret}, timeout=240, trust_env=False,
    ) as response:  # fmt: skip
        take_all(heard, response, lambda _: None)


def take_all(heard: Heard, response: httpx2.Response, on_token: Callable[[int], None]) -> None:
    heard.headers = dict(response.headers)
    if response.status_code != 200:
        heard.error = json.loads(response.read())["error"]
        return
    try:
        for line in response.iter_lines():
            if heard.take(line):
                on_token(len(heard.at))
    except httpx2.TransportError:
        pass
    heard.ended = time.monotonic()


class Mesh:
    """Three ranges of layers at nodes called ``a`` and ``b`` with the number of the range, and an
    entry node that holds none."""

    ranges: tuple[str, ...] = RANGES

    def __init__(self, network: Any, model: ModelManifest, twins: str) -> None:
        self.network, self.model = network, model
        network.environment["MESHNODE_MODELS"] = str(model.path.parent)
        self.roots = [load_root(der) for der in read_bundle(network.ca_pem.read_bytes())]
        self.entry = network.start("entry")
        self.read_rest, self.eventually = read_rest, eventually
        self.nodes: dict[str, Any] = {}
        self.stages = {f"{twin}{rank}": rank for rank in range(len(self.ranges)) for twin in twins}
        self.bring(*self.stages)

    # -- nodes ------------------------------------------------------------------------------------

    def flags(self, name: str) -> list[str]:
        stage = f"{self.model.name}:{self.ranges[self.stages[name]]}"
        # One session fills a node, so that a second one goes to others where there are any.
        return ["--stage", stage, "--slots", "1", "--peer", self.entry.listen]

    def bring_far(self, name: str) -> None:
        """Start a node that reaches the others, and is reached, on paths of its own only."""
        paths: list[str] = []
        flags = ["--stage", f"{self.model.name}:{self.ranges[self.stages[name]]}"]
        reachable = [self.entry, *(node for node in self.nodes.values() if node.api)]
        for port, node in enumerate(reachable, 4001):
            parts = node.listen.split("/")
            paths.append(f"{port}={parts[4]}")
            parts[4] = str(port)
            flags += ["--peer", "/".join(parts)]
        far = self.network.launch(name, *flags, under=[sys.executable, ISOLATED, *paths, "--"])
        self.network.ready(far)
        far.api = ""  # which is in its own network, too
        self.nodes[name] = far
        self.whole()

    def tell_paths(self, name: str, command: str) -> None:
        """``cut``, ``join`` or ``faults DELAY_MS LOSS_PERCENT``."""
        pipe = self.nodes[name].process.stdin
        pipe.write(command + "\n")
        pipe.flush()

    def bring(self, *names: str) -> None:
        """Start nodes again, or for the first time, and wait until the mesh is whole."""
        for name in names:
            self.nodes[name] = self.network.launch(name, *self.flags(name))
        for name in names:
            self.network.ready(self.nodes[name])
        self.whole()

    def bring_entry(self) -> None:
        """Start the entry node again after it was killed."""
        self.entry.process.wait()
        self.entry = self.network.start("entry", peers=tuple(self.nodes.values()))
        self.whole()

    def whole(self, seconds: float = 90.0) -> None:
        """Wait until every node is alive and ready for every other, and idle."""
        known = [self.entry, *(n for n in self.nodes.values() if n.api)]
        for node in known:
            assert eventually(lambda node=node: self._sees_all(node), seconds), self.picture()

    def _sees_all(self, node: Any) -> bool:
        seen = {n["name"]: n for n in self.view(node)["nodes"]}
        return all(
            name in seen
            and seen[name]["status"] == "alive"
            and all(h["ready"] and not h["active"] for h in seen[name]["holdings"])
            for name in ("entry", *self.nodes)
        )

    def picture(self) -> str:
        return json.dumps(
            {
                node.name: [
                    (n["name"], n["status"], [(h["ready"], h["active"]) for h in n["holdings"]])
                    for n in self.view(node)["nodes"]
                ]
                for node in (self.entry, *self.nodes.values())
                if node.api and node.process.poll() is None
            },
            indent=1,
        )

    @staticmethod
    def view(node: Any) -> dict[str, Any]:
        view: dict[str, Any] = httpx2.get(
            f"{node.api}/v1/mesh/view", timeout=30, trust_env=False
        ).json()
        return view

    def busy(self) -> dict[str, int]:
        """How many sessions each living node runs, by its own account."""
        busy = {}
        for name, node in self.nodes.items():
            if node.api and node.process.poll() is None:
                (own,) = (n for n in self.view(node)["nodes"] if n["peer"] == node.peer)
                busy[name] = sum(h["active"] for h in own["holdings"])
        return busy

    def workers(self) -> list[str]:
        """Who runs the one session that there is, by rank."""
        found = sorted((n for n, active in self.busy().items() if active), key=self.stages.get)
        assert [self.stages[name] for name in found] == list(range(len(self.ranges))), found
        return found

    def twin(self, name: str) -> str:
        return ("b" if name[0] == "a" else "a") + name[1:]

    # -- requests ---------------------------------------------------------------------------------

    def body(self, tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return body(self.model.name, tokens, sampling)

    def ask(
        self,
        tokens: int,
        sampling: dict[str, Any] = GREEDY,
        on_token: Callable[[int], None] = lambda _: None,
    ) -> Heard:
        return read(self.entry.api, self.body(tokens, sampling), on_token)

    def verified(self, heard: Heard) -> VerifiedReceipt:
        """The receipt of a response, checked against its tokens and text."""
        assert heard.mesh is not None, heard.error
        return verify(
            Bundle.from_bytes(base64.b64decode(heard.mesh["receipt"])),
            self.roots,
            network="test",
            now=time.time(),
            expected=Expected(token_ids=heard.tokens, text=heard.text, entry=self.entry.peer),
        )

    def named(self, heard: Heard) -> list[tuple[str, int, int, int]]:
        """``(node, rank, first token, end)`` of every part that the receipt states, in order."""
        names = {node.peer: name for name, node in self.nodes.items()}
        return sorted(
            (
                (names[part.peer], self.stages[names[part.peer]], *part.tokens)
                for segment in self.verified(heard).receipt.segments
                for part in segment.parts
            ),
            key=lambda part: (part[1], part[2]),
        )


class Replicas(Mesh):
    """Two nodes, ``a0`` and ``b0``, that hold the whole model."""

    ranges = ("all",)

    def flags(self, name: str) -> list[str]:
        return ["--model", self.model.name, "--peer", self.entry.listen]


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def mesh(network: Any, demo_model: ModelManifest) -> Iterator[Mesh]:
    yield Mesh(network, demo_model, "ab")


@pytest.fixture(scope="module")
def thin_mesh(network: Any, demo_model: ModelManifest) -> Iterator[Mesh]:
    """One node for each range."""
    yield Mesh(network, demo_model, "a")


@pytest.fixture(scope="module")
def replicas(network: Any, demo_model: ModelManifest) -> Iterator[Replicas]:
    yield Replicas(network, demo_model, "ab")
