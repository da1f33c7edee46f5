"""Small meshes in the simulator: they arrange themselves through churn and partitions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mesh.gossip.dialing import FULL_MESH

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from simulator.scenarios import cold_start


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "loss"), [(3, 0.0), (4, 0.3)])
def test_nodes_arrange_themselves_through_churn_and_a_partition(seed: int, loss: float) -> None:
    start = cold_start(16, seed, loss)
    mesh = start.mesh
    assert start.known < 30.0 and start.arranged < 60.0
    assert mesh.routes(entries=16, each=5) >= 2
    assert mesh.churn(3, 16) < 120.0
    mesh.routes()
    chains, healed = mesh.partition()
    assert chains >= 2, "each half serves the model by itself"
    assert healed < 120.0
    mesh.routes()


@pytest.mark.slow
def test_a_mesh_in_which_not_every_pair_has_a_link_notices_losses_as_soon() -> None:
    count = FULL_MESH + 2
    start = cold_start(count, 1)
    mesh = start.mesh
    assert any(len(node.links) < count - 1 for node in mesh.nodes)
    small, large = (sum(m.rates(20.0).values()) for m in (cold_start(10, 1).mesh, mesh))
    print(f"bytes per node per second: {small:.0f} of 10 nodes, {large:.0f} of {count}")
    assert large / small < count / 10 * 1.5
    # Silence alone would take longer than twenty seconds.
    victim = next(node for node in mesh.nodes if node.placer.held and node.number)
    mesh.world.kill(victim)
    assert mesh.world.run_until(mesh.agrees, 15.0) > 0.0
    assert mesh.churn(3, count) < 60.0
    mesh.routes()


@pytest.mark.slow
def test_a_better_layout_for_which_there_is_no_memory_keeps_nobody_busy() -> None:
    """In this mesh a node once let go of a stage and took it up again, for ever."""
    mesh = cold_start(100, 10).mesh
    mesh.routes()
    mesh.rates(60.0)
    assert mesh.churn(5, 100) < 60.0


def test_a_claim_too_many_is_seen_and_let_go() -> None:
    mesh = cold_start(10, 1).mesh
    idle = next(node for node in mesh.nodes if not node.placer.held)
    holder = next(node for node in mesh.nodes if node.placer.held)
    before = mesh.held()
    idle.placer.held = list(holder.placer.held)
    assert not mesh.arranged()
    with pytest.raises(AssertionError, match="arranged"):
        mesh.world.run_until(mesh.arranged, 0.0)
    idle.loaded()
    mesh.settle()
    assert len(mesh.held()) == len(before)
