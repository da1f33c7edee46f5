"""Speeds that are kept: per layer, the head counted, noise ignored, the disk not trusted."""

from __future__ import annotations

import json

import pytest

from mesh.gossip.advert import Holding
from mesh.routing.placement.facts import ModelShape
from mesh.speeds import Speeds

MODEL = ModelShape("m", "ab" * 32, 10, 1000, 500, 2000, 0, 16, 64, 4096)


def holding(first, last, decode, prefill=0.1):
    return Holding(
        id=0,
        model="m",
        digest=MODEL.digest,
        kind="replica" if (first, last) == (0, 10) else "stage",
        first=first,
        last=last,
        layers=10,
        context_length=4096,
        device="CPU",
        ready=True,
        slots=4,
        queue=4,
        prefill_seconds=prefill,
        decode_seconds=decode,
    )


def test_the_head_counts_as_the_layers_it_weighs(tmp_path):
    speeds = Speeds(tmp_path / "speeds.json")
    assert speeds.rows == () and speeds.rates("CPU") == (None, None)
    assert speeds.learn(holding(5, 10, 0.07), MODEL)
    assert speeds.rows[0].decode == pytest.approx(0.01)  # five layers and a head as heavy as two
    assert speeds.rows[0].prefill == pytest.approx(0.02)
    assert speeds.rates("CPU") == (100_000, 50_000)


def test_noise_says_nothing_and_outliers_count_half(tmp_path):
    speeds = Speeds(tmp_path / "speeds.json")
    speeds.learn(holding(0, 5, 0.05), MODEL)
    assert not speeds.learn(holding(0, 5, 0.055), MODEL)
    assert speeds.learn(holding(0, 5, 0.20), MODEL)
    assert speeds.rows[0].decode == pytest.approx(0.02)


def test_they_are_there_after_a_restart_unless_the_machine_is_another(tmp_path):
    path = tmp_path / "speeds.json"
    Speeds(path).learn(holding(0, 5, 0.05), MODEL)
    assert Speeds(path).rows[0].decode == pytest.approx(0.01)
    known = json.loads(path.read_text())
    known[0]["made_with"] = "another processor"
    path.write_text(json.dumps(known))
    assert Speeds(path).rows == ()
    for broken in ("", "[]]", "[1]", '[{"digest": "x"}]', "{}"):
        path.write_text(broken)
        assert Speeds(path).rows == ()
