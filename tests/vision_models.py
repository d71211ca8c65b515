"""Tiny models that see, with random weights, in the files of real checkpoints: written by mlx-vlm's own modules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from engine_models import byte_level, write_tokenizer
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GEMMA_MARKERS = ("<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA4_MARKERS = ("<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|audio|>", "<|video|>")
QWEN_MARKERS = (
    *("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
MISTRAL_MARKERS = ("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCABULARY = 512
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

needs_mlx_vlm = pytest.mark.skipif(
    find_spec("mlx_vlm") is None, reason="the extra is not installed: make vision"
)


@dataclass(frozen=True)
class SeeingModel:
    """A model's folder, and the tokens before and after an image's places."""

    folder: Path
    before: tuple[int, ...]
    behind: tuple[int, ...]
    pad: int


def write_gemma3(folder: Path, *, seed: int = 1) -> SeeingModel:
    """Gemma 3: windows of 24 tokens in two of its four layers, images of 16 places."""
    import mlx_vlm.models.gemma3 as family

    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "mm_tokens_per_image": 16,
        "max_position_embeddings": 1024,
        "rope_theta": 1_000_000,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 32,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
    }
    config = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "image_token_index": 5,
        "mm_tokens_per_image": 16,
        "hidden_size": 64,
        "pad_token_id": 0,
        "vocab_size": VOCABULARY,
        "eos_token_id": [1],
    }
    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    write_tokenizer(
        folder,
        byte_level(GEMMA_MARKERS),
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 16}))
    made = family.ModelConfig.from_dict(
        {
            **config,
            "text_config": family.TextConfig.from_dict(text),
            "vision_config": family.VisionConfig.from_dict(vision),
        }
    )
    _write(folder, config, family.Model(made), seed)
    return SeeingModel(folder, (3,), (4,), 5)


def write_gemma4(folder: Path, *, seed: int = 7) -> SeeingModel:
    """Gemma 4: windows of 24 tokens in three of six layers, of which the last two take the keys of others."""
    import mlx_vlm.models.gemma4 as family

    text = {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "max_position_embeddings": 1024,
        "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "default_output_length": 40,
        "position_embedding_size": 64,
    }
    config = {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 5,
        "audio_token_id": 6,
        "boi_token_id": 3,
        "eoi_token_id": 4,
        "pad_token_id": 0,
        "vocab_size": VOCABULARY,
        "eos_token_id": [1],
    }
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    write_tokenizer(
        folder,
        byte_level(GEMMA4_MARKERS),
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        extra_special_tokens=named,
    )
    processor = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 40,
    }
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma4Processor", "image_processor": processor})
    )
    made = family.ModelConfig.from_dict(
        {
            **config,
            "audio_config": None,
            "text_config": family.TextConfig.from_dict(text),
            "vision_config": family.VisionConfig.from_dict(vision),
        }
    )
    _write(folder, {**config, "audio_config": None}, family.Model(made), seed)
    return SeeingModel(folder, (3,), (4,), 5)


def write_qwen2_5_vl(
    folder: Path,
    *,
    seed: int = 2,
    text_sizes: Mapping[str, Any] = MappingProxyType({}),
    vision_sizes: Mapping[str, Any] = MappingProxyType({}),
    max_pixels: int = 4096,
) -> SeeingModel:
    """Qwen2.5-VL: three layers, positions by row and column, patches of 4 pixels that are merged two by two.

    The sizes replace those of the configuration's parts.
    """
    import mlx_vlm.models.qwen2_5_vl as family

    text = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        **text_sizes,
    }
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "in_channels": 3,
        **vision_sizes,
    }
    config = {
        "model_type": "qwen2_5_vl",
        **text,
        "vision_config": vision,
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "eos_token_id": [1],
    }
    write_tokenizer(folder, byte_level(QWEN_MARKERS), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": max_pixels,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    made = family.ModelConfig(
        text_config=family.TextConfig(model_type="qwen2_5_vl", **text),
        vision_config=family.VisionConfig(**vision),
        **{key: config[key] for key in config if key.endswith("_token_id") and key != "eos_token_id"},
        model_type="qwen2_5_vl",
        vocab_size=text["vocab_size"],
    )
    _write(folder, config, family.Model(made), seed)
    return SeeingModel(folder, (3,), (4,), 5)


def write_qwen3_vl(folder: Path, *, seed: int = 3) -> SeeingModel:
    """Qwen3-VL: four layers, of which the first two get more of an image; interleaved axes."""
    import mlx_vlm.models.qwen3_vl as family

    return _write_qwen3_vl(folder, family, "qwen3_vl", {}, seed)


def write_qwen3_vl_moe(folder: Path, *, seed: int = 8) -> SeeingModel:
    """Qwen3-VL as a mixture of experts."""
    import mlx_vlm.models.qwen3_vl_moe as family

    experts = {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return _write_qwen3_vl(folder, family, "qwen3_vl_moe", experts, seed)


def _write_qwen3_vl(
    folder: Path, family: Any, model_type: str, experts: dict[str, Any], seed: int
) -> SeeingModel:
    text = {
        "model_type": f"{model_type}_text",
        **experts,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": model_type,
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "in_channels": 3,
    }
    return _write_qwen3(folder, family, model_type, text, vision, seed)


def write_qwen3_5(folder: Path, *, seed: int = 6) -> SeeingModel:
    """Qwen3.5: every other of four layers has a state instead of keys and values; a quarter of a head is rotated."""
    import mlx_vlm.models.qwen3_5 as family

    return _write_qwen3_5(folder, family, "qwen3_5", {}, seed)


def write_qwen3_5_moe(folder: Path, *, seed: int = 9) -> SeeingModel:
    """Qwen3.5 as a mixture of experts."""
    import mlx_vlm.models.qwen3_5_moe as family

    return _write_qwen3_5(
        folder, family, "qwen3_5_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}, seed
    )


def _write_qwen3_5(
    folder: Path, family: Any, model_type: str, experts: dict[str, Any], seed: int
) -> SeeingModel:
    text = {
        "model_type": f"{model_type}_text",
        **experts,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
        "in_channels": 3,
    }
    return _write_qwen3(folder, family, model_type, text, vision, seed)


def _write_qwen3(
    folder: Path, family: Any, model_type: str, text: dict[str, Any], vision: dict[str, Any], seed: int
) -> SeeingModel:
    config = {
        "model_type": model_type,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "eos_token_id": [1],
    }
    write_tokenizer(folder, byte_level(QWEN_MARKERS), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    made = family.ModelConfig.from_dict(json.loads(json.dumps(config)))
    _write(folder, config, family.Model(made), seed)
    return SeeingModel(folder, (3,), (4,), 5)


def write_pixtral(folder: Path, *, seed: int = 4) -> SeeingModel:
    """Pixtral: three layers, patches of 4 pixels, a token between the rows of places."""
    import mlx_vlm.models.pixtral as family

    return _write_mistral(folder, family, {"model_type": "pixtral"}, seed)


def write_mistral3(folder: Path, *, seed: int = 5) -> SeeingModel:
    """Mistral Small 3: as Pixtral, with patches that are merged two by two."""
    import mlx_vlm.models.mistral3 as family

    return _write_mistral(folder, family, {"model_type": "mistral3", "spatial_merge_size": 2}, seed)


def _write_mistral(folder: Path, family: Any, own: dict[str, Any], seed: int) -> SeeingModel:
    text = {
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "pixtral",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 4,
        "num_channels": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    config = {
        **own,
        "text_config": text,
        "vision_config": vision,
        "image_token_index": 5,
        "eos_token_id": [2],
        "vision_feature_layer": -1,
        "vocab_size": VOCABULARY,
    }
    write_tokenizer(folder, byte_level(MISTRAL_MARKERS), eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    processor = {
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": 64},
        "patch_size": {"height": 4, "width": 4},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = {"patch_size": 4, "spatial_merge_size": own.get("spatial_merge_size", 1)}
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "PixtralProcessor", **whole})
    )
    made = family.ModelConfig.from_dict(
        {
            **config,
            "text_config": family.TextConfig.from_dict(text),
            "vision_config": family.VisionConfig.from_dict(vision),
        }
    )
    _write(folder, config, family.Model(made), seed)
    return SeeingModel(folder, (), (7,), 5)


def _write(folder: Path, config: dict[str, Any], model: Any, seed: int) -> None:
    """Write the configuration, and weights under which what was read decides what is answered."""
    adds_one = config["model_type"] == "gemma3"  # its norms do to their weights
    has_tied_head = config["model_type"].startswith("gemma")
    shapes = [
        (name, value)
        for name, value in tree_flatten(model.parameters())
        if "rotary" not in name and not (has_tied_head and "lm_head" in name)
    ]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {
        name: mx.random.normal(value.shape, key=key) * (0.05 if "embed_tokens" in name else 0.2)
        + (("norm" in name and not adds_one) or "layer_scalar" in name)
        for (name, value), key in zip(shapes, keys, strict=True)
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


WRITERS = {
    "gemma3": write_gemma3,
    "gemma4": write_gemma4,
    "mistral3": write_mistral3,
    "pixtral": write_pixtral,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_5": write_qwen3_5,
    "qwen3_vl": write_qwen3_vl,
}

MIXTURES = {"qwen3_5_moe": write_qwen3_5_moe, "qwen3_vl_moe": write_qwen3_vl_moe}
"""Variants of those, which differ in what images have nothing to do with."""


def part_of(name: str) -> str:
    """What the chat templates of a family write for an image."""
    if name.startswith("gemma"):
        return "<start_of_image>" if name == "gemma3" else "<|image|>"
    return "<|vision_start|><|image_pad|><|vision_end|>" if name.startswith("qwen") else "[IMG]"
