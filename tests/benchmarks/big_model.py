"""Write a model in gpt-oss-20b's real shapes with random weights: 12 GB, and its text makes no sense.

    python tests/benchmarks/big_model.py FOLDER [--layers 24] [--width 2880]

Quantised as the MLX builds of gpt-oss are: mxfp4 (groups of 32) for the experts, 8 bits (groups of 64) for the rest,
the router too. The vocabulary has all 201,088 entries: every byte is a token, the rest is filler. It never ends a reply
by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gpt_oss
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import MARKERS, write_tokenizer

SHAPES: Final[dict[str, Any]] = {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201_088,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "eos_token_id": [],
}
EXPERTS: Final = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
REST: Final = {"group_size": 64, "bits": 8, "mode": "affine"}


def write_gpt_oss_20b(folder: Path, layers: int = 24, width: int = 2880) -> Path:
    """Write the model, with a shard for each layer."""
    config = SHAPES | {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }
    folder.mkdir(parents=True)
    write_tokenizer(folder, vocabulary(config["vocab_size"]))
    mx.random.seed(7)
    model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(config))
    model.update(tree_map(lambda value: value.astype(mx.bfloat16), model.parameters()))
    quantization: dict[str, Any] = dict(EXPERTS)

    def quantization_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        settings = EXPERTS if "experts" in path else REST
        quantization[path] = settings
        return dict(settings)

    nn.quantize(model, class_predicate=quantization_of)
    shards: dict[str, dict[str, mx.array]] = {}
    for name, value in tree_flatten(model.parameters()):
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "rest", {})[name] = value
    for shard, weights in shards.items():
        mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return folder


def vocabulary(size: int) -> Tokenizer:
    """Make a byte-level tokenizer with this many entries, without merges."""
    entries = {name: at for at, name in enumerate(MARKERS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        entries[letter] = len(entries)
    while len(entries) < size:
        entries[f"Ġw{len(entries):x}"] = len(entries)
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--layers", type=int, default=24)
    arguments.add_argument("--width", type=int, default=2880)
    options = arguments.parse_args()
    write_gpt_oss_20b(options.folder, options.layers, options.width)
