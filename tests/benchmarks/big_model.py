"""Write a model in real shapes with random weights: its text makes no sense.

    python tests/benchmarks/big_model.py FOLDER [--layers 24] [--width 2880]
    python tests/benchmarks/big_model.py FOLDER --with-head glm-4.7-flash --right 0.7 [--layers 47]
    python tests/benchmarks/big_model.py FOLDER --with-head dense [--plain]

The first is gpt-oss-20b, 12 GB, quantised as the MLX builds of it are: mxfp4 (groups of 32) for the experts, 8 bits
(groups of 64) for the rest, the router too. The vocabulary has all 201,088 entries: every byte is a token, the rest is
filler. It never ends a reply by itself.

The others have an MTP head that guesses right for a share of the tokens, whatever it is asked for. Their layers are
computed and add next to nothing, so that the next token follows from the last one, and the head computes the same; but
for the other tokens, which a column of the embeddings marks, something is added to its input. Quantised alike, but for
`dense`, which is of a size for a CPU: 4 bits with scales of float32, or with `--plain` not quantised at all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gpt_oss
from mlx_lm.models.switch_layers import SwitchLinear
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
FLASH: Final[dict[str, Any]] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 131_072,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [],
}
AIR: Final[dict[str, Any]] = {
    "model_type": "glm4_moe",
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 131_072,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [],
}
DENSE: Final[dict[str, Any]] = AIR | {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "first_k_dense_replace": 1000,
}
HYBRID: Final[dict[str, Any]] = {
    "model_type": "qwen3_5_moe",
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {"type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": [],
}
WITH_HEADS: Final = {
    "glm-4.7-flash": FLASH,
    "glm-4.5-air": AIR,
    "qwen3.6-35b-a3b": HYBRID,
    "dense": DENSE,
}
OUTPUTS: Final = ("o_proj", "out_proj", "down_proj")  # what a layer adds comes from these
QWEN_HEAD: Final = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
OTHER_HEAD: Final = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
LITTLE: Final = 1e-4  # of their weights' usual size
MARK, PUSH = (
    4.0,
    1.0,
)  # in the marked tokens' embeddings, and what it adds to a head's input, in standard deviations
EXPERTS: Final = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
REST: Final = {"group_size": 64, "bits": 8, "mode": "affine"}
FOUR_BITS: Final = REST | {"bits": 4}


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
    quantization = quantize(model)
    shards: dict[str, dict[str, mx.array]] = {}
    for name, value in tree_flatten(model.parameters()):
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "rest", {})[name] = value
    for shard, weights in shards.items():
        mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config | {"quantization": quantization}))
    return folder


def quantize(model: nn.Module, rest: dict[str, Any] = REST) -> dict[str, Any]:
    """Quantise a model, what is no expert as `rest` says; return what config.json says of it."""
    quantization: dict[str, Any] = dict(EXPERTS)

    def quantization_of(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or path.endswith(("embed_q", "unembed_out")):
            return False
        settings = EXPERTS if isinstance(module, SwitchLinear) else rest
        quantization[path] = settings
        return dict(settings)

    nn.quantize(model, class_predicate=quantization_of)
    return quantization


def write_with_head(
    folder: Path, name: str, right: float, layers: int | None = None, *, plain: bool = False
) -> Path:
    """Write a model with a head that guesses right for such a share of the tokens; `plain` are weights of float32."""
    dtype = mx.float32 if name == "dense" else mx.bfloat16
    config = WITH_HEADS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    folder.mkdir(parents=True)
    write_tokenizer(folder, vocabulary(config["vocab_size"]))
    mx.random.seed(7)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    width, count = config["hidden_size"], config["num_hidden_layers"]
    model.update(tree_map(lambda value: value.astype(dtype), model.parameters()))
    embeddings = mx.random.normal((config["vocab_size"], width))
    embeddings[:, 0] = mx.where(mx.random.uniform(shape=(config["vocab_size"],)) < right, 0.0, MARK)
    text = getattr(model, "language_model", model)
    text.model.embed_tokens.weight = embeddings.astype(dtype)
    text.lm_head.weight[:, 0] = 0
    for path, part in model.named_modules():
        if path.endswith(OUTPUTS):
            part.weight = (part.weight * LITTLE).astype(dtype)
    is_qwen = text is not model
    projection = mx.concatenate([mx.eye(width), mx.zeros((width, width))], axis=1)
    projection[:, 0] = PUSH * mx.random.normal((width,))
    first, *norms = QWEN_HEAD if is_qwen else OTHER_HEAD
    head: dict[str, mx.array] = {first: projection} | dict.fromkeys(norms, mx.ones(width))
    if not plain:
        config |= {"quantization": quantize(model, FOUR_BITS if name == "dense" else REST)}
    body, own = ("language_model.model", "language_model.mtp.") if is_qwen else ("model", "")
    of_head = own or f"model.layers.{count}."
    shards: dict[str, dict[str, mx.array]] = {}
    for path, value in tree_flatten(model.parameters()):
        number = path.removeprefix(f"{body}.layers.").partition(".")[0]
        shards.setdefault(number if number.isdecimal() else "rest", {})[path] = value
    last = f"{body}.layers.{count - 1}."
    shards["head"] = {of_head + path: each.astype(dtype) for path, each in head.items()}
    shards["head"] |= {
        f"{of_head}{'layers.0.' if is_qwen else ''}{path.removeprefix(last)}": each
        for path, each in shards[str(count - 1)].items()
    }
    for shard, weights in shards.items():
        mx.save_safetensors(str(folder / f"model-{shard}.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
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
    arguments.add_argument("--layers", type=int, help="instead of all")
    arguments.add_argument("--width", type=int, default=2880)
    arguments.add_argument("--with-head", choices=[*WITH_HEADS], help="one of these, in place of gpt-oss-20b")
    arguments.add_argument(
        "--right", type=float, default=0.7, help="share of the tokens that its head guesses"
    )
    arguments.add_argument("--plain", action="store_true", help="float32, for a CPU")
    options = arguments.parse_args()
    if options.with_head is not None:
        write_with_head(options.folder, options.with_head, options.right, options.layers, plain=options.plain)
    else:
        write_gpt_oss_20b(options.folder, options.layers or 24, options.width)
