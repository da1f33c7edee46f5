"""A stage behind a path that is cut, or that loses and delays packets. Linux."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 48
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}
LOSSY = "faults 50 5"


@pytest.fixture(scope="module")
def mesh(thin_mesh: Any) -> Any:
    isolated = str(Path(__file__).with_name("isolated_node.py"))
    if (
        sys.platform != "linux"
        or subprocess.run(
            [sys.executable, isolated, "--", "true"], stdin=subprocess.PIPE, capture_output=True
        ).returncode
    ):
        pytest.skip("a process may not have a network of its own here")
    return thin_mesh


@pytest.fixture(scope="module")
def whole(mesh: Any) -> Any:
    heard = mesh.ask(TOKENS, SAMPLED)
    assert heard.finish == "length"
    return heard


def hold_far(mesh: Any, rank: int) -> None:
    """Give the layers of ``rank`` to two far nodes instead of the near one."""
    mesh.nodes.pop(f"a{rank}").stop()
    del mesh.stages[f"a{rank}"]
    for name in (f"b{rank}", f"c{rank}"):
        mesh.stages[name] = rank
        mesh.bring_far(name)


def hold_near(mesh: Any, rank: int) -> None:
    for name in (f"b{rank}", f"c{rank}"):
        mesh.nodes.pop(name).stop()
        del mesh.stages[name]
    mesh.stages[f"a{rank}"] = rank
    mesh.bring(f"a{rank}")


def ask(mesh: Any, rank: int, at: dict[int, Callable[[str], None]]) -> tuple[Any, str]:
    """Ask, and do something with the worker of ``rank`` at some tokens."""
    found: list[str] = []

    def working() -> bool:
        # Far nodes cannot be asked themselves.
        found[:] = [
            n["name"]
            for n in mesh.view(mesh.entry)["nodes"]
            if mesh.stages.get(n["name"]) == rank and any(h["active"] for h in n["holdings"])
        ]
        return bool(found)

    def on_token(count: int) -> None:
        if count == 1:
            mesh.eventually(working)
        at.get(count, lambda _: None)(found[0])

    heard = mesh.ask(TOKENS, SAMPLED, on_token)
    return heard, found[0]


def check(mesh: Any, heard: Any, whole: Any, rank: int, worker: str) -> None:
    print(f"rank {rank}: the longest pause was {heard.longest_pause():.2f} s")
    assert heard.error is None
    assert (heard.text, heard.tokens, heard.finish) == (whole.text, whole.tokens, "length")
    spare = ("c" if worker[0] == "b" else "b") + worker[1:]
    assert [name for name, of, *_ in mesh.named(heard) if of == rank] == [worker, spare]


@pytest.mark.parametrize("rank", [0, 2, 1])
def test_a_stage_is_cut_off(mesh: Any, whole: Any, rank: int) -> None:
    hold_far(mesh, rank)
    heard, worker = ask(mesh, rank, {10: lambda name: mesh.tell_paths(name, "cut")})
    check(mesh, heard, whole, rank, worker)
    mesh.tell_paths(worker, "join")
    mesh.whole()  # it comes back by itself
    if rank != 1:
        hold_near(mesh, rank)


def test_a_stage_is_killed_where_packets_are_lost(mesh: Any, whole: Any) -> None:
    """Follows the test for rank 1, whose layers are still with far nodes."""

    def spoil(_: str) -> None:
        for name in ("b1", "c1"):
            mesh.tell_paths(name, "faults 50 5")

    heard, worker = ask(mesh, 1, {6: spoil, 20: lambda name: mesh.nodes[name].process.kill()})
    check(mesh, heard, whole, 1, worker)
