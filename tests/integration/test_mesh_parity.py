"""Chains of real node processes say what the uncut model says, token by token."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from inference.generation import SamplingParams
from inference.store.manifest import ModelManifest
from inference.tokenizer import Tokenizer

CUTS = {2: (0, 11, 30), 3: (0, 4, 21, 30), 5: (0, 1, 9, 14, 27, 30)}


@pytest.mark.slow
@pytest.mark.parametrize("bounds", CUTS.values(), ids=map(str, CUTS))
def test_parity(
    network: Any, demo_model: ModelManifest, reference: Any, bounds: tuple[int, ...]
) -> None:
    network.environment["MESHNODE_MODELS"] = str(demo_model.path.parent)
    (head, flags), *others = [
        (f"{len(bounds) - 1}-{first}", ("--stage", f"{demo_model.name}:{first}-{last}"))
        for first, last in itertools.pairwise(bounds)
    ]
    nodes = [network.start(head, *flags)]
    nodes += network.start_all(dict(others), peers=(nodes[0],))
    decode = Tokenizer(demo_model).decode

    def ask(number: int, count: int, sampling: SamplingParams) -> str:
        body = {
            "model": demo_model.name,
            "prompt": reference.prompts[number],
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        response = httpx2.post(f"{nodes[-1].api}/v1/completions", json=body, timeout=240)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == count
        return str(answer["choices"][0]["text"])

    greedy, tokens = reference.greedy_params, reference.tokens
    expected = [decode(ids) for ids in (*reference.greedy, *reference.seeded)]
    wanted = [(number, tokens, greedy) for number in range(len(reference.prompts))]
    wanted += [
        (number, reference.seeded_tokens, sampling)
        for number, sampling in enumerate(reference.seeded_params)
    ]
    try:
        done = nodes[-1].cli("wait", "--model", demo_model.name, "--timeout", "30")
        assert done.returncode == 0, done.stderr
        assert [ask(*wanted[0]), ask(*wanted[-1])] == [expected[0], expected[-1]]
        # Sixteen at once: each that ends makes room for the next, so they join and leave.
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda each: ask(*each), wanted)) == expected
    finally:
        for node in nodes:
            node.stop()
