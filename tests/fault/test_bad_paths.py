"""Nodes behind a path that is cut, or that loses and delays packets. Linux.

What is hurt is one of two far nodes that hold the same, in a mesh whose other nodes are near.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 48
LEFT = 24  # at least, after a loss: they are made while the client comes to inflict it
# Who is cut off again and again has no place in chains any more, which is not what is shown here.
LENIENT = {"MESHNODE_MAX_LOSS": "1", "MESHNODE_MAX_JITTER_MS": "10000"}
LOSSY = "faults 50 5"  # ms and percent, each way


@pytest.fixture(scope="module")
def isolation() -> None:
    isolated = str(Path(__file__).with_name("isolated_node.py"))
    if (
        sys.platform != "linux"
        or subprocess.run(
            [sys.executable, isolated, "--", "true"], stdin=subprocess.PIPE, capture_output=True
        ).returncode
    ):
        pytest.skip("a process may not have a network of its own here")


@pytest.fixture(
    scope="module", params=[1, 0, 2, "replica"], ids=["rank 1", "rank 0", "rank 2", "replica"]
)
def far(
    isolation: None,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    network: Any,
    demo_model: Any,
    tools: Any,
) -> Iterator[tuple[Any, int]]:
    """A mesh, and the rank of which two far nodes have the layers."""
    if request.param == "replica":
        network = type(network)(tmp_path_factory.mktemp("replicas"), models=None)
        network.environment |= LENIENT
        mesh, rank = tools.Replicas(network, demo_model), 0
    else:
        mesh, rank = request.getfixturevalue("chains"), request.param
        hold_near(mesh, [other for other in range(3) if other != rank])
    names = [f"{twin}{rank}" for twin in "bc"]
    for name in names:
        mesh.stages[name] = rank
    mesh.bring_far(*names)
    yield mesh, rank
    mesh.drop(*names)
    if request.param == "replica":
        network.close()


@pytest.fixture(scope="module")
def chains(network: Any, demo_model: Any, tools: Any) -> Any:
    network.environment |= LENIENT
    return tools.Mesh(network, demo_model)


def hold_near(mesh: Any, ranks: list[int]) -> None:
    """Near nodes have the layers of these ranks, and no others."""
    wanted = {f"a{rank}": rank for rank in ranks}
    mesh.drop(*(mesh.stages.keys() - wanted.keys()))
    missing = wanted.keys() - mesh.stages.keys()
    mesh.stages |= wanted
    mesh.bring(*missing)


@pytest.fixture(scope="module")
def whole(far: Any, tools: Any) -> Any:
    mesh, _ = far
    heard = mesh.ask(TOKENS, tools.SAMPLED)
    assert heard.finish == "length", heard.error
    return heard


def check(mesh: Any, tools: Any, heard: Any, whole: Any, rank: int, workers: list[str]) -> None:
    print(f"{workers[rank]} was lost: the longest pause was {heard.longest_pause():.2f} s")
    tools.same(heard, whole)
    mesh.took_part(heard, workers, rank)


def test_a_node_is_cut_off(far: Any, tools: Any, whole: Any) -> None:
    """A client that needs it not reads on meanwhile."""
    mesh, rank = far
    for at in tools.positions(f"cut {rank}", 2, TOKENS - LEFT):
        heard, workers = mesh.hurt(
            {at: lambda workers: mesh.tell_paths(workers[rank], "cut")},
            TOKENS,
            tools.SAMPLED,
            apart=rank,
        )
        mesh.tell_paths(workers[rank], "join")
        check(mesh, tools, heard, whole, rank, workers)
        mesh.whole()  # it comes back by itself


def test_a_node_is_lost_where_packets_are_lost(far: Any, tools: Any, whole: Any) -> None:
    mesh, rank = far
    drawn = tools.positions(f"lossy {rank}", 3, TOKENS - LEFT)
    for number, at in enumerate(drawn, 1):
        heard, workers = mesh.hurt(
            {
                1: lambda workers: mesh.tell_paths(workers[rank], LOSSY),
                at: lambda workers: mesh.nodes[workers[rank]].process.kill(),
            },
            TOKENS,
            tools.SAMPLED,
            apart=rank,
        )
        check(mesh, tools, heard, whole, rank, workers)
        mesh.nodes[workers[rank]].stop()
        if number < len(drawn):
            mesh.bring_far(workers[rank])


@pytest.mark.parametrize("far", [1], indirect=True, ids=["rank 1"])
def test_a_cut_path_without_a_spare_is_an_error_until_it_is_joined(far: Any, tools: Any) -> None:
    mesh, rank = far
    only, *others = sorted(
        (name for name, held in mesh.stages.items() if held == rank),
        key=lambda name: mesh.nodes[name].process.poll() is not None,
    )
    mesh.drop(*others)
    mesh.whole()
    cut: list[float] = []

    def fault(_: list[str]) -> None:
        cut.append(time.monotonic())
        mesh.tell_paths(only, "cut")

    heard, workers = mesh.hurt({10: fault}, 2000, tools.GREEDY)
    assert workers[rank] == only
    tools.lost_for_good(heard, cut[0])
    assert tools.eventually(lambda: not any(mesh.busy().values()), 10)
    mesh.check_idle(mesh.entry, *(node for node in mesh.nodes.values() if node.api))
    mesh.tell_paths(only, "join")
    mesh.whole()  # its own session has ended, too
    assert mesh.ask(4).finish == "length"
