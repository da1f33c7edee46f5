"""One model over three nodes, asked at a fourth that holds none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inference.store.manifest import ModelManifest

pytestmark = pytest.mark.slow

RANGES = ("0-7", "7-19", "19-30")  # unequal, and 30 is not a multiple of any


@pytest.fixture(scope="module")
def entry(network: Any, demo_model: ModelManifest) -> Iterator[Any]:
    network.environment["MESHNODE_MODELS"] = str(demo_model.path.parent)
    stages = {
        f"stage-{number}": ("--stage", f"{demo_model.name}:{layers}")
        for number, layers in enumerate(RANGES)
    }
    first = network.start("stage-0", *stages.pop("stage-0"))
    *_, entry = network.start_all({**stages, "entry": ()}, peers=(first,))
    done = entry.cli("wait", "--peers", "3", "--model", demo_model.name, "--timeout", "30")
    assert done.returncode == 0, done.stderr
    yield entry


def test_the_openai_client_streams_from_a_node_without_a_stage(
    entry: Any, demo_model: ModelManifest
) -> None:
    client = openai.OpenAI(base_url=f"{entry.api}/v1", api_key="unused", max_retries=0)
    stream = client.chat.completions.create(
        model=demo_model.name,
        messages=[{"role": "user", "content": "Name three fruits."}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    pieces = [c.choices[0].delta.content for c in stream if c.choices]
    assert sum(bool(piece) for piece in pieces) > 5


def test_the_receipt_names_every_stage(
    network: Any, entry: Any, demo_model: ModelManifest, tmp_path: Path
) -> None:
    saved = tmp_path / "response.sse"
    done = entry.cli("chat", "Say hello.", "--max-tokens", "12", "--save", str(saved))
    assert done.returncode == 0, done.stderr
    verified = network.run("meshnode", "verify", saved, "--ca", network.ca_pem)
    assert verified.returncode == 0, verified.stderr
    for number, layers in enumerate(RANGES):
        assert f"layers {layers}: {network.nodes[f'stage-{number}'].peer}" in verified.stdout


def test_stages_are_listed_and_make_one_chain(entry: Any, demo_model: ModelManifest) -> None:
    (listed,) = json.loads(entry.cli("models", "--json").stdout)
    assert (listed["replicas"], listed["chains"], listed["ready"]) == (0, 1, "yes")


def test_without_one_of_its_stages_there_is_no_model(
    network: Any, entry: Any, demo_model: ModelManifest
) -> None:
    network.nodes["stage-1"].stop()
    response = httpx2.post(
        f"{entry.api}/v1/completions", json={"model": demo_model.name, "prompt": "x"}, timeout=60
    )
    assert response.status_code in (404, 503), response.text
    assert response.json()["error"]["message"]
