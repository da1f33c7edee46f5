"""A mesh of real node processes that is hurt while clients read streams from it.

``MESHNODE_FAULT_POSITIONS=20`` makes every loss happen at that many random tokens and not at one.
Which ones follows from ``MESHNODE_FAULT_SEED``; without it they are others in each run, and each
test prints its seed.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from ca.certificate import load_root
from ca.pem import read_bundle
from inference.store.manifest import ModelManifest
from mesh.receipts import Bundle, Expected, VerifiedReceipt, verify

POSITIONS = int(os.environ.get("MESHNODE_FAULT_POSITIONS", "1"))
SEED = os.environ.get("MESHNODE_FAULT_SEED") or str(random.SystemRandom().randrange(10**6))

RANGES = ("0-10", "10-20", "20-30")
ISOLATED = str(Path(__file__).with_name("isolated_node.py"))
PROMPT = "Once upon a time there was a little robot who"
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}
# Of the client beside. Another beginning: routes go back to where that is in the cache.
OTHER = {**SAMPLED, "prompt": "Explain how a rainbow forms."}
QUEUED = 8.0  # s without a token: the client beside is in the way
WATCHED = 3.0  # s after a fault that the client beside goes on reading
NAP = 0.02  # s of a witness's thread, and how late it may wake

# Made once, since that takes as long as a few tokens, and without connections that stay: the nodes
# at their other ends are killed.
CLIENT = httpx2.Client(
    timeout=30, trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0)
)


@dataclass
class Heard:
    """What a client has read of one stream."""

    lines: list[str] = field(default_factory=list)
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # of the text, of each token
    logprobs: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)  # monotonic seconds, of each token
    finish: str | None = None
    error: dict[str, Any] | None = None
    mesh: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ended: float = 0.0
    counted: int = 0  # tokens, as the stream says
    usage: dict[str, Any] | None = None

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
        self.usage = chunk.get("usage") or self.usage
        before = len(self.at)
        for choice in chunk.get("choices", ()):
            self.text += choice["text"]
            self.pieces.append(choice["text"])
            self.finish = choice["finish_reason"] or self.finish
            made = (choice["logprobs"] or {}).get("token_logprobs", ())
            self.logprobs += made
            self.at += [time.monotonic()] * len(made)
        return len(self.at) - before


def body(model: str, tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "logprobs": 1,
        "stream_options": {"include_usage": True}, "ignore_eos": True, **sampling,
    }  # fmt: skip


def read(
    api: str,
    request: dict[str, Any],
    on_token: Callable[[int], None] = lambda _: None,
    heard: Heard | None = None,
) -> Heard:
    """Stream a completion; ``on_token`` is called with how many tokens have been read.

    A connection that breaks is an end like any other: see ``finish``.
    """
    heard = Heard() if heard is None else heard
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


class NotApart(Exception):
    """Both clients have got this node, where they should have got different ones."""


class Enough(Exception):
    """A client goes away."""


class Witness:
    """Sees when cores are taken away from all that runs here, as the host of a virtual machine does
    it for half a second: then also who is not concerned by a loss waits. On each core a thread
    sleeps for moments and notes when it woke late."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1]
        self._late: dict[int, list[tuple[float, float]]] = {core: [] for core in cores}
        self._enough = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(core,), daemon=True) for core in cores
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self, core: int) -> None:
        if core >= 0:
            os.sched_setaffinity(0, {core})  # of this thread
        while not self._enough.is_set():
            due = time.monotonic() + NAP
            time.sleep(NAP)
            if (woke := time.monotonic()) > due + NAP:
                self._late[core].append((due, woke))

    def end(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def missing(self, begin: float, end: float) -> float:
        """Seconds between these moments for which the worst core was away."""
        return max(
            sum(max(0.0, min(woke, end) - max(due, begin)) for due, woke in late)
            for late in self._late.values()
        )


class Beside(threading.Thread):
    """A client that reads a long stream meanwhile. ``workers`` are those of the stream."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.heard = Heard()
        self.workers: list[str] = []
        self.going = threading.Event()
        self.enough = threading.Event()
        self.witness = Witness()

    def run(self) -> None:
        def on_token(count: int) -> None:
            if self.enough.is_set():
                raise Enough
            if count == 1:
                self.workers = self.mesh.workers(self.heard)
            elif count == 8:
                self.going.set()

        try:
            read(self.mesh.entry.api, self.mesh.body(1000, OTHER), on_token, self.heard)
        except Enough:
            pass
        finally:
            self.going.set()

    def end(self) -> None:
        self.enough.set()
        self.join()
        self.witness.end()

    def check(self, hurt: float) -> None:
        """Nothing happened to it when something was hurt at that moment."""
        heard = self.heard
        assert heard.error is None and heard.finish is None
        known = self.mesh.known
        assert heard.text.startswith(known) or known.startswith(heard.text)
        self.mesh.known = max(known, heard.text, key=len)
        count = sum(at < hurt for at in heard.at)
        assert len(heard.at) > count
        calm = heard.longest_pause(0, count)
        # Without what a core was away for: the bound is for pauses that the mesh makes.
        later = pairwise(heard.at[count - 1 :])
        after = max(b - a - self.witness.missing(a, b) for a, b in later)
        print(f"the client beside paused for {after:.2f} s, before {calm:.2f} s")
        # Twice the longest before, or, since that may be of a few tokens only, a bit more than what
        # two cores with seven nodes have shown: 0.06 to 0.2 s. It waits for a core, or for the step
        # in which a stage that it shares computes a piece of what the other chain sends again. Who
        # waits for others' losses to be noticed waits longer, 0.8 s for a kill, 1.5 s for a hang.
        assert after < max(2 * calm, 0.4 * crowd())


class Mesh:
    """Three ranges of layers at nodes called ``a`` and ``b`` with the number of the range, and an
    entry node that holds none."""

    ranges: tuple[str, ...] = RANGES

    def __init__(self, network: Any, model: ModelManifest, twins: str = "") -> None:
        self.network, self.model, self.twins = network, model, twins
        self.known = ""  # of the text that clients beside get
        network.environment["MESHNODE_MODELS"] = str(model.path.parent)
        self.roots = [load_root(der) for der in read_bundle(network.ca_pem.read_bytes())]
        self.entry = network.start("entry")
        self.nodes: dict[str, Any] = {}
        self.stages = {f"{twin}{rank}": rank for rank in range(len(self.ranges)) for twin in twins}
        self.bring(*self.stages)

    # -- nodes ------------------------------------------------------------------------------------

    def holds(self, name: str) -> list[str]:
        return ["--stage", f"{self.model.name}:{self.ranges[self.stages[name]]}"]

    def flags(self, name: str) -> list[str]:
        # One session fills a node that has a twin, so that a second one goes to others.
        slots = ["--slots", "1"] if len(self.twins) > 1 else []
        return [*self.holds(name), *slots, "--peer", self.entry.listen]

    def bring_far(self, *names: str) -> None:
        """Start nodes that reach the others, and are reached, on paths of their own only."""
        for name in names:
            paths: list[str] = []
            flags = [*self.holds(name), "--slots", "1"]
            reachable = [self.entry, *(node for node in self.nodes.values() if node.api)]
            for port, node in enumerate(reachable, 4001):
                parts = node.listen.split("/")
                paths.append(f"{port}={parts[4]}")
                parts[4] = str(port)
                flags += ["--peer", "/".join(parts)]
            under = [sys.executable, ISOLATED, *paths, "--"]
            self.nodes[name] = self.network.launch(name, *flags, under=under)
        for name in names:
            self.network.ready(self.nodes[name])
            self.nodes[name].api = ""  # which is in its own network, too
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

    def drop(self, *names: str) -> None:
        """Stop nodes for good; one that is no more is fine."""
        for name in self.stages.keys() & set(names):
            self.nodes.pop(name).stop()
            del self.stages[name]

    def heal(self) -> None:
        """Bring back what a test that failed has left behind."""
        living = tuple(n for n in self.nodes.values() if n.api and n.process.poll() is None)
        for node in living:
            node.process.send_signal(signal.SIGCONT)
        if self.entry.process.poll() is not None:
            self.entry = self.network.start("entry", peers=living)
        dead = [name for name, node in self.nodes.items() if node.process.poll() is not None]
        missing = [name for name in self.stages if name not in self.nodes]
        self.bring(*dead, *missing)

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
        view: dict[str, Any] = CLIENT.get(f"{node.api}/v1/mesh/view").json()
        return view

    def busy(self, besides: Collection[str] = ()) -> dict[str, int]:
        """How many sessions each living node runs, by its own account."""
        busy = {}
        for name, node in self.nodes.items():
            if node.api and node.process.poll() is None and name not in besides:
                (own,) = (n for n in self.view(node)["nodes"] if n["peer"] == node.peer)
                busy[name] = sum(h["active"] for h in own["holdings"])
        return busy

    def holdings(self, name: str) -> list[dict[str, Any]]:
        """What a node holds, as the entry node knows."""
        (found,) = (n for n in self.view(self.entry)["nodes"] if n["name"] == name)
        holdings: list[dict[str, Any]] = found["holdings"]
        return holdings

    def load(self, name: str) -> tuple[int, int]:
        """``(active, waiting)`` sessions of a node's one holding, as the entry node knows."""
        (holding,) = self.holdings(name)
        return holding["active"], holding["waiting"]

    @staticmethod
    def check_idle(*nodes: Any) -> None:
        """They answer, and compute nothing, as soon as they have dialled and measured anew what
        they have to after a loss."""
        for node in nodes:
            assert CLIENT.get(f"{node.api}/health").status_code == 200
        processes = {node.name: psutil.Process(node.process.pid) for node in nodes}
        for _ in range(10):
            before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
            time.sleep(1.0)
            processes = {
                name: process
                for name, process in processes.items()
                if sum(process.cpu_times()[:2]) - before[name] >= 0.3
            }
            if not processes:
                return
        pytest.fail(f"not idle: {', '.join(processes)}")

    def workers(self, heard: Heard) -> list[str]:
        """The nodes that were chosen for a response of the entry node's, by rank."""
        told = json.loads((self.entry.home / "control.json").read_text(encoding="utf-8"))
        answer = CLIENT.get(
            f"{told['url']}/control/explain",
            params={"response": heard.headers["x-mesh-request"]},
            headers={"Authorization": f"Bearer {told['token']}"},
        ).json()
        return [stage["name"] for stage in answer["routes"][-1]["stages"]]

    def twin(self, name: str) -> str:
        """The other node with the layers that a node has; itself where there is none."""
        others = [n for n, r in self.stages.items() if r == self.stages[name] and n != name]
        return others[0] if others else name

    # -- requests ---------------------------------------------------------------------------------

    def body(self, tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return body(self.model.name, tokens, sampling)

    def beside(self) -> Beside:
        return Beside(self)

    def ask(
        self,
        tokens: int,
        sampling: dict[str, Any] = GREEDY,
        on_token: Callable[[int], None] = lambda _: None,
    ) -> Heard:
        return read(self.entry.api, self.body(tokens, sampling), on_token)

    def hurt(
        self,
        faults: dict[int, Callable[[list[str]], None]],
        tokens: int,
        sampling: dict[str, Any],
        *,
        apart: int | None = None,
    ) -> tuple[Heard, list[str]]:
        """Ask, and at some tokens do something to those who work on it, of whom the faults and the
        caller are told by rank.

        With ``apart``, a rank, another client reads meanwhile, whose node of that rank is another
        one. From the last fault on it is watched for a while: it must not notice.
        """
        if apart is None:
            return self._hurt(faults, tokens, sampling)
        for attempt in range(5):
            try:
                return self._hurt_beside(faults, tokens, sampling, apart)
            except NotApart as both:
                other = self.twin(str(both))
            # It looks so slow, or far away, that it is better to wait for its twin: it measured
            # itself, or was measured, while others had the machine.
            if attempt and self.nodes[other].api:
                self.nodes[other].stop()
                self.bring(other)
            else:
                time.sleep(2.0)
        # Others have the machine. What becomes of the one client can still be seen.
        warnings.warn("both clients always got the same node: none was watched", stacklevel=2)
        return self._hurt(faults, tokens, sampling)

    def _hurt_beside(
        self,
        faults: dict[int, Callable[[list[str]], None]],
        tokens: int,
        sampling: dict[str, Any],
        apart: int,
    ) -> tuple[Heard, list[str]]:
        beside = self.beside()
        queued = threading.Timer(QUEUED, beside.enough.set)
        watch = threading.Timer(WATCHED, beside.enough.set)
        hurt: list[float] = []
        last = max(faults)

        def last_fault(workers: list[str]) -> None:
            hurt.append(time.monotonic())
            faults[last](workers)
            watch.start()

        def check(workers: list[str]) -> None:
            queued.cancel()
            if beside.enough.is_set() or workers[apart] == beside.workers[apart]:
                raise NotApart(workers[apart])

        beside.start()
        try:
            assert beside.going.wait(60) and beside.heard.error is None, beside.heard.error
            queued.start()
            heard, workers = self._hurt({**faults, last: last_fault}, tokens, sampling, check)
        finally:
            beside.end()
            queued.cancel()
            watch.cancel()
        assert hurt, heard.error
        beside.check(hurt[0])
        return heard, workers

    def _hurt(
        self,
        faults: dict[int, Callable[[list[str]], None]],
        tokens: int,
        sampling: dict[str, Any],
        check: Callable[[list[str]], None] = lambda _: None,
    ) -> tuple[Heard, list[str]]:
        heard = Heard()
        workers: list[str] = []

        def on_token(count: int) -> None:
            if count == 1:
                workers.extend(self.workers(heard))
                check(workers)
            if count in faults:
                faults[count](workers)

        read(self.entry.api, self.body(tokens, sampling), on_token, heard)
        return heard, workers

    def took_part(self, heard: Heard, workers: list[str], lost: int) -> int:
        """The receipt names the workers, and for the lost rank also its twin after it. Returns the
        token from which on the twin worked."""
        parts = self.named(heard)
        for rank, worker in enumerate(workers):
            mine = [part for part in parts if part[1] == rank]
            if rank == lost:
                (first, second) = mine
                assert (first[0], second[0]) == (worker, self.twin(worker))
                assert (first[2], first[3], second[3]) == (0, second[2], len(heard.tokens))
                begin = second[2]
            elif lost:
                assert [(p[0], p[2], p[3]) for p in mine] == [(worker, 0, len(heard.tokens))]
            else:
                # The whole chain is chosen anew, and may be what it was.
                assert {part[0] for part in mine} <= {worker, self.twin(worker)}
        return begin

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

    def holds(self, name: str) -> list[str]:
        return ["--model", self.model.name]


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def crowd() -> float:
    """By how much this machine is slower now because others want it too; 1 when it is calm. Of
    what runs here anyway the two cores of a small machine are full."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return max(1.0, os.getloadavg()[0] / 2 / (os.cpu_count() or 1))


def same(heard: Heard, whole: Heard) -> None:
    """What the client got is what it gets when nothing is hurt."""
    assert heard.error is None
    assert heard.text == whole.text
    assert heard.tokens == whole.tokens
    assert heard.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
    assert heard.finish == whole.finish
    assert heard.usage is not None and whole.usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert heard.usage[count] == whole.usage[count]


def lost_for_good(heard: Heard, at: float) -> None:
    """The client was told so, soon after that moment, and in a way that OpenAI's clients take."""
    print(f"the error came after {heard.ended - at:.2f} s")
    assert heard.ended - at < 10.0
    assert heard.finish is None and heard.mesh is None
    assert heard.error is not None and heard.error["type"] == "server_error"
    assert heard.error["code"] == "node_lost" and heard.error["message"]
    assert not any("[DONE]" in line for line in heard.lines)


def positions(name: str, begin: int, end: int) -> list[int]:
    """Random tokens in ``[begin, end)`` at which something happens."""
    print(f"MESHNODE_FAULT_SEED={SEED}")
    drawn = random.Random(f"{SEED} {name}")
    return [drawn.randrange(begin, end) for _ in range(POSITIONS)]


class Tools:
    """What tests use of this module."""

    GREEDY, SAMPLED = GREEDY, SAMPLED
    same = staticmethod(same)
    crowd = staticmethod(crowd)
    lost_for_good = staticmethod(lost_for_good)
    positions = staticmethod(positions)
    eventually = staticmethod(eventually)
    read_rest = staticmethod(read_rest)
    Mesh, Replicas = Mesh, Replicas


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="module")
def mesh(network: Any, demo_model: ModelManifest) -> Iterator[Mesh]:
    yield Mesh(network, demo_model, "ab")


@pytest.fixture(scope="module")
def replicas(network: Any, demo_model: ModelManifest) -> Iterator[Replicas]:
    yield Replicas(network, demo_model, "ab")
