"""What the flags of `meshnode` accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.cli.main import main


@pytest.mark.parametrize("inner", [True, False])
def test_models_may_stand_before_or_after_the_action(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inner: bool
) -> None:
    where = ["--models", str(tmp_path / "elsewhere")]
    arguments = ["rm", "some", *where] if inner else [*where, "rm", "some"]
    assert main(["model", *arguments]) == 5
    assert f"no model some in {tmp_path / 'elsewhere'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "m", "--max-nodes", "0"], "--max-nodes: '0' is no whole number from 1"),
        (["serve", "m", "--replicas", "-1"], "--replicas: '-1' is no"),
        (["serve", "m", "--replicas", "many"], "--replicas: 'many' is no"),
        (["serve", "m", "--context", "9" * 30], "--context"),
        (["wait", "--timeout", "nan"], "--timeout: 'nan' is no"),
    ],
)
def test_numbers_that_make_no_sense_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_log_level_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--home", str(tmp_path), "--log", "nonsense"]) == 2
    assert "'debug', 'info', 'warning' or 'error'" in capsys.readouterr().err
    assert main(["status", "--home", str(tmp_path), "--log", "WARNING"]) == 6


def test_a_store_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["model", "pull", "smollm2-135m-instruct", "--models", str(file / "store")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("meshnode: [Errno ")
