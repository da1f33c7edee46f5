"""A mesh of any size in virtual time: what it costs to know each other and to arrange itself.

All nodes of a mesh start at once and arrange a model of three chains; then some of those that hold
layers are killed while others join and come back; then the mesh is cut in two for a minute. A tenth
of all gossip messages between two nodes is lost throughout. After each of these all nodes must know
exactly who runs, have one layout, hold it, and hold nothing else; requests must find their way. If
one of this does not come true the exit code is 1. See ``tests/simulator``.

    python3 dev.py bench scale [--quick] [--nodes 10,100,1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from simulator.scenarios import cold_start

from inference.errors import GenerationError

SIZES = (10, 100, 1000)
LOSS = 0.1
REST = 60.0  # s for which the traffic of a mesh at rest is counted: an interval of its adverts
NAMES = {
    "known": ("time until all nodes know each other", "s"),
    "arranged": ("time until a wanted model is served as planned", "s"),
    "churn": ("time to arrange anew after churn", "s"),
    "healed": ("time to one layout after a partition", "s"),
    "gossip": ("sent per node at rest, gossip", "bytes/s"),
    "anti-entropy": ("sent per node at rest, anti-entropy", "bytes/s"),
    "rate": ("sent per node at rest", "bytes/s"),
}


def measure(count: int, seed: int) -> dict[str, float]:
    """Raises AssertionError or GenerationError when something does not hold that must."""
    began = time.process_time()

    def say(text: str) -> None:
        print(f"{count:5} nodes: {text}  [{time.process_time() - began:.0f} s]", flush=True)

    start = cold_start(count, seed, LOSS)
    mesh = start.mesh
    say(f"know each other after {start.known:.1f} s, arranged after {start.arranged:.1f} s")
    shared = mesh.routes()
    rates = mesh.rates(REST)
    say(
        f"at rest {rates['gossip'] / 1e3:.2f} + {rates['anti-entropy'] / 1e3:.2f} kB/s per node "
        f"(gossip + anti-entropy); requests start at {shared} nodes"
    )
    again = mesh.churn(5, count)
    mesh.routes()
    say(f"arranged {again:.1f} s after churn")
    chains, healed = mesh.partition()
    mesh.routes()
    say(f"{chains} chains in two halves; one layout without split claims {healed:.1f} s later")
    return {
        "known": start.known,
        "arranged": start.arranged,
        "churn": again,
        "healed": healed,
        **rates,
        "rate": sum(rates.values()),
    }


def table(found: dict[int, dict[str, float]]) -> str:
    lines = [f"{'':48}" + "".join(f"{size:>10}" for size in found) + " nodes"]
    for key, (name, unit) in NAMES.items():
        lines.append(
            f"{name + ', ' + unit:48}" + "".join(f"{v[key]:>10,.1f}" for v in found.values())
        )
    for small, large in itertools.pairwise(found):
        growth = found[large]["rate"] / found[small]["rate"]
        power = math.log(growth) / math.log(large / small)
        lines.append(
            f"{small} -> {large} nodes: {growth:.1f} times the bytes per node per second, "
            f"as the number of nodes to the power {power:.2f}"
        )
    return "\n".join(lines)


def figures(found: dict[int, dict[str, float]]) -> list[dict[str, Any]]:
    smallest = min(found)
    return [
        {
            "figure": f"{name}, {size} nodes",
            "unit": unit,
            "ours": values[key],
            "reference": f"{smallest} nodes",
            "reference_value": found[smallest][key],
            "ratio": found[smallest][key] / values[key] if values[key] else 1.0,
            "target": None,
            "runs": 1,
        }
        for size, values in found.items()
        for key, (name, unit) in NAMES.items()
    ]


def sizes(text: str) -> tuple[int, ...]:
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if found[0] < 10:
        raise argparse.ArgumentTypeError("at least 10 nodes, so that each half can serve")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 and 100 nodes only")
    parser.add_argument("--nodes", type=sizes, help="sizes of the meshes, with commas between")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gc.disable()  # millions of small objects live long, and nothing here is a cycle
    found = {}
    for size in options.nodes or (SIZES[:2] if options.quick else SIZES):
        found[size] = measure(size, options.seed)
        gc.collect()
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(figures(found), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, GenerationError) as error:
        sys.exit(f"it does not hold: {error}")
