"""Nodes of chains are killed, stopped, drained and sent away while clients read them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 64
LEFT = 24  # at least, after a loss: they are made while the client comes to inflict it


@pytest.fixture(autouse=True)
def healed(mesh: Any) -> None:
    mesh.heal()


@pytest.fixture(scope="module")
def unbroken(mesh: Any) -> Callable[[int, dict[str, Any]], Any]:
    """What an undisturbed client hears, for comparison."""
    heard: dict[str, Any] = {}

    def ask(tokens: int, sampling: dict[str, Any]) -> Any:
        key = f"{tokens} {sampling}"
        if key not in heard:
            heard[key] = mesh.ask(tokens, sampling)
            assert heard[key].finish == "length", heard[key].error
        return heard[key]

    return ask


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_stage_is_lost_at_a_random_token(
    mesh: Any, tools: Any, unbroken: Any, rank: int, how: signal.Signals
) -> None:
    """A client on another chain reads on meanwhile."""
    for number, at in enumerate(tools.positions(f"{how.name} {rank}", 2, TOKENS - LEFT)):
        sampling = (tools.GREEDY, tools.SAMPLED)[(rank + number + (how == signal.SIGSTOP)) % 2]
        whole = unbroken(TOKENS, sampling)

        def fault(workers: list[str]) -> None:
            mesh.nodes[workers[rank]].process.send_signal(how)

        heard, workers = mesh.hurt({at: fault}, TOKENS, sampling, apart=rank)
        victim = mesh.nodes[workers[rank]]
        if how == signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
        print(f"rank {rank}, {how.name} at {at}: paused for {heard.longest_pause(at - 1):.2f} s")
        tools.same(heard, whole)
        assert mesh.took_part(heard, workers, rank) >= at
        if how == signal.SIGSTOP:
            mesh.whole()
        else:
            victim.stop()
            mesh.bring(victim.name)


def test_two_losses_in_one_response_and_a_receipt_that_verifies_offline(
    mesh: Any, tools: Any, network: Any, unbroken: Any, tmp_path: Path
) -> None:
    whole = unbroken(TOKENS, tools.SAMPLED)

    def lose(rank: int) -> Callable[[list[str]], None]:
        return lambda workers: mesh.nodes[workers[rank]].process.kill()

    heard, workers = mesh.hurt({12: lose(1), 25: lose(2)}, TOKENS, tools.SAMPLED)
    tools.same(heard, whole)
    for name in workers[1:]:
        mesh.nodes[name].stop()
    saved = tmp_path / "response.sse"
    saved.write_text("\n".join(heard.lines) + "\n", encoding="utf-8")
    done = network.run("meshnode", "verify", saved, "--ca", network.ca_pem)
    assert done.returncode == 0, done.stderr
    for name in {*workers, *map(mesh.twin, workers[1:])}:
        assert mesh.nodes[name].peer in done.stdout
    mesh.bring(*workers[1:])


def test_without_a_spare_there_is_an_error_and_nothing_stays(mesh: Any, tools: Any) -> None:
    mesh.nodes.pop("b1").stop()
    lost = mesh.nodes["a1"]
    for how in (signal.SIGSTOP, signal.SIGKILL):
        gone: list[float] = []

        def fault(_: list[str], how: signal.Signals = how, gone: list[float] = gone) -> None:
            gone.append(time.monotonic())
            lost.process.send_signal(how)

        heard, workers = mesh.hurt({10: fault}, 2000, tools.GREEDY)
        assert workers[1] == "a1"
        tools.lost_for_good(heard, gone[0])
        survivors = [mesh.entry, *(mesh.nodes[name] for name in ("a0", "b0", "a2", "b2"))]
        assert tools.eventually(lambda: not any(mesh.busy({"a1"}).values()), 10)
        mesh.check_idle(*survivors)
        if how == signal.SIGSTOP:
            lost.process.send_signal(signal.SIGCONT)
            mesh.whole()
    lost.stop()
    mesh.bring("a1", "b1")
    assert mesh.ask(4).finish == "length"


def test_a_drained_middle_stage_finishes_what_it_has(mesh: Any, tools: Any, unbroken: Any) -> None:
    whole = unbroken(TOKENS, tools.GREEDY)
    drains: list[subprocess.Popen[str]] = []

    def fault(workers: list[str]) -> None:
        node = mesh.nodes[workers[1]]
        home = str(node.home)
        command = [str(Path(sys.executable).parent / "meshnode"), "drain", "--home", home]
        drains.append(subprocess.Popen(command, env=node.environment, text=True))

    heard, workers = mesh.hurt({8: fault}, TOKENS, tools.GREEDY)
    tools.same(heard, whole)
    assert [(n, b, e) for n, rank, b, e in mesh.named(heard) if rank == 1] == [
        (workers[1], 0, TOKENS)
    ]
    assert drains[0].wait(60) == 0
    assert mesh.nodes[workers[1]].process.wait(30) == 0
    mesh.bring(workers[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_told_to_stop_hands_over(
    mesh: Any, tools: Any, unbroken: Any, rank: int
) -> None:
    tokens = 280  # more than it has time for

    def fault(workers: list[str]) -> None:
        mesh.nodes[workers[rank]].process.terminate()

    heard, workers = mesh.hurt({8: fault}, tokens, tools.GREEDY)
    node = mesh.nodes[workers[rank]]
    assert node.process.wait(30) == 0
    assert heard.error is None and heard.finish == "length" and len(heard.at) == tokens
    assert heard.text.startswith(unbroken(TOKENS, tools.GREEDY).text)
    if rank == 0 and len(mesh.verified(heard).segments) > 1:
        # It signs for what it has made.
        first = mesh.verified(heard).segments[0]
        assert (first.node, first.evidence) == (node.peer, "receipt")
    mesh.bring(node.name)


def test_the_entry_node_is_lost_and_the_rest_comes_from_another(
    mesh: Any, tools: Any, network: Any, unbroken: Any, tmp_path: Path
) -> None:
    whole = unbroken(2 * TOKENS, tools.SAMPLED)

    def fault(workers: list[str]) -> None:
        mesh.entry.process.kill()

    heard, workers = mesh.hurt({20: fault}, 2 * TOKENS, tools.SAMPLED)
    assert heard.finish is None and 20 <= heard.counted < 2 * TOKENS
    tools.read_rest(mesh.nodes[mesh.twin(workers[1])].api, heard)
    tools.same(heard, whole)
    assert [name for name, *_ in mesh.named(heard)] == workers
    saved = tmp_path / "both.sse"
    saved.write_text("\n".join(heard.lines) + "\n", encoding="utf-8")
    done = network.run("meshnode", "verify", saved, "--ca", network.ca_pem)
    assert done.returncode == 0, done.stderr
    mesh.bring_entry()


def test_leave_and_rejoin_at_once(mesh: Any, tools: Any) -> None:
    """Everybody sees it again, once and alive, and it is used as soon as it has loaded."""
    mesh.nodes["b1"].stop()
    living = [mesh.entry, *(mesh.nodes[name] for name in ("a0", "a2", "b0", "b2"))]

    def boots() -> list[str | None]:
        """Which start of the node each of the others takes for alive."""
        seen = [[n for n in mesh.view(node)["nodes"] if n["name"] == "a1"] for node in living]
        assert all(len(found) <= 1 for found in seen)
        return [n[0]["advert"]["boot"] if n and n[0]["status"] == "alive" else None for n in seen]

    def again(boot: str) -> bool:
        return all(seen not in (boot, None) for seen in boots())

    def when_ready() -> float:
        mesh.network.ready(mesh.nodes["a1"])
        return time.monotonic()

    for how in (signal.SIGTERM, signal.SIGKILL):
        boot = boots()[0]
        mesh.nodes["a1"].stop(how)
        gone = time.monotonic()
        mesh.nodes["a1"] = mesh.network.launch("a1", *mesh.flags("a1"))
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(when_ready)
            assert tools.eventually(lambda boot=boot: again(boot), 30), mesh.picture()
            back = time.monotonic() - gone
            ready = loaded.result() - gone
        while (heard := mesh.ask(2)).error is not None:
            assert time.monotonic() - gone < 30, heard.error
            time.sleep(0.1)
        used = heard.ended - gone
        print(f"{how.name}: back after {back:.2f} s, ready {ready:.2f} s, used {used:.2f} s")
        assert mesh.named(heard)[1][0] == "a1"
        # Everybody knows of it while it still loads; the bounds leave them time to be asked.
        assert back < ready + 1.0 * tools.crowd()
        assert used < max(back, ready) + 3.0 * tools.crowd()
        assert tools.eventually(lambda boot=boot: again(boot)), mesh.picture()
    mesh.bring("b1")
