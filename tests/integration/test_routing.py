"""Best peer means best, on real nodes: idle before busy, fast in proportion, no stampede."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest

from inference.store.manifest import ModelManifest

pytestmark = pytest.mark.slow


@pytest.fixture
def replicas(network: Any, demo_model: ModelManifest) -> Iterator[tuple[Any, str]]:
    network.environment["MESHNODE_MODELS"] = str(demo_model.path.parent)
    yield network, demo_model.name
    for node in network.nodes.values():
        node.stop()
    network.nodes.clear()


def complete(node: Any, model: str, max_tokens: int) -> str:
    """One request; returns who answered."""
    response = httpx2.post(
        f"{node.api}/v1/completions",
        json={"model": model, "prompt": "Tell me a story.", "max_tokens": max_tokens,
              "ignore_eos": True, "temperature": 0},
        timeout=240,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    return str(response.headers["X-Mesh-Node"])


def wait_for(node: Any, peers: int, model: str) -> None:
    done = node.cli("wait", "--peers", str(peers), "--model", model, "--timeout", "60")
    assert done.returncode == 0, done.stderr


def sessions(node: Any) -> int:
    """How many run and wait there, by its own account."""
    view = httpx2.get(f"{node.api}/v1/mesh/view", timeout=30).json()
    (own,) = (n for n in view["nodes"] if n["peer"] == node.peer)
    return sum(h["active"] + h["waiting"] for h in own["holdings"])


def seconds_per_token(node: Any) -> float:
    """As it measured itself when it had loaded."""
    view = httpx2.get(f"{node.api}/v1/mesh/view", timeout=30).json()
    (own,) = (n for n in view["nodes"] if n["peer"] == node.peer)
    seconds: float = own["holdings"][0]["decode_seconds"]
    return seconds


def test_requests_go_to_the_idle_replica(replicas: tuple[Any, str]) -> None:
    network, model = replicas
    # Both measure themselves alone, and get to know each other only once one of them is busy. That
    # has enough to do until the end, all of it from the start: it would pass on what came later.
    busy = network.start("busy", "--model", model, "--slots", "4")
    idle = network.start("idle", "--model", model, "--slots", "4")

    def keep_busy() -> None:
        with suppress(httpx2.HTTPError):  # its node goes, and it with it
            complete(busy, model, 1200)

    with ThreadPoolExecutor(20) as pool:
        long = [pool.submit(keep_busy) for _ in range(20)]
        while sessions(busy) < 20:
            assert not any(f.done() for f in long), "the busy replica has refused a client"
            time.sleep(0.05)
        entry = network.start("entry", peers=(busy, idle))
        wait_for(entry, 2, model)
        answered = Counter(complete(entry, model, 4) for _ in range(8))
        left = sum(not f.done() for f in long)
        busy.stop()
        idle.stop()
        for future in long:
            future.exception()
    assert left > 8, "the busy replica has run dry"
    assert answered == {idle.peer: 8}


@contextmanager
def on_processor(number: int) -> Iterator[None]:
    """What is started inside runs on this processor only."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(usual)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="a node is made slow by pinning it to a processor that is busy",
)
def test_a_fast_and_a_slow_replica_share_in_proportion(replicas: tuple[Any, str]) -> None:
    network, model = replicas
    with on_processor(1):
        burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        # A replica measures itself for a moment only, in which others may have its processor: the
        # ratio is two to four when they have not.
        for _ in range(3):
            # Few slots, so that twelve clients keep both of them busy.
            with on_processor(0):
                fast = network.start("fast", "--model", model, "--slots", "2")
            with on_processor(1):
                slow = network.start("slow", "--model", model, "--slots", "2", peers=(fast,))
            ratio = seconds_per_token(slow) / seconds_per_token(fast)
            if 1.5 < ratio < 4:
                break
            fast.stop()
            slow.stop()
        else:
            pytest.fail(f"the slow replica is {ratio:.1f} times slower")
        entry = network.start("entry", peers=(fast, slow))
        wait_for(entry, 2, model)
        expected = pytest.approx(ratio / (1 + ratio), abs=0.2)
        with ThreadPoolExecutor(12) as pool:
            # And for a whole round, too.
            for _ in range(3):
                answered = Counter(pool.map(lambda _: complete(entry, model, 12), range(48)))
                share = answered[fast.peer] / 48
                print(f"{ratio:.2f} times faster, it got {share:.2f} of the requests")
                if share == expected:
                    break
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert answered[slow.peer] > 0
    assert share == expected


def test_three_entry_nodes_do_not_stampede(replicas: tuple[Any, str]) -> None:
    network, model = replicas
    first = network.start("first", "--model", model)
    second = network.start("second", "--model", model, peers=(first,))
    entries = network.start_all({f"entry-{n}": () for n in range(3)}, peers=(first, second))
    for entry in entries:
        wait_for(entry, 4, model)
    go = threading.Barrier(60)

    def some(number: int) -> list[str]:
        go.wait(60)  # all at once, on the same stale view
        count = 4 if number < 20 else 3
        return [complete(entries[number % 3], model, 4) for _ in range(count)]

    with ThreadPoolExecutor(60) as pool:
        answered = Counter(peer for peers in pool.map(some, range(60)) for peer in peers)
    assert sum(answered.values()) == 200
    # How fast each of the two measured itself depends on the moment; neither may get nearly all.
    assert min(answered[first.peer], answered[second.peer]) >= 40, answered


@contextmanager
def halting(process: subprocess.Popen[str]) -> Iterator[None]:
    """Inside, the process runs for a tenth of the time."""
    over = threading.Event()

    def halt() -> None:
        while not over.wait(0.01):
            process.send_signal(signal.SIGSTOP)
            over.wait(0.09)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process is slowed down by signals")
def test_a_stage_that_has_become_slow_is_routed_around(replicas: tuple[Any, str]) -> None:
    network, model = replicas
    head = network.start("head", "--stage", f"{model}:0-15")
    tail_flags = ("--stage", f"{model}:15-30")
    tails = network.start_all({"tail-0": tail_flags, "tail-1": tail_flags}, peers=(head,))
    entry = network.start("entry", peers=(head, *tails))
    wait_for(entry, 3, model)

    def tail() -> str:
        """Who ran the second half."""
        response = httpx2.post(
            f"{entry.api}/v1/completions",
            json={"model": model, "prompt": "Tell me a story.", "max_tokens": 12,
                  "ignore_eos": True, "temperature": 0},
            timeout=240,
        )  # fmt: skip
        assert response.status_code == 200, response.text
        return str(response.json()["mesh"]["nodes"][-1]["node"])

    tail()  # what is used for the first time is slow for once
    usual = tail()
    (slow,) = [node for node in tails if node.peer == usual]
    (fine,) = [node for node in tails if node.peer != usual]
    with halting(slow.process):
        assert any(tail() == fine.peer for _ in range(8)), "the slow one is used again and again"
        # What little the entry node knows of them at each moment may let one through.
        assert Counter(tail() for _ in range(6))[fine.peer] >= 4
