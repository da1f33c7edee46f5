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


def test_a_store_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["model", "pull", "smollm2-135m-instruct", "--models", str(file / "store")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("meshnode: [Errno ")
