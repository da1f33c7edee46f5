"""What a model is, gathered from its files: architecture, layers, context, end tokens.

``config.json`` (as transformers writes it) or a GGUF header says it; the graph itself is asked as
well, and where they contradict each other the model is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from inference.store.errors import StoreError
from inference.store.gguf import GgufHeader
from inference.store.ir import Graph, inspect
from inference.store.manifest import MAX_TEMPLATE

MAX_JSON = 64 << 20  # bytes; tokenizer.json can have 20 MB

# config.json has had many authors.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True)
class Facts:
    """The fields of a manifest that describe the model; see there for their meaning."""

    architecture: str
    layers: int
    context_length: int
    hidden_size: int
    vocabulary_size: int
    kv_elements: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def gather(directory: Path, gguf: GgufHeader | None = None) -> Facts:
    """Facts about the OpenVINO model in ``directory``; ``gguf`` if it was converted from one.

    Checks the IR files on the way. Raises :class:`StoreError`.
    """
    model, tokenizer, _ = (
        inspect(
            directory / f"{stem}.xml",
            weights=(directory / f"{stem}.bin").stat().st_size,
            extensions=stem != "openvino_model",
        )
        for stem in ("openvino_model", "openvino_tokenizer", "openvino_detokenizer")
    )
    if "input_ids" not in model.inputs:
        raise StoreError(
            "the model takes no token ids (no input 'input_ids'): not a language model"
        )
    kv_elements = _kv_elements(model)
    facts = _from_gguf(gguf) if gguf is not None else _from_config(directory)
    layers, context, hidden, vocabulary = (
        _integer(facts, key)
        for key in ("layers", "context_length", "hidden_size", "vocabulary_size")
    )
    architecture = facts.get("architecture")
    if not isinstance(architecture, str):
        raise StoreError("the model's configuration does not name its architecture")
    if len(model.states) > 2 * layers:
        raise StoreError(
            f"the configuration says {layers} layers, "
            f"but the model keeps {len(model.states)} states"
        )
    return Facts(
        architecture=architecture,
        layers=layers,
        context_length=context,
        hidden_size=hidden,
        vocabulary_size=vocabulary,
        kv_elements=kv_elements,
        eos_token_ids=_end_tokens(facts.get("eos"), tokenizer),
        chat_template=_template(directory, facts, tokenizer),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty when there is no such file. Raises :class:`StoreError`."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_JSON + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {path.name}: {error.strerror or error}") from None
    if len(data) > MAX_JSON:
        raise StoreError(f"{path.name} is larger than {MAX_JSON} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path.name} does not hold an object")
    return value


def _kv_elements(model: Graph) -> int:
    """Elements of key and value that a token adds; a KV state varies in batch and in length."""
    caches = [state for state in model.states if state.shape.count(-1) >= 2]
    if not caches:
        raise StoreError(
            "the model keeps no KV cache of its own; export it with its state "
            "(task text-generation-with-past, stateful)"
        )
    return sum(prod(size for size in state.shape if size > 0) for state in caches)


def _from_config(directory: Path) -> dict[str, object]:
    config = read_json(directory / "config.json")
    if not config:
        raise StoreError("config.json is missing")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    generation = read_json(directory / "generation_config.json")
    eos = generation.get("eos_token_id")
    return {
        "architecture": inner.get("model_type", config.get("model_type")),
        "layers": _first(inner, _LAYERS),
        "context_length": _first(inner, _CONTEXT),
        "hidden_size": _first(inner, _HIDDEN),
        "vocabulary_size": inner.get("vocab_size", config.get("vocab_size")),
        "eos": inner.get("eos_token_id", config.get("eos_token_id")) if eos is None else eos,
    }


def _from_gguf(header: GgufHeader) -> dict[str, object]:
    architecture = header.text("general.architecture")
    return {
        "architecture": architecture,
        "layers": header.number(f"{architecture}.block_count"),
        "context_length": header.number(f"{architecture}.context_length"),
        "hidden_size": header.number(f"{architecture}.embedding_length"),
        "vocabulary_size": header.lengths.get("tokenizer.ggml.tokens"),
        "eos": header.number("tokenizer.ggml.eos_token_id"),
        "chat_template": header.text("tokenizer.chat_template"),
    }


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> object:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _integer(facts: Mapping[str, object], key: str) -> int:
    value = facts.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StoreError(f"the model's configuration has no usable {key.replace('_', ' ')}")
    return value


def _end_tokens(eos: object, tokenizer: Graph) -> tuple[int, ...]:
    """Ids that end a text: those of the configuration and the tokenizer's."""
    ids: list[int] = []
    for value in eos if isinstance(eos, list) else [eos] if eos is not None else []:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise StoreError("the model's configuration has an end token that is not a token id")
        ids.append(value)
    named = tokenizer.info.get("eos_token_id", "")
    if named.isascii() and named.isdigit() and len(named) < 10:
        ids.append(int(named))
    return tuple(dict.fromkeys(ids))


def _template(directory: Path, facts: Mapping[str, object], tokenizer: Graph) -> str | None:
    """The chat template, looked for where exporters have put it, the newest habit first."""
    template: object = None
    path = directory / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE:
            raise StoreError("chat_template.jinja is too long")
        template = path.read_text(encoding="utf-8", errors="replace")
    for candidate in (
        facts.get("chat_template"),
        read_json(directory / "chat_template.json").get("chat_template"),
        read_json(directory / "tokenizer_config.json").get("chat_template"),
        tokenizer.info.get("chat_template"),
    ):
        if template is None and isinstance(candidate, str) and candidate:
            template = candidate
    if isinstance(template, str) and len(template) > MAX_TEMPLATE:
        raise StoreError("the chat template is too long")
    return template if isinstance(template, str) else None
