from __future__ import annotations

from pathlib import Path

import pytest

from mesh.config import ConfigError, NodeConfig, StageRange, load_config


def test_flags_win_over_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'device = "GPU"\nslots = 3\nmdns = false\npeer = ["/ip4/10.0.0.1/udp/1/quic-v1"]\n'
    )
    environment = {"MESHNODE_SLOTS": "5", "MESHNODE_DEVICE": "NPU", "MESHNODE_MODEL": "a,b"}
    config = load_config({"home": tmp_path, "device": "CPU", "model": None}, environment)
    assert (config.device, config.slots, config.mdns) == ("CPU", 5, False)
    assert config.model == ("a", "b")
    assert config.peer == ("/ip4/10.0.0.1/udp/1/quic-v1",)


def test_home_can_come_from_the_environment(tmp_path: Path) -> None:
    config = load_config({}, {"MESHNODE_HOME": str(tmp_path)})
    assert config.home == tmp_path
    assert config.certificate_path == tmp_path / "node.pem"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("slotz = 3", "slotz"),
        ("slots = 0", "slots"),
        ("slots = [", "config.toml"),
        ('log = "nonsense"', "'log'.*'debug', 'info', 'warning' or 'error'"),
        ('api_key = "short"', "api_key"),
        ('home = "/elsewhere"', "home cannot be set"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_config({"home": tmp_path}, {})


@pytest.mark.parametrize("text", ["m", "m:3", "m:3-", "m:5-5", "m:7-3", ":0-3", "m:-1-3", "m:a-b"])
def test_impossible_stage_ranges_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="stage"):
        load_config({"home": tmp_path, "stage": [text]}, {})


def test_a_stage_range_is_half_open() -> None:
    assert StageRange.parse("org/model:v2:0-15") == StageRange(
        model="org/model:v2", first=0, last=15
    )
    assert NodeConfig(stage=("m:0-2", "m:2-4")).stage[1].first == 2
