"""The fields that tiny models of mlx-lm's architectures are made from: values by name, and what one architecture needs.

`SIZES` has a small value for each name that occurs in several architectures, so that one a new mlx-lm brings is often
tried without a line here. `OWN` has what an architecture needs besides those or in place of them. `VARIANTS` are
architectures under another configuration that takes other code: another rotation, experts, layers that share keys.

What a network does only with texts of some length has to happen with the longest prompts of architecture_checks.py: so
windows, blocks, what an index chooses and scales of positions are shorter than those.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 512
CONTEXT = 1024
LAYERS = 4
WINDOW = 32
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
    "index_topk": 24,
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
    "mamba_chunk_size": 16,
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


_LINEAR_AND_FULL = ["linear_attention", "full_attention"] * (LAYERS // 2)
_CONV_AND_FULL = ["conv", "full_attention"] * (LAYERS // 2)
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA4_ROPE = _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 24}
_DYNAMIC = {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}
_KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_LONGCAT = {"zero_expert_num": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
_QWEN3_5 = {
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "num_experts": 0,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},  # the only names that mlx-lm reads
}

OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "cohere2": {"head_dim": 16},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
    },
    "deepseek_v2": {"num_key_value_heads": 4, "rope_scaling": _YARN},
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v41": {
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "index_topk": 4,
    },
    "exaone4": {
        "rope_scaling": None,
        "sliding_window_pattern": "LG",
        "layer_types": _SLIDING_AND_FULL,  # wanted by transformers, which reads the configuration too
    },
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_groups": 1},
    "gemma3": {"text_config": {"model_type": "gemma3_text"}},
    "gemma3n": {
        "text_config": {
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "intermediate_size": [96] * LAYERS,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
            "final_logit_softcapping": 30.0,
        }
    },
    "gemma4": {"text_config": {"model_type": "gemma4_text"}},
    "gemma4_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16},
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": _ROPE},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": {"rope_scaling": None},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3"}},
    "kimi_k3": {"text_config": {"linear_attn_config": _KDA, "mla_use_nope": True}},
    "kimi_linear": {"linear_attn_config": _KDA},
    "kimi_vl": {"text_config": {"num_key_value_heads": 4}},
    "lfm2": {
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": _CONV_AND_FULL,
    },
    "lfm2-vl": {"text_config": {"model_type": "lfm2"}},
    "lfm2_moe": {"use_expert_bias": True, "layer_types": _CONV_AND_FULL},
    "llama": {"layer_types": ["full_attention"] * LAYERS},
    "llama4": {
        "text_config": {
            "attention_chunk_size": 32,
            "floor_scale": 16,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"} | _LONGCAT,
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 2} | _LONGCAT,
    "mamba2": {"num_heads": 8, "head_dim": 16, "intermediate_size": 128, "n_groups": 1},
    "mellum": {"rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_shared_experts": None,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "v_head_dim": 16,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 64}},
    "minimax_m3_vl": {
        "text_config": {
            "dense_intermediate_size": 96,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1, 1],
            },
        },
    },
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "mistral3": {"text_config": {"model_type": "ministral3"}},
    "mistral4": {"rope_parameters": _LLAMA4_ROPE | _YARN},
    "muse_spark": {
        "audio_config": {"out_hidden_size": 64},  # checked by transformers
        "text_config": {
            "post_norm_eps": 1e-8,
            "rope_parameters": _ROPE,
            "layer_rope_theta": [10_000.0, 0] * (LAYERS // 2),
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.2,
            "moe_hidden_size": 64,
            "num_shared_experts": 0,
        },
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"]},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": _LINEAR_AND_FULL},
    "openelm": {
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
    },
    "phi3small": {
        "vocab_size": 100_352,  # mlx-lm masks tokens by their ids in the real vocabulary
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "pixtral": {"text_config": {"model_type": "llama", "layer_types": ["full_attention"] * LAYERS}},
    "plamo": {"n_shared_head": 2},
    "prism_hadamard_qwen35": {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "text_config": _QWEN3_5 | {"intermediate_size": 512},
        "modules": [
            {
                "path": f"model.layers.{layer}.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
            for layer in range(LAYERS)
        ],
    },
    "qwen2_vl": {"text_config": {"model_type": "qwen2"}},
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": _QWEN3_5 | {"num_experts": 4}},
    "qwen3_vl": {"text_config": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "rwkv7": {
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "spark2_5": {"rope_parameters": _ROPES},
}
"""By architecture. A `text_config` is completed from the fields of its own class, or of the model that it names."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2, three KV heads": (
        "gemma2",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss, yarn": ("gpt_oss", {"rope_scaling": _YARN}),
    "internlm2, dynamic rope": ("internlm2", {"rope_scaling": _DYNAMIC}),
    "internlm3, dynamic rope": ("internlm3", {"rope_scaling": _DYNAMIC}),
    "llama, dynamic rope": ("llama", {"rope_scaling": _DYNAMIC}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, windows": ("llama", {"layer_types": _SLIDING_AND_FULL}),
    "mistral3, llama": (
        "mistral3",
        {"text_config": {"model_type": "llama", "layer_types": ["full_attention"] * LAYERS}},
    ),
    "mistral3, mistral4": (
        "mistral3",
        {"text_config": {"model_type": "mistral4", "rope_parameters": _LLAMA4_ROPE | _YARN}},
    ),
    "qwen3, yarn": ("qwen3", {"rope_scaling": _YARN}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 1.0,
        },
    ),
}
"""By a name: an architecture, and what differs."""
