"""Tiny models of mlx-lm's architectures with random weights; the same ones every time.

A configuration is made from the fields of an architecture's own `ModelArgs`: `SIZES` has a small value for each name
that occurs in several of them, and `OWN` what an architecture needs beside those.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import TYPE_CHECKING, Any

from engine_models import byte_level, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 512
CONTEXT = 1024
LAYERS = 4
WINDOW = 32
_QWEN3_5 = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "linear_num_value_heads"),
    *("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
)
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * (LAYERS // 2)

SIZES: dict[str, Any] = {
    # of the network
    **dict.fromkeys(("vocab_size", "num_vocab", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "model_dim", "d_model"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), LAYERS
    ),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "ff_intermediate_size", "n_inner"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(
        ("max_position_embeddings", "model_max_length", "n_positions", "n_ctx", "block_size"), CONTEXT
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"), 1e-5
    ),
    "tie_word_embeddings": False,
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "num_query_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "kv_channels", "hidden_size_per_head"), 16),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias"), False),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta"), 10_000.0),
    **dict.fromkeys(
        ("sliding_window", "attention_window_size", "window_size", "sliding_window_size"), WINDOW
    ),
    "sliding_window_pattern": 2,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "rotary_dim": 16,
    # multi-head latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 64,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "share_expert_dim"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "mlp_only_layers": [],
    # states: Mamba, gated delta rules, short convolutions
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(
        ("mamba_d_conv", "conv_kernel", "conv1d_width", "conv_window", "short_conv_kernel_size"), 4
    ),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "group_norm_size"), 2),
    **dict.fromkeys(("mamba_proj_bias", "use_conv_bias"), False),
    **dict.fromkeys(("mamba_conv_bias", "conv_bias"), True),
    "mamba_expand": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "conv_L_cache": 3,
    "time_step_rank": 4,
    "time_step_limit": [0.001, 100.0],
    "layer_group_size": 2,
    "layer_types": _SLIDING_AND_FULL,
    # Granite, Hunyuan, MiniCPM and others that scale
    "logits_scaling": 1.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "dim_model_base": 64,
    "scale_depth": 1.4,
    "scale_emb": 1.0,
}
"""By the names of fields in `ModelArgs`."""

_TEXT: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA4_ROPE = _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}

OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "cohere2": {"head_dim": 16},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "glm4_moe": {"rope_scaling": None},
    "gpt_oss": {"rope_scaling": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "llama": {"layer_types": ["full_attention"] * LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": 16, "intermediate_size": 128, "n_groups": 1},
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"]},
    "qwen3_5": {"text_config": {name: value for name, value in SIZES.items() if name in _QWEN3_5} | _TEXT},
}
"""By architecture: what it needs beside the common values, or in place of them."""


def config_of(architecture: str) -> dict[str, Any]:
    """Return the configuration of a tiny model."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    names = {field.name for field in dataclasses.fields(module.ModelArgs)}
    config = {name: value for name, value in SIZES.items() if name in names}
    return {"model_type": architecture, "vocab_size": VOCABULARY} | config | OWN.get(architecture, {})


def write(folder: Path, architecture: str, *, seed: int = 3) -> Path:
    """Write a tiny model with a tokenizer; its `sanitize` is expected to leave MLX's own names alone."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = config_of(architecture) | {"eos_token_id": []}
    write_tokenizer(folder, byte_level())
    (folder / "config.json").write_text(json.dumps(config))
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(config))
    weights = {name: _larger(value) for name, value in tree_flatten(network.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _larger(weight: Any) -> Any:
    """Make attention less flat than it is when a network is initialised, and let no bias or sink be zero."""
    import mlx.core as mx

    if weight.ndim > 1:
        return weight * 1.5
    return weight + 0.1 * mx.random.normal(weight.shape)
