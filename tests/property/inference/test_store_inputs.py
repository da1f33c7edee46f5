"""Whatever is in a model's files, importing it succeeds or raises StoreError; nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inference.store.errors import StoreError
from inference.store.ir import inspect
from inference.store.manifest import ModelManifest
from inference.store.store import OPTIONAL, ModelStore

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
fields = st.sampled_from(
    ["model_type", "num_hidden_layers", "hidden_size", "max_position_embeddings", "vocab_size",
     "eos_token_id", "text_config", "chat_template", "n_layer"]
)  # fmt: skip
GOOD = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
}


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=300), at=st.floats(0, 1), cut=st.integers(0, 300))
def test_graphs_with_anything_in_them(
    demo_model: ModelManifest,
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    at: float,
    cut: int,
) -> None:
    original = demo_model.file("openvino_tokenizer.xml").read_bytes()
    start = int(at * len(original))
    path = tmp_path_factory.getbasetemp() / "spoilt.xml"
    path.write_bytes(original[:start] + data + original[start + cut :])
    try:
        graph = inspect(path, weights=100, extensions=True)
    except StoreError:
        return
    assert graph.operations <= len(original)


@settings(deadline=None, max_examples=60)
@given(
    config=st.one_of(
        json_values,
        st.dictionaries(fields, json_values, max_size=5).map(lambda changes: GOOD | changes),
    ),
    other=st.sampled_from([name for name in OPTIONAL if name.endswith(".json")]),
    value=json_values,
)
@example(config=GOOD, other="chat_template.json", value={"chat_template": "\ud800"})
@example(config=GOOD | {"model_type": "\ud800"}, other="vocab.json", value={})
@example(config=GOOD, other="vocab.json", value={})
def test_configurations_with_anything_in_them(
    tmp_path_factory: pytest.TempPathFactory, config: object, other: str, value: object
) -> None:
    root = tmp_path_factory.mktemp("configured")
    source = root / "source"
    source.mkdir()
    xml = (
        '<net version="11"><layers><layer type="Parameter" version="opset1"><output>'
        '<port names="input_ids"/></output></layer><layer type="ReadValue" version="opset6">'
        '<data variable_id="v" variable_shape="?,2,?,4"/></layer></layers></net>'
    )
    for part in ("model", "tokenizer", "detokenizer"):
        (source / f"openvino_{part}.xml").write_text(xml)
        (source / f"openvino_{part}.bin").write_bytes(b"x")
    (source / other).write_text(json.dumps(value))
    if other != "config.json":
        (source / "config.json").write_text(json.dumps(config))
    store = ModelStore(root / "models")
    try:
        model = store.import_dir(source, "tiny")
    except StoreError:
        assert store.list() == []
    else:
        assert store.get("tiny") == model
    finally:
        shutil.rmtree(root)
