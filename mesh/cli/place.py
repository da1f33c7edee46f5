"""`meshnode serve`, `plan` and `explain`: models that the mesh lays out by itself."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from inference.store.errors import StoreError
from inference.store.store import ModelStore
from mesh.cli.exits import CommandError, Exit
from mesh.cli.local import local_node
from mesh.cli.model import pull_with_progress
from mesh.cli.terminal import printable
from mesh.config import NodeConfig

_NOT_HERE = {404: Exit.MODEL}  # by HTTP status


def serve(config: NodeConfig, options: argparse.Namespace) -> int:
    """Fetch the model to this machine if need be, and publish that it is wanted."""
    with local_node(config.home) as node:
        if options.replicas != 0:
            try:
                pull_with_progress(ModelStore(config.models), options.name)
            except (StoreError, OSError) as error:
                raise CommandError(Exit.MODEL, str(error)) from error
        wanted: dict[str, Any] = {
            "model": options.name,
            "replicas": options.replicas,
            "max_nodes": options.max_nodes,
            "context": options.context,
            "sessions": options.sessions,
        }
        given = {key: value for key, value in wanted.items() if value is not None}
        answer = node.post("/control/serve", json.dumps(given).encode(), _NOT_HERE)
    if options.replicas == 0:
        print(f"{options.name} is not served any more")
        return Exit.OK
    return _print(answer, as_json=options.json)


def plan(config: NodeConfig, options: argparse.Namespace) -> int:
    query = {"what_if": options.what_if} if options.what_if else {}
    if options.name:
        query["model"] = options.name
    with local_node(config.home) as node:
        answer = node.get("/control/plan", {400: Exit.USAGE, **_NOT_HERE}, **query)
    return _print(answer, as_json=options.json)


def explain(config: NodeConfig, options: argparse.Namespace) -> int:
    with local_node(config.home) as node:
        answer = node.get("/control/explain", response=options.response)
    if options.json:
        json.dump(answer, sys.stdout, indent=2)
        print()
        return Exit.OK
    took = answer["timings_ms"]
    total = f"{took['total']:.0f} ms" if "total" in took else "not finished"
    print(f"{answer['produced_tokens']} tokens, {total}")
    for route in answer["routes"]:
        guess = route["predicted"]
        print(
            f"{route['kind']}: {printable(route['reason'])}\n"
            f"  predicted for {guess['tokens']} tokens: wait {guess['wait_ms']:.0f} ms, prefill "
            f"{guess['prefill_ms']:.0f}, decode {guess['decode_ms']:.0f}, links "
            f"{guess['link_ms']:.0f}"
        )
        if took:
            print(
                f"  actual: wait {took['queue']:.0f} ms, prefill {took['prefill']:.0f}, decode "
                f"{took['decode']:.0f}"
            )
        for stage in route["stages"]:
            first, last = stage["layers"]
            actual = stage["actual_ms"]
            measured = "" if actual is None else f", actual {actual:.0f}"
            hop = stage["onward_actual_ms"]
            took_on = "" if hop is None else f", actual about {hop:.1f}"
            print(
                f"    {printable(stage['name']):20} layers {f'{first}-{last}':8} predicted "
                f"{stage['predicted_ms']:.0f} ms{measured}; each token onward predicted "
                f"{stage['onward_predicted_ms']:.1f} ms{took_on}"
            )
        if route["between_stages_actual_ms"] is not None:
            print(
                f"    between stages: predicted {route['between_stages_predicted_ms'] or 0:.0f} "
                f"ms, actual {route['between_stages_actual_ms']:.0f}"
            )
        for other in route["considered"][1:]:
            names = ", ".join(printable(name) for name in other["nodes"])
            print(f"  instead of {names}: {other['total_ms']:.0f} ms")
        for other in route["passed_over"]:
            print(f"  not {printable(other['node'])}: {printable(other['why'])}")
    return Exit.OK


def _print(answer: Any, *, as_json: bool) -> int:
    if as_json:
        json.dump(answer, sys.stdout, indent=2)
        print()
        return Exit.OK
    if not answer["models"]:
        print("nothing is wanted; `meshnode serve MODEL` changes that")
    for model in answer["models"]:
        print(f"{printable(model['model'])}: {model['layers']} layers", end="")
        print(f", KV for {model['sessions']} sessions of {model['context']} tokens")
        for chain in model["chains"]:
            kind = "replica" if len(chain["stages"]) == 1 else f"chain of {len(chain['stages'])}"
            state = "" if chain["loaded"] else ", not loaded yet"
            guessed = any(stage["speed"] == "estimated" for stage in chain["stages"])
            estimate = " by estimate" if guessed else ""
            print(
                f"  {kind}: {chain['tokens_per_second']:.1f} tokens/s{estimate}, first token of "
                f"{answer['prompt_tokens']} after {chain['first_token_ms']:.0f} ms{state}"
            )
            for stage in chain["stages"]:
                _print_stage(stage)
        if model["spares"]:
            print("  spare stages:")
        for stage in model["spares"]:
            _print_stage(stage)
        for note in model["notes"]:
            print(f"  {printable(note)}")
    return Exit.OK


def _print_stage(stage: dict[str, Any]) -> None:
    layers = f"{stage['first']}-{stage['last']}"
    mark = "" if stage["loaded"] else "  (not loaded)"
    print(
        f"    {printable(stage['name']):20} layers {layers:8} {stage['bytes'] / 1e6:8.0f} MB{mark}"
    )
