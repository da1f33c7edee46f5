"""A small mesh in the simulator: it arranges itself through churn and partitions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_scale", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "loss"), [(3, 0.0), (4, 0.3)])
def test_nodes_arrange_themselves_through_churn_and_a_partition(
    scale: ModuleType, seed: int, loss: float
) -> None:
    world, known, arranged = scale.cold_start(16, seed, loss)
    assert known < 30.0 and arranged < 60.0
    assert world.chains() == 3
    assert scale.routes(world, entries=16, each=5) >= 2
    assert scale.churn(world, 3, 16) < 120.0
    assert world.chains() == 3
    sides, healed = scale.partition(world)
    assert sides >= 2  # each half served the model by itself
    assert healed < 120.0
    assert world.chains() == 3, "what the halves made beyond what is wanted is let go"
    scale.routes(world)


@pytest.mark.slow
def test_what_a_node_sends_at_rest_grows_no_faster_than_the_mesh(scale: ModuleType) -> None:
    rates = {}
    for count in (10, 30):
        world, _, _ = scale.cold_start(count, 5)
        rates[count] = sum(scale.rate(world, 20.0).values())
    print(f"bytes per node per second: {rates}")
    assert rates[30] < rates[10] * 4.5
