"""Make the tiny random-weight models beside this file: one archive for each architecture.

    python make.py [ARCHITECTURE ...]

Needs torch and ``optimum-intel[openvino]`` (the extra ``export``); the tests need neither. Weights
are drawn from few levels, so that an archive takes some tens of kilobytes, and are large enough for
logits that differ clearly between tokens. A few architectures export only with an older
transformers than the others; what fails is said and the rest goes on.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from optimum.exporters.openvino import main_export
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HERE = Path(__file__).parent
FILES = ("openvino_model.xml", "openvino_model.bin", "config.json")
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"sliding_window": 8}
# What differs from BASE; None takes a parameter away (architectures that derive or rename it).
ZOO: dict[str, dict[str, Any]] = {
    "bitnet": {"head_dim": None},
    "bloom": {
        "n_layer": 3,
        "n_head": 4,
        "head_dim": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "cohere": {},
    "exaone4": SLIDING,
    "gemma": {},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **SLIDING,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4": {},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "hidden_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "max_position_embeddings": None,
        "head_dim": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "gpt_neox": {"rotary_pct": 0.5, "head_dim": None, "num_key_value_heads": None},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": {},
    "llama": {},
    "mistral": SLIDING,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "opt": {
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": True,
        "head_dim": None,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "head_dim": None},
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
    "smollm3": {},
    "stablelm": {"head_dim": None, "partial_rotary_factor": 0.5},
    "starcoder2": {},
    # State beside the KV cache: made to test that it is refused.
    "lfm2": {"head_dim": None, "layer_types": ["conv", "full_attention", "conv"]},
}
LEVELS = 7  # distinct magnitudes of a weight


def make(architecture: str) -> int:
    """Export one architecture; returns the size of its archive in bytes."""
    fields = {**BASE, **ZOO[architecture]}
    config = CONFIG_MAPPING[architecture](**{k: v for k, v in fields.items() if v is not None})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            spread = weights.std() if weights.dim() >= 2 else 0
            if spread > 0:
                levels = torch.round(weights / spread * LEVELS / 3).clamp(-LEVELS, LEVELS)
                weights.copy_(levels * (spread * 4 * 3 / LEVELS))
    with tempfile.TemporaryDirectory() as scratch:
        source, exported = Path(scratch, "torch"), Path(scratch, "ir")
        model.save_pretrained(source)
        main_export(
            str(source),
            output=str(exported),
            task="text-generation-with-past",
            stateful=True,
            convert_tokenizer=False,
        )
        target = HERE / f"{architecture}.tar.xz"
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for name in FILES:
                data = (exported / name).read_bytes()
                member = tarfile.TarInfo(name)  # no date, owner or mode of this machine
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return target.stat().st_size


def main() -> int:
    failed = 0
    for architecture in sys.argv[1:] or ZOO:
        try:
            print(f"{architecture}: {make(architecture)} bytes", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{architecture}: failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
