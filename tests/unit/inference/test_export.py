"""What an export decides: groups, names, and whether a graph has the precision that was asked."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from inference.store import export
from inference.store.errors import StoreError
from inference.store.export import (
    INSTALL,
    Matrix,
    check_installed,
    check_precision,
    check_source,
    default_name,
    export_model,
    group_size,
    matrices,
)
from inference.store.store import ModelStore
from mesh.cli.exits import CommandError, Exit
from mesh.cli.main import main
from mesh.cli.model import model as model_command
from mesh.config import NodeConfig


def product(element: str, channels: int = 64, name: str = "layer") -> Matrix:
    return Matrix(name, "product", element, channels)


def stored(values: np.ndarray[Any, Any]) -> ov.Node:
    """A weight in the forms that exporters write: as it is, converted, or in scaled groups."""
    if values.dtype == np.float32:
        return ops.constant(values)
    if values.dtype == np.float16:
        return ops.convert(ops.constant(values), "f32")
    rows, columns = values.shape
    grouped = ops.convert(ops.constant(values.reshape(rows, columns // 4, 4)), "f32")
    zero = ops.convert(ops.constant(np.ones((rows, columns // 4, 1), np.uint8)), "f32")
    scale = ops.constant(np.ones((rows, columns // 4, 1), np.float32))
    scaled = ops.multiply(ops.subtract(grouped, zero), scale)
    return ops.reshape(scaled, ops.constant(np.array(values.shape)), False)


def language_model(table: type, middle: type, head: type) -> ov.Model:
    """Embedding, one product, a rotation by a vector (no matrix), a head behind which is a tanh."""
    ids = ops.parameter([-1, -1], np.int64)
    ids.output(0).set_names({"input_ids"})
    positions = ops.parameter([1, 1, 4], np.float32)
    angles = ops.matmul(ops.constant(np.ones((1, 8, 1), np.float32)), positions, False, False)
    tokens = ops.convert(ids, "i32")
    rows = ops.gather(stored(np.ones((32, 16), table)), tokens, ops.constant(np.int64(0)))
    inner = ops.matmul(rows, stored(np.ones((8, 16), middle)), False, True)
    logits = ops.tanh(ops.matmul(inner, stored(np.ones((8, 32), head)), False, False))
    return ov.Model([logits, angles], [ids, positions])


def test_matrices_are_found_in_every_form_with_their_channels() -> None:
    found = matrices(language_model(np.float32, np.uint8, np.float16))
    assert [(m.role, m.element, m.channels) for m in found] == [
        ("table", "f32", 16),
        ("product", "u8", 16),
        ("head", "f16", 8),
    ]


@pytest.mark.parametrize(
    ("channels", "size"),
    [((4096, 11008), 128), ((576, 1536), 64), ((896, 4864), 128), ((96,), 32), ((16, 48), 16)],
)
def test_the_group_divides_all_channels(channels: tuple[int, ...], size: int) -> None:
    assert group_size(product("f16", count) for count in channels) == size


def test_groups_are_for_what_becomes_int4_only() -> None:
    assert group_size([product("f16", 256), Matrix("head", "head", "f16", 100)]) == 128
    with pytest.raises(StoreError, match="has 100: export it as int8"):
        group_size([product("f16", 256), product("f16", 100)])


@pytest.mark.parametrize(
    ("kinds", "good"),
    [
        ((np.float16, np.float16, np.float16), {"fp16"}),
        ((np.uint8, np.uint8, np.int8), {"int8"}),
        ((np.float16, np.uint8, np.uint8), set()),
        ((np.uint8, np.float16, np.uint8), set()),
        ((np.uint8, np.uint8, np.float16), set()),
        ((np.float32, np.float32, np.float32), set()),
    ],
)
def test_a_matrix_left_as_it_was_fails_the_export(
    kinds: tuple[type, type, type], good: set[str]
) -> None:
    found = matrices(language_model(*kinds))
    for weights in ("int4", "int8", "fp16"):
        if weights in good:
            check_precision(found, weights)
        else:
            with pytest.raises(StoreError, match=f"did not become {weights}"):
                check_precision(found, weights)


def test_int4_keeps_eight_bits_at_both_ends_only() -> None:
    ends = [Matrix("table", "table", "u8", 64), Matrix("head", "head", "i8", 64)]
    check_precision([*ends, product("u4"), product("i4")], "int4")
    with pytest.raises(StoreError, match=r"1 of 4 .* int4: odd one is u8"):
        check_precision([*ends, product("u4"), product("u8", name="odd one")], "int4")
    with pytest.raises(StoreError, match="cannot be checked"):
        check_precision(ends, "int4")


def test_names_follow_from_the_source(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    assert default_name(str(folder), "int8") == "My-Model-int8"
    assert default_name(f"{folder}/", "int8") == "My-Model-int8"
    assert default_name("owner/Model-7B", "int4") == "Model-7B-int4"


@pytest.mark.parametrize("source", ["", "../no/such", "a/b/c", "-rf", "https://host/model"])
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(StoreError, match="neither a folder nor the name"):
        check_source(source)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no config\.json"):
        check_source(str(tmp_path))


def test_what_is_missing_is_named_with_the_command_that_installs_it() -> None:
    check_installed(("json", "inference.store"))
    for missing in ("no_such_module", "no_such_package.part"):
        with pytest.raises(StoreError, match=missing) as caught:
            check_installed(("json", missing))
        assert INSTALL in str(caught.value)


def test_the_command_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "_NEEDED", ("no_such_module",))
    folders = ["--home", str(tmp_path), "--models", str(tmp_path / "models")]
    code = main(["model", *folders, "export", "owner/model", "--weights", "int4"])
    assert code == Exit.MODEL
    assert INSTALL in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_name_that_is_taken_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_NEEDED", ())
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreError, match="already has a model taken"):
        export_model(ModelStore(tmp_path), "owner/model", "int4", "taken")
    options = argparse.Namespace(
        action="export", source="owner/model", weights="int4", name="bad//name"
    )
    with pytest.raises(CommandError, match="cannot be a model's name"):
        model_command(NodeConfig(home=tmp_path, models=tmp_path), options)
