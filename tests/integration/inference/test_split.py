"""Cutting: bytes that do not depend on who cuts, own weights only, reasons for refusing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest
from openvino import opset13 as ops

from inference.split import SplitError, read_splittable

CUT_ELSEWHERE = """
import sys
from pathlib import Path
from openvino import opset13
junk = [opset13.constant(i) for i in range(int(sys.argv[1]))]  # moves the runtime's name counter
from inference.split import read_splittable
whole = read_splittable(Path(sys.argv[2]))
for first, last in ((2, 3), (0, 2), (1, 3)):
    print(whole.write(first, last, Path(sys.argv[3], f"{first}-{last}")).digest)
"""


@pytest.mark.parametrize("architecture", ["llama", "bloom", "gpt_oss"])
def test_two_processes_write_the_same_bytes(
    architecture: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    digests = []
    for number in range(2):
        target = tmp_path / str(number)
        command = [
            sys.executable,
            "-c",
            CUT_ELSEWHERE,
            str(number * 777),
            zoo(architecture),
            target,
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        digests.append(run.stdout.split())
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    for path in (tmp_path / "0").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "1" / path.relative_to(tmp_path / "0")).read_bytes()


def test_a_stage_holds_its_own_weights_only(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    whole = read_splittable(zoo("llama"))
    size = zoo("llama").with_suffix(".bin").stat().st_size
    middle = whole.write(1, 2, tmp_path / "middle")
    head = whole.write(2, 3, tmp_path / "head")
    first = whole.write(0, 1, tmp_path / "first")
    weights = [stage.weights.stat().st_size for stage in (first, middle, head)]
    # Only small tables (positions) are in several stages.
    assert size <= sum(weights) < size * 1.02
    assert weights[1] < size / 4
    assert (first.layers, first.hidden) == (3, 32)
    with pytest.raises(SplitError, match="layers 2-4 of a model with 3") as refused:
        whole.write(2, 4, tmp_path / "no")
    assert refused.value.reason == "bad_range"
    assert not (tmp_path / "no").exists()


def test_runtime_information_is_kept(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    model = ov.Core().read_model(zoo("llama"))
    model.set_rt_info("8", ["runtime_options", "ACTIVATIONS_SCALE_FACTOR"])
    source = tmp_path / "source.xml"
    ov.save_model(model, source, compress_to_fp16=False)
    stage = read_splittable(source).write(1, 3, tmp_path / "stage")
    saved = ov.Core().read_model(stage.model)
    for path, value in (
        (["runtime_options", "ACTIVATIONS_SCALE_FACTOR"], "8"),
        (["meshnode_stage", "first"], "1"),
        (["meshnode_stage", "last"], "3"),
        (["meshnode_stage", "layers"], "3"),
    ):
        assert saved.get_rt_info(path).astype(str) == value


def test_names_play_no_part(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    model = ov.Core().read_model(zoo("qwen2"))
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Add":
            node.set_friendly_name("the same")
    source = tmp_path / "source.xml"
    ov.save_model(model, source, compress_to_fp16=False)
    whole = read_splittable(source)
    assert whole.layers == 3
    assert {port.get_any_name() for port in whole.cut(1, 2).inputs} >= {"hidden_states"}


def write(path: Path, result: ov.Node, parameters: list[ov.Node], sinks: list[ov.Node]) -> Path:
    model = ov.Model([ops.result(result)], sinks, parameters, "m")
    ov.save_model(model, path, compress_to_fp16=False)
    return path


def test_models_that_are_none_are_refused(tmp_path: Path) -> None:
    tokens = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    tokens.output(0).set_names({"input_ids"})
    table = ops.constant([[0.5] * 4] * 9, ov.Type.f32)
    embedded = ops.gather(table, tokens, ops.constant(0))
    with pytest.raises(SplitError, match="keeps no state") as refused:
        read_splittable(write(tmp_path / "stateless.xml", embedded, [tokens], []))
    assert refused.value.reason == "not_stateful"
    pixels = ops.parameter([1, 3, 8, 8], ov.Type.f32, name="pixels")
    with pytest.raises(SplitError, match="not a text model") as refused:
        read_splittable(write(tmp_path / "image.xml", ops.relu(pixels), [pixels], []))
    assert refused.value.reason == "no_token_input"
