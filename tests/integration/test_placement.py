"""Nodes that hold nothing are told what is wanted, and arrange themselves."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from inference.store.manifest import ModelManifest

pytestmark = pytest.mark.slow

MEMORY = "110MB"  # each: the model with this context needs three of them
SERVE = ("--context", "1024", "--sessions", "2")
PROMPT = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def nodes(network: Any, demo_model: ModelManifest) -> Iterator[list[Any]]:
    network.environment["MESHNODE_MODELS"] = str(demo_model.path.parent)
    # Only the first one's machine has the model.
    first = network.start("desk-0", "--memory", MEMORY)
    others = {
        f"desk-{n}": ("--memory", MEMORY, "--models", str(network.folder / f"models-{n}"))
        for n in (1, 2, 3)
    }
    started = [first, *network.start_all(others, peers=(first,))]
    done = started[0].cli("wait", "--peers", "3", "--timeout", "30")
    assert done.returncode == 0, done.stderr
    yield started


def plan(node: Any) -> dict[str, Any]:
    models = httpx2.get(f"{node.api}/v1/mesh/plan", timeout=30).json()["models"]
    return models[0] if models else {"chains": [], "spares": []}


def eventually(holds: Callable[[], Any]) -> Any:
    """A plan comes from another process: there is no event to wait for here."""
    end = time.monotonic() + 120
    while not (found := holds()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.2)
    return found


def loaded(node: Any) -> list[str]:
    """Names of the nodes of the first chain, once it is loaded."""
    chains = [chain for chain in plan(node)["chains"] if chain["loaded"]]
    return [stage["name"] for stage in chains[0]["stages"]] if chains else []


def listed(node: Any) -> list[str]:
    """The models that clients of this node find."""
    return [model["id"] for model in httpx2.get(f"{node.api}/v1/models", timeout=30).json()["data"]]


def ask(node: Any, model: str) -> str:
    """As soon as this node knows who has the model, which may be later than others know."""
    eventually(lambda: model in listed(node))
    text: str = complete(node, model)["choices"][0]["text"]
    return text


def complete(node: Any, model: str, **more: Any) -> dict[str, Any]:
    response = httpx2.post(
        f"{node.api}/v1/completions", json={"model": model, **PROMPT, **more}, timeout=240
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_explanation(node: Any, response: dict[str, Any]) -> None:
    done = node.cli("explain", response["id"], "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["produced_tokens"] == response["usage"]["completion_tokens"]
    route = told["routes"][0]
    assert route["kind"] == "chain" and route["reason"]
    layers = [stage["layers"] for stage in route["stages"]]
    assert layers[0][0] == 0 and layers[-1][1] == 30 and len(layers) == 3
    assert all(stage["predicted_ms"] > 0 for stage in route["stages"])
    assert all(stage["actual_ms"] > 0 for stage in route["stages"])
    assert route["between_stages_actual_ms"] > 0
    assert all(stage["onward_actual_ms"] > 0 for stage in route["stages"])
    shown = node.cli("explain", response["id"])
    assert "predicted" in shown.stdout and route["stages"][0]["name"] in shown.stdout
    assert node.cli("explain", "chatcmpl-nothing").returncode == 1


def test_a_chain_forms_is_mended_and_takes_in_a_newcomer(
    network: Any, nodes: list[Any], demo_model: ModelManifest
) -> None:
    done = nodes[0].cli("serve", demo_model.name, *SERVE)
    assert done.returncode == 0, done.stderr
    assert "chain of 3" in done.stdout
    first = eventually(lambda: loaded(nodes[1]))
    assert len(first) == 3
    assert nodes[2].cli("wait", "--model", demo_model.name, "--timeout", "50").returncode == 0
    text = ask(nodes[3], demo_model.name)
    assert "Paris" in text
    check_explanation(nodes[3], complete(nodes[3], demo_model.name))
    taker = next(n for n in nodes if n.name in first and n.name != "desk-0")
    assert any("fetching layers" in line for line in taker.log), "".join(taker.log)
    # The fourth holds a copy of one of the stages.
    assert eventually(lambda: [s for s in plan(nodes[1])["spares"] if s["loaded"]])

    lost = next(n for n in nodes if n.name in first and n.name != "desk-0")
    left = [n for n in nodes if n is not lost]
    lost.stop(signal.SIGKILL)

    def mended() -> bool:
        names = loaded(left[1])
        return len(names) == 3 and lost.name not in names

    eventually(mended)
    assert ask(left[1], demo_model.name) == text

    fresh = network.start("desk-new", "--memory", MEMORY, peers=(left[0],))
    eventually(
        lambda: (
            "desk-new"
            in [s["name"] for s in plan(left[0])["spares"] if s["loaded"]] + loaded(left[0])
        )
    )
    assert ask(fresh, demo_model.name) == text


def test_what_if_and_taking_back(nodes: list[Any], demo_model: ModelManifest) -> None:
    node = next(n for n in nodes if n.process.poll() is None)
    done = node.cli("plan", demo_model.name, "--what-if", "add:4GB", "--json")
    assert done.returncode == 0, done.stderr
    model = json.loads(done.stdout)["models"][0]
    assert ["added-1"] in [[s["name"] for s in chain["stages"]] for chain in model["chains"]]
    assert node.cli("plan", "--what-if", "remove:nobody").returncode == 2
    eventually(lambda: demo_model.name in listed(node))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, node, demo_model.name, max_tokens=300, ignore_eos=True)
        eventually(lambda: busy(node))
        assert node.cli("serve", demo_model.name, "--replicas", "0").returncode == 0
        eventually(lambda: not listed(node))
        # What ran when the model was taken back has been finished on what was there.
        assert not running.done()
        assert running.result(240)["usage"]["completion_tokens"] == 300
    eventually(lambda: not holdings(node))


def holdings(node: Any) -> list[dict[str, Any]]:
    view = httpx2.get(f"{node.api}/v1/mesh/view", timeout=30).json()
    return [holding for one in view["nodes"] for holding in one["holdings"]]


def busy(node: Any) -> bool:
    return any(holding["active"] for holding in holdings(node))
