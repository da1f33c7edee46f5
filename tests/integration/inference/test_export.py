"""The real export of a tiny model with random weights. Needs the extra ``export``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from inference.paged import StageConfig
from inference.stage import Part, Stage, StepBatch
from inference.store.errors import StoreError
from inference.store.export import Weights, export_model, matrices
from inference.store.store import ModelStore
from inference.tokenizer import Tokenizer

HIDDEN = 64
VOCABULARY = 300  # the 256 bytes and what follows


def _installed() -> bool:
    try:
        return all(
            importlib.util.find_spec(name) is not None
            for name in ("torch", "transformers", "optimum.intel", "nncf")
        )
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _installed(), reason="the extra 'export' is not installed"),
]


def write_original(folder: Path, hidden: int = HIDDEN) -> Path:
    """A llama with two layers and random weights, as transformers writes it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(tmp_path_factory.mktemp("original") / "tiny-llama")


@pytest.mark.parametrize(
    ("weights", "products", "others"),
    [("fp16", {"f16"}, {"f16"}), ("int8", {"u8"}, {"u8"}), ("int4", {"u4"}, {"u8"})],
)
def test_weights_have_the_precision_that_was_asked_and_the_model_runs(
    original: Path, tmp_path: Path, weights: Weights, products: set[str], others: set[str]
) -> None:
    store = ModelStore(tmp_path)
    manifest = export_model(store, str(original), weights)
    assert manifest.name == f"tiny-llama-{weights}"
    assert (manifest.architecture, manifest.layers, manifest.hidden_size) == ("llama", 2, HIDDEN)
    assert store.get(manifest.name) == manifest
    assert not list((tmp_path / ".incoming").iterdir())
    found = matrices(ov.Core().read_model(manifest.file("openvino_model.xml")))
    assert {m.element for m in found if m.role == "product"} == products
    assert {m.element for m in found if m.role != "product"} == others
    assert len([m for m in found if m.role == "product"]) == 2 * 7

    ids = Tokenizer(manifest).encode("abc", special=False)
    assert len(ids) == 3
    stage = Stage.read(
        manifest.file("openvino_model.xml"),
        StageConfig(kv_bytes=1 << 24),
        context_length=manifest.context_length,
    )
    stage.open(1)
    logits = stage.step(StepBatch([Part(1, 0, 3)], np.array(ids, np.int64), [2]))
    assert logits.shape == (1, VOCABULARY) and np.isfinite(logits).all()


def test_int4_of_a_model_whose_rows_no_group_divides(tmp_path: Path) -> None:
    source = write_original(tmp_path / "odd", hidden=40)
    store = ModelStore(tmp_path / "store")
    with pytest.raises(StoreError, match="one of the model's matrices has 40: export it as int8"):
        export_model(store, str(source), "int4")
    assert store.list() == [] and not list((store.root / ".incoming").iterdir())


def test_weights_that_the_libraries_cannot_read(original: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    store = ModelStore(tmp_path / "store")
    with pytest.raises(StoreError, match="cannot export"):
        export_model(store, str(source), "fp16")
    assert store.list() == []
