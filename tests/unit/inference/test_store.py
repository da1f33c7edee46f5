"""What may become a model in the store, what is refused, and what several users of a store see."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

from inference.store import store as store_module
from inference.store.errors import ModelMissing, StoreError
from inference.store.manifest import ModelFile, ModelManifest, digest_of, read_manifest
from inference.store.store import ModelStore

STATES = "".join(
    f"""<layer id="{2 + at}" name="r{at}" type="ReadValue" version="opset6">
    <data variable_id="v{at}" variable_type="f32" variable_shape="?,2,?,16"/></layer>"""
    for at in range(4)
)
MODEL = f"""<?xml version="1.0"?>
<net name="m" version="11"><layers>
<layer id="0" name="p" type="Parameter" version="opset1"><data shape="?,?" element_type="i64"/>
<output><port id="0" precision="I64" names="input_ids"><dim>-1</dim></port></output></layer>
<layer id="1" name="c" type="Const" version="opset1">
<data element_type="u8" shape="8" offset="0" size="8"/></layer>
{STATES}
</layers><edges/><rt_info><info name="x" value="y"/></rt_info></net>"""
TOKENIZER = """<net name="t" version="11"><layers>
<layer id="0" name="s" type="BPETokenizer" version="extension"/></layers>
<rt_info><eos_token_id value="7"/><chat_template value="{{ messages }}"/></rt_info></net>"""
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "max_position_embeddings": 128,
    "vocab_size": 100,
    "eos_token_id": [3, 7],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for part, xml in (("model", MODEL), ("tokenizer", TOKENIZER), ("detokenizer", TOKENIZER)):
        (folder / f"openvino_{part}.xml").write_text(xml)
        (folder / f"openvino_{part}.bin").write_bytes(bytes(16))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "README.md").write_text("not part of the model")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_import_get_list_remove(store: ModelStore, source: Path) -> None:
    assert store.list() == []
    told: list[int] = []
    model = store.import_dir(source, "acme/tiny", lambda name, done, total: told.append(done))
    assert told[-1] == sum(file.size for file in model.files)
    assert (model.architecture, model.layers, model.context_length) == ("llama", 2, 128)
    assert (model.hidden_size, model.vocabulary_size) == (32, 100)
    assert model.kv_elements == 4 * 2 * 16  # two layers, keys and values, 2 heads of 16
    assert model.eos_token_ids == (3, 7)
    assert model.chat_template == "{{ messages }}"
    assert "README.md" not in {file.path for file in model.files}
    assert model.weight_bytes == 16
    assert store.get("acme/tiny") == model == store.list()[0]
    assert model.file("config.json").is_file()
    with pytest.raises(StoreError, match="no file README"):
        model.file("README.md")
    shutil.rmtree(source)  # a copy, not a reference
    assert read_manifest(model.path) == model
    store.remove("acme/tiny")
    assert store.list() == [] and not model.path.exists()
    assert not list((store.root / ".incoming").iterdir())
    with pytest.raises(ModelMissing, match="there: none"):
        store.get("acme/tiny")
    with pytest.raises(ModelMissing):
        store.remove("acme/tiny")


def test_the_digest_covers_content_and_nothing_else(store: ModelStore, source: Path) -> None:
    first = store.import_dir(source, "one")
    (source / "README.md").write_text("changed")
    assert store.import_dir(source, "two").digest == first.digest
    (source / "openvino_model.bin").write_bytes(bytes(15) + b"\1")
    assert store.import_dir(source, "three").digest != first.digest
    files = [ModelFile(path=name, size=1, sha256="0" * 64) for name in ("b", "a")]
    assert digest_of(files) == digest_of(files[::-1])


def test_the_same_again_is_fine_and_another_is_not(store: ModelStore, source: Path) -> None:
    model = store.import_dir(source, "tiny")
    assert store.import_dir(source, "tiny") == model
    (source / "openvino_model.bin").write_bytes(bytes(17))
    with pytest.raises(StoreError, match="already has another tiny"):
        store.import_dir(source, "tiny")
    assert store.get("tiny") == model


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/../b", "/etc", "a/b/c", "a\\b", ".hidden", "a--b", "a b", "x" * 200, "a/", "é"],
)
def test_names_that_could_leave_the_store(store: ModelStore, source: Path, name: str) -> None:
    with pytest.raises(StoreError, match="cannot be a model's name"):
        store.import_dir(source, name)
    with pytest.raises(StoreError):
        store.get(name)
    with pytest.raises(StoreError):
        store.remove(name)


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


XML_FLAWS = {
    "outside the .bin": ('size="8"', 'size="17"'),
    "lies outside": ('offset="0"', 'offset="-1"'),
    "not part of OpenVINO": ('type="Const" version="opset1"', 'type="Evil" version="extension"'),
    "document type": ('<net name="m"', '<!DOCTYPE net [<!ENTITY a "b">]><net name="m"'),
    "not an OpenVINO IR": ('version="11"', 'version="7"'),
    "is not XML": ("</net>", ""),
    "nested deeper": ("<edges/>", "<a>" * 100 + "</a>" * 100),
    "no input 'input_ids'": ("input_ids", "pixel_values"),
    "keeps no KV cache": ('variable_shape="?,2,?,16"', 'variable_shape="?,64"'),
    "no proper shape": ('variable_shape="?,2,?,16"', 'variable_shape="?,-2,?,16"'),
}


@pytest.mark.parametrize("message", XML_FLAWS)
def test_graphs_that_are_refused(store: ModelStore, source: Path, message: str) -> None:
    spoil(source / "openvino_model.xml", *XML_FLAWS[message])
    with pytest.raises(StoreError, match=message):
        store.import_dir(source, "tiny")
    assert store.list() == [] and not list((store.root / ".incoming").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "no usable layers"),
        ({"num_hidden_layers": True}, "no usable layers"),
        ({"num_hidden_layers": 1}, "says 1 layers, but the model keeps 4"),
        ({"num_hidden_layers": 10**9}, "layers: Input should be less"),
        ({"max_position_embeddings": "many"}, "no usable context length"),
        ({"vocab_size": -1}, "no usable vocabulary size"),
        ({"model_type": ["llama"]}, "does not name its architecture"),
        ({"model_type": "../x"}, "architecture: String should match"),
        ({"eos_token_id": "2"}, "end token that is not a token id"),
        ({"eos_token_id": [-1]}, "end token that is not a token id"),
    ],
)
def test_configurations_that_are_refused(
    store: ModelStore, source: Path, change: dict[str, object], message: str
) -> None:
    (source / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(StoreError, match=message):
        store.import_dir(source, "tiny")


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "[" * 100_000])
def test_configurations_that_are_no_json_object(store: ModelStore, source: Path, text: str) -> None:
    (source / "config.json").write_text(text)
    with pytest.raises(StoreError, match=r"config\.json"):
        store.import_dir(source, "tiny")


def test_nested_configurations_of_later_models(store: ModelStore, source: Path) -> None:
    (source / "config.json").write_text(
        json.dumps({"model_type": "outer", "text_config": CONFIG | {"model_type": "inner"}})
    )
    (source / "chat_template.jinja").write_text("from a file of its own")
    model = store.import_dir(source, "tiny")
    assert (model.architecture, model.layers) == ("inner", 2)
    assert model.chat_template == "from a file of its own"


def test_missing_and_empty_files(store: ModelStore, source: Path) -> None:
    (source / "openvino_tokenizer.bin").write_bytes(b"")
    with pytest.raises(StoreError, match="is empty"):
        store.import_dir(source, "tiny")
    (source / "openvino_tokenizer.bin").unlink()
    with pytest.raises(StoreError, match=r"has no openvino_tokenizer\.bin"):
        store.import_dir(source, "tiny")


@pytest.mark.skipif(sys.platform == "win32", reason="needs symbolic links and FIFOs")
def test_links_and_special_files(store: ModelStore, source: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    config = source / "tokenizer_config.json"
    config.symlink_to(secret)
    with pytest.raises(StoreError, match="leads out of the model's folder"):
        store.import_dir(source, "tiny")
    config.unlink()
    config.symlink_to("config.json")  # within the folder
    store.import_dir(source, "linked")
    config.unlink()
    config.mkdir()
    with pytest.raises(StoreError, match="not a regular file"):
        store.import_dir(source, "tiny")
    # As a hub cache lays it out.
    cache = tmp_path / "models--acme--tiny"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    config.rmdir()
    for at, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, cache / "blobs" / str(at))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(at)))
    store.import_dir(snapshot, "from-cache")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_pipe_does_not_block_the_import(store: ModelStore, source: Path) -> None:
    os.mkfifo(source / "merges.txt")
    with pytest.raises(StoreError, match="not a regular file"):
        store.import_dir(source, "tiny")


def test_absurd_sizes(store: ModelStore, source: Path) -> None:
    with (source / "config.json").open("r+b") as file:
        file.truncate(100 << 20)  # sparse
    with pytest.raises(StoreError, match=r"more than the .* that are sensible"):
        store.import_dir(source, "tiny")


def test_a_full_disk_is_noticed_before(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)._replace(free=10)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match="MB free"):
        store.import_dir(source, "tiny")


def test_damage_is_seen(store: ModelStore, source: Path) -> None:
    model = store.import_dir(source, "tiny")
    store.import_dir(source, "sound")
    model.file("openvino_model.bin").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"damaged .*5 bytes, not 16.*remove it"):
        store.get("tiny")
    assert [m.name for m in store.list()] == ["sound"]
    store.remove("tiny")
    store.import_dir(source, "tiny")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"layers": 2', '"layers": "2"'),
        ('"layers": 2', '"layers": 2, "extra": 1'),
        ('"path": "config.json"', '"path": "../config.json"'),
        ('"size": 16', '"size": 15'),
        ('"format": 1', '"format": 2'),
        ('"name": "tiny"', '"name": "../tiny"'),
        ("{", "[" * 100_000),
    ],
)
def test_manifests_are_checked(store: ModelStore, source: Path, old: str, new: str) -> None:
    model = store.import_dir(source, "tiny")
    path = model.path / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(StoreError, match="not a valid manifest"):
        store.get("tiny")


def test_a_manifest_survives_json(store: ModelStore, source: Path) -> None:
    model = store.import_dir(source, "tiny")
    fields = json.loads(model.model_dump_json())
    assert "path" not in fields
    assert ModelManifest(path=model.path, **fields) == model


def _import(root: Path, source: Path) -> None:
    ModelStore(root).import_dir(source, "tiny")


def test_processes_that_import_the_same_at_once(store: ModelStore, source: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_import, args=(store.root, source)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [m.name for m in store.list()] == ["tiny"]


def test_what_a_killed_process_left_is_swept(store: ModelStore, source: Path) -> None:
    left = store.root / ".incoming" / "tiny@0123"
    left.mkdir(parents=True)
    (left / "openvino_model.bin").write_bytes(bytes(100))
    other = store.root / ".incoming" / "tiny2@0123"
    other.mkdir()
    store.import_dir(source, "tiny")
    assert not left.exists() and other.exists()
