"""Small meshes in the simulator: they arrange themselves through churn and partitions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from simulator.scenarios import cold_start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "seed", "loss"), [(16, 3, 0.0), (16, 4, 0.3), (72, 5, 0.1)], ids=str
)
def test_nodes_arrange_themselves_through_churn_and_a_partition(
    count: int, seed: int, loss: float
) -> None:
    """The last one is so large that not every pair has a link."""
    start = cold_start(count, seed, loss)
    mesh = start.mesh
    assert start.known < 30.0 and start.arranged < 60.0
    assert mesh.routes(entries=16, each=5) >= 2
    assert mesh.churn(3, count) < 120.0
    mesh.routes()
    chains, healed = mesh.partition()
    assert chains >= 2, "each half serves the model by itself"
    assert healed < 120.0
    mesh.routes()


@pytest.mark.slow
def test_what_a_node_sends_at_rest_grows_no_faster_than_the_mesh() -> None:
    rates = {count: sum(cold_start(count, 5).mesh.rates(20.0).values()) for count in (10, 30)}
    print(f"bytes per node per second: {rates}")
    assert rates[30] < rates[10] * 4.5
