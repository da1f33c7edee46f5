"""Speeds that are kept: per layer, the head counted, noise ignored, the disk not trusted."""

from __future__ import annotations

import pytest

from mesh.gossip.advert import Holding
from mesh.routing.placement.facts import ModelShape
from mesh.speeds import Speeds, Surroundings

HERE = Surroundings(device="GPU", made_with="Arc | driver 1 | openvino 2026.2")
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
        device="GPU",
        ready=True,
        slots=4,
        queue=4,
        prefill_seconds=prefill,
        decode_seconds=decode,
    )


def test_the_head_counts_as_the_layers_it_weighs(tmp_path):
    speeds = Speeds(tmp_path / "speeds.json", HERE)
    assert speeds.rows == ()
    assert speeds.learn(holding(5, 10, 0.07), MODEL)
    assert speeds.rows[0].decode == pytest.approx(0.01)  # five layers and a head as heavy as two
    assert speeds.rows[0].prefill == pytest.approx(0.02)
    assert speeds.rows[0].device == "GPU"


def test_noise_says_nothing_and_outliers_count_half(tmp_path):
    speeds = Speeds(tmp_path / "speeds.json", HERE)
    speeds.learn(holding(0, 5, 0.05), MODEL)
    assert not speeds.learn(holding(0, 5, 0.055), MODEL)
    assert speeds.learn(holding(0, 5, 0.20), MODEL)
    assert speeds.rows[0].decode == pytest.approx(0.02)


@pytest.mark.parametrize(
    "other",
    [
        Surroundings(device="CPU", made_with=HERE.made_with),
        Surroundings(device="GPU", made_with="Arc | driver 2 | openvino 2026.2"),
    ],
)
def test_they_count_for_the_same_model_device_and_driver_only(tmp_path, other):
    path = tmp_path / "speeds.json"
    here = Speeds(path, HERE)
    here.learn(holding(0, 5, 0.05), MODEL)
    here.learn_rates(9e9, 8e10)
    again = Speeds(path, HERE)
    assert again.rows[0].decode == pytest.approx(0.01)
    assert again.rates.decode == 9 * 10**9 and again.rates.prefill == 8 * 10**10
    elsewhere = Speeds(path, other)
    assert elsewhere.rows == () and elsewhere.rates is None
    elsewhere.learn(holding(0, 5, 0.5), MODEL)
    elsewhere.learn_rates(1e9, 1e10)
    # Both are kept: a driver may be taken back, a device chosen again.
    assert Speeds(path, HERE).rows[0].decode == pytest.approx(0.01)
    assert Speeds(path, other).rows[0].decode == pytest.approx(0.1)
    assert Speeds(path, HERE).rates.decode == 9 * 10**9


def test_what_is_on_the_disk_is_not_trusted(tmp_path):
    path = tmp_path / "speeds.json"
    bad = '{"speeds": [{"digest": "x", "on": {"device": "GPU", "made_with": ""}}]}'
    for broken in ("", "[]]", "[1]", bad, '{"speeds": 5}', "{" * 100_000):
        path.write_text(broken)
        assert Speeds(path, HERE).rows == ()
