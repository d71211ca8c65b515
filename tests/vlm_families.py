"""A tiny model with random weights of every family that mlx-vlm sees with, made by mlx-vlm's own configurations.

Configurations of families ask for different names of the same sizes, and leave out what they do not know: so all are
given every name. `OWN` says what a family needs besides, and what the table says of it (`remark`): of one that answers,
or of what is `met` when it is tried.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from engine_models import byte_level, write_tokenizer
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

if TYPE_CHECKING:
    from pathlib import Path

MARKERS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>", "<s>"),
    *(
        "<image>",
        "<|image|>",
        "<|image_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|video_pad|>",
        "<|video|>",
    ),
    *("<|audio|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|image>", "<image|>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|media_pad|>", "<|patch|>"),
    *(
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
        "<slice>",
        "</slice>",
    ),
    *("<image_id>", "</image_id>", "<unit>", "<video>", "<audio>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    *("<|imgpad|>", "<|img|>", "<|endofimg|>", "<|img_thumbnail|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|begin_of_sentence|>", "<｜▁pad▁｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|User|>"),
    *("<|Assistant|>", "<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<audio_soft_token>"),
    *(
        "<start_of_audio>",
        "<end_of_audio>",
        *("<audio_token>", "<boa_token>", "<eoa_token>", "<boi_token>", "<eoi_token>"),
        "<row_1_col_1>",
        "<row_1_col_2>",
        "<row_2_col_1>",
        "<row_2_col_2>",
    ),
    *("<|im_user|>", "<|im_assistant|>", "<|media_start|>", "<|media_content|>", "<|media_end|>"),
    *(
        "]<]image[>[",
        "]<]video[>[",
        "]<]start of image[>[",
        "]<]end of image[>[",
        "<im_low>",
        "</image>",
        "<frame_start>",
        "<frame_end>",
    ),
    *("<patch_start>", "<patch_end>", "<patch_newline>"),
    *(
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
        "TILE",
        "TILE_GLOBAL",
        "<|audio_pad|>",
    ),
)
VOCABULARY = 640
PAD, EOS, BOS = (MARKERS.index(name) for name in ("<pad>", "<eos>", "<bos>"))
MAX_WEIGHTS = 320_000_000
SIDE = 32
"""Pixels of an image's side, for families whose images have one size."""

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": PAD,
    "hidden_act": "silu",
    "attention_bias": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "depth": 2, "layers": 2, "intermediate_size": 64,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
    "image_size": SIDE, "num_channels": 3, "in_channels": 3, "in_chans": 3, "layer_norm_eps": 1e-6,
    "rms_norm_eps": 1e-6, "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "embed_dim": 32, "mlp_ratio": 2, "width": 32, "heads": 2, "window_size": 16, "fullatt_block_indexes": [1],
    "num_positions": 64, "num_position_embeddings": 64, "projection_dim": 64, "hidden_act": "gelu",
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "size": {"height": SIDE, "width": SIDE},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 4096,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
}

QWEN: dict[str, Any] = {
    "image": "<|image_pad|>",
    "config": {
        name: MARKERS.index(marker)
        for name, marker in {
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            "video_token_id": "<|video_pad|>",
        }.items()
    },
    "part": "<|vision_start|><|image_pad|><|vision_end|>",
}
GLM: dict[str, Any] = {
    "image": "<|image|>",
    "images": {"size": {"shortest_edge": 64, "longest_edge": 4096}},
    "config": {
        name: MARKERS.index(marker)
        for name, marker in {
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_token_id": "<|video|>",
            "video_token_index": "<|video|>",
        }.items()
    },
    "part": "<|begin_of_image|><|image|><|end_of_image|>",
}
SIGLIP = {"vision_type": "siglip_vision_model"}
TILES = {
    **SIGLIP,
    "vision": {"image_size": 16},
    "config": {"scale_factor": 2},
    "processor": {"image_seq_len": 4},
    "images": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        "do_image_splitting": True,
    },
}
DEEPSEEK: dict[str, Any] = {
    "taken": "<eos>",  # its processor puts a token first, and takes the last away
    "vision_type": "vision",
    "processor": {"candidate_resolutions": [[1024, 1024]], "downsample_ratio": 4, "patch_size": 16,
                  "sft_format": "deepseek", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "normalize": True,
                  "image_token": "<image>",
                  "pad_token": "<pad>", "add_special_token": False, "mask_prompt": False, "ignore_id": -100},
    "config": {
        "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": 64},
        "language_config": {"model_type": "deepseek_v2", **TEXT, "topk_method": "greedy", "kv_lora_rank": None,
                            "q_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 16},
    },
}  # fmt: skip
MLA = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
GRID = {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]]}
CLIP: dict[str, Any] = {
    "vision_type": "clip_vision_model",
    "text_type": "llama",
    "images": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
    "processor": {
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
}


def template_with(image: str) -> str:
    """Return a chat template that writes this for an image."""
    return (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text or '"
        + image
        + "' }}{% endfor %}{% endif %}{% endfor %}"
    )


def _few_blocks() -> None:
    """Gemma 3n's tower is a MobileNet whose blocks no configuration says."""
    vision: Any = importlib.import_module("mlx_vlm.models.gemma3n.vision")
    vision.gemma3n_mobilenet_def = lambda: [
        [vision._er(3, 16, 2)],
        [vision._uir(3, 5, 32, 2, 1.0)],
        [vision._uir(5, 5, 640, 2, 1.0, is_multiscale=True)],
        [vision._uir(5, 5, 1280, 2, 1.0, is_multiscale=True)],
    ]


def _scale_text(network: Any) -> None:
    """Have Gemma 3n's embeddings of prompts multiplied as those of what it says, which mlx-vlm 0.7.10 forgets."""
    embed = network.get_input_embeddings

    def scaled(tokens: mx.array, *given: Any, **named: Any) -> Any:
        found = embed(tokens, *given, **named)
        is_image = tokens[..., None] == network.config.image_token_id
        width = found.inputs_embeds.shape[-1]
        found.inputs_embeds = mx.where(is_image, found.inputs_embeds, found.inputs_embeds * width**0.5)
        return found

    network.get_input_embeddings = scaled


def _see_both_ways_in_windows(network: Any) -> None:
    """Have the places of Gemma 4's images attend both ways only in layers with a window, as in transformers."""
    model = network.language_model.model
    make = model._make_masks

    def masks(hidden: mx.array, caches: Any, types: Any = None) -> list[Any]:
        pairs = zip(model.layers, make(hidden, caches, types), make(hidden, caches, None), strict=True)
        return [both if layer.layer_type == "sliding_attention" else causal for layer, both, causal in pairs]

    model._make_masks = masks


def _show_whole_after_tiles(processor: Any) -> None:
    """Give the tower a picture of several tiles also as one, for which the processor has written tokens."""
    tiles = processor.image_processor
    kind = type(tiles)
    whole = kind(tiles.size, 1, tiles.image_mean, tiles.image_std)

    def preprocess(_: Any, images: list[Any], **named: Any) -> dict[str, Any]:
        made = [tiles_of(each, **named) for each in images]
        shown = [
            [
                one["pixel_values"],
                *([whole.preprocess(each)["pixel_values"]] if len(one["pixel_values"]) > 1 else []),
            ]
            for one, each in zip(made, images, strict=True)
        ]
        return {
            "pixel_values": np.concatenate([part for parts in shown for part in parts]),
            "aspect_ratios": [ratio for one in made for ratio in one["aspect_ratios"]],
        }

    tiles_of = functools.partial(kind.preprocess, tiles)
    tiles.__class__ = type(kind.__name__, (kind,), {"preprocess": preprocess})


def _image_token_of_dots() -> None:
    """Its processor knows the image token by its number in the published vocabulary."""
    processing = importlib.import_module("mlx_vlm.models.dots_ocr.processing_dots_ocr")
    make = processing.DotsVLProcessor.__init__

    @functools.wraps(make)
    def init(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.image_token_id = MARKERS.index("<|imgpad|>")

    processing.DotsVLProcessor.__init__ = init


def _tokens_of_hunyuan() -> None:
    """Its processor knows its tokens by their numbers in the published vocabulary."""
    processor: Any = importlib.import_module(
        "mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl"
    ).HunYuanVLProcessor
    for name, marker in {
        "IMAGE_TOKEN_ID": "<image>",
        "IM_START_TOKEN_ID": "<im_start>",
        "IM_END_TOKEN_ID": "<im_end>",
        "PAD_TOKEN_ID": "<pad>",
    }.items():
        setattr(processor, name, MARKERS.index(marker))


def _small_sam() -> None:
    """DeepSeek-OCR's second tower has one size."""
    for family in ("deepseekocr", "deepseekocr_2", "unlimited_ocr"):
        for name in (family, "sam", "config"):
            try:
                module: Any = importlib.import_module(f"mlx_vlm.models.{family}.{name}")
            except ImportError:
                continue
            if made := getattr(module, "SAMViTConfig", None):
                module.SAMViTConfig = functools.partial(
                    made, width=32, layers=2, heads=2, global_attn_indexes=(1,), prompt_embed_dim=16
                )


def _small_encoder() -> None:
    """DeepSeek-OCR 2 has one size of its second tower, too."""
    _small_sam()
    vision: Any = importlib.import_module("mlx_vlm.models.deepseekocr_2.vision")
    made = vision.Qwen2EncoderConfig
    vision.Qwen2EncoderConfig = lambda **_: made(layers=1, intermediate_size=64)


def _few_layers_of_clip() -> None:
    """Phi-3-Vision's tower has one size."""
    vision: Any = importlib.import_module("mlx_vlm.models.phi3_v.vision")
    sizes = vision.VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG
    sizes.num_hidden_layers, sizes.intermediate_size = 2, 64


def _tokens_of_jina() -> None:
    """Its processor knows its tokens by their numbers in the published vocabulary."""
    processing: Any = importlib.import_module("mlx_vlm.models.jina_vlm.processing_jinavlm")
    processing.ImageProcessor = functools.partial(
        importlib.import_module("mlx_vlm.models.jina_vlm.image_processor").ImageProcessor,
        **_numbers(
            patch_token_id="<im_patch>",
            start_token_id="<im_start>",
            end_token_id="<im_end>",
            column_token_id="<im_col>",
        ),
    )


def _small_pictures_of_ernie() -> None:
    """Its processor reads no sizes from files."""
    processing: Any = importlib.import_module("mlx_vlm.models.ernie4_5_moe_vl.processing_ernie4_5_moe_vl")
    processing.ImageProcessor = functools.partial(
        processing.ImageProcessor, min_pixels=1024, max_pixels=28 * 28 * 16
    )


def _name_tokens(network: Any) -> None:
    """Have ZAYA1-VL's language network take a prompt's tokens by the name that mlx-vlm 0.7.10 gives them."""
    kind = type(network.language_model)
    call = kind.__call__

    def named(self: Any, inputs: mx.array, **more: Any) -> Any:
        return call(self, inputs, **more)

    network.language_model.__class__ = type(kind.__name__, (kind,), {"__call__": named})


def _numbers(**markers: str) -> dict[str, int]:
    return {name: MARKERS.index(marker) for name, marker in markers.items()}


MINICPM: dict[str, Any] = {
    "config": {"insert_layer_id": 0},
    "vision_type": "siglip",
    "images": {"scale_resolution": 64, "slice_mode": False},
    "text": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
             "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
             "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "head_dim": 32,
             "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0,
                                 "partial_rotary_factor": 0.25}},
}  # fmt: skip

NO_PROCESSOR: dict[str, Any] = {
    "met": "makes nothing of a picture",
    "remark": "mlx-vlm 0.7.10 loads a tokenizer in place of a processor of it",
}

OWN: dict[str, dict[str, Any]] = {
    "aya_vision": {**SIGLIP, "image": "<|IMG_PATCH|>", "processor": {"img_size": SIDE, "patch_size": 8},
                   "config": {"alignment_intermediate_size": 64},
                   "images": {"image_processor_type": "GotOcr2ImageProcessor"}},
    "cohere_compass": {"vision": {"deepstack_visual_indexes": [0]}},
    "dots_ocr": {
        "change": _image_token_of_dots,
        "image": "<|imgpad|>",
        "flat": True,
        "images": {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 1,
                   "size": {"shortest_edge": 64, "longest_edge": 4096}},
        "text": {"attention_bias": True},
        "vision": {"temporal_patch_size": 1, "hidden_size": 64},
    },
    "gemma3n": {
        "change": _few_blocks,
        "mend": _scale_text,
        "remark": "mlx-vlm 0.7.10 forgets to scale the text of prompts; compared with that mended",
        "vision_type": "gemma3n_vision",
        "image": "<image_soft_token>",
        "names": {name: f"<{name}>" for name in ("audio_token", "boa_token", "eoa_token", "boi_token", "eoi_token")},
        "text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                 "num_hidden_layers": 4, "intermediate_size": [128] * 4, "tie_word_embeddings": True,
                 "vocab_size_per_layer_input": MARKERS.index("<image_soft_token>"),
                 "activation_sparsity_pattern": [0.0] * 4,
                 "hidden_size_per_layer_input": 8, "laurel_rank": 8, "final_logit_softcapping": 30.0,
                 "num_kv_shared_layers": 0, "altup_num_inputs": 4, "altup_coef_clip": 120.0,
                 "altup_correct_scale": True, "altup_active_idx": 0},
        "vision": {"hidden_size": 2048, "vocab_size": 8, "vocab_offset": VOCABULARY},
        "config": {"audio_config": {"vocab_size": 8, "vocab_offset": VOCABULARY + 8, "hidden_size": 16,
                                    "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}},
        "images": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 256, "width": 256}},
    },
    "glm4v_moe": {**GLM, "text": {
        "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "partial_rotary_factor": 0.5}},
    "glm4v": {**GLM, "text": {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}},
    "glm_ocr": {**GLM, "strict": True, "text": {"rope_parameters": {
            "rope_theta": 10_000.0, "rope_type": "default", "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}},
    "granite_vision": {
        **SIGLIP,
        "text": {"embedding_multiplier": 1.0, "attention_multiplier": 0.25, "residual_multiplier": 1.0,
                 "logits_scaling": 1.0},
        "config": GRID,
        "images": {**CLIP["images"], **GRID, "image_processor_type": "LlavaNextImageProcessor"},
    },
    "gemma4_unified": {
        "mend": _see_both_ways_in_windows,
        "remark": "compared with transformers' masks",
        "image": "<|image|>",
        "vision": {"patch_size": 16, "pooling_kernel_size": 3, "model_patch_size": 48, "mm_embed_dim": 64,
                   "mm_posemb_size": 512, "num_soft_tokens": 280, "output_proj_dims": 64},
        "text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 32,
                 "vocab_size_per_layer_input": VOCABULARY, "layer_types": ["sliding_attention", "full_attention"] * 2,
                 "attention_k_eq_v": False, "sliding_window": 1024, "final_logit_softcapping": 30.0,
                 "rope_parameters": {
                     "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
                                        "rope_type": "proportional"},
                     "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"}},
                 "num_hidden_layers": 4, "tie_word_embeddings": True},
    },
    "idefics3": TILES,
    "smolvlm": TILES,
    "internvl_chat": {
        "text_type": "qwen2",
        "text": {"attention_bias": True},
        "image": "<IMG_CONTEXT>",
        **SIGLIP,
        "processor": {"num_image_token": 16, "image_size": SIDE},
        "config": {"downsample_ratio": 0.5},
        "template": template_with("<image>"),
    },
    "internvl": {"image": "<IMG_CONTEXT>", "text_type": "qwen3", "processor": {"image_seq_length": 16}},
    "kimi_vl": {"image": "<|media_pad|>", "vision_type": "moonvit", "text": MLA, "vision": {"patch_size": 14}},
    "kimi_k25": {"image": "<|media_pad|>", "vision_type": "moonvit", "text": MLA},
    "lfm2_vl": {
        "text_type": "lfm2",
        "text": {
            "layer_types": ["conv", "full_attention", "conv"], "block_dim": 64, "conv_dim": 64, "conv_dim_out": 64,
            "num_heads": 4, "block_ff_dim": 128, "block_multiple_of": 16, "tie_word_embeddings": True,
        },
        "config": {"projector_hidden_size": 64, "encoder_patch_size": 4, "tile_size": 32},
        "images": {"tile_size": 32, "encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 16,
                   "max_num_patches": 64},
    },
    "llama4": {
        "mend_processor": _show_whole_after_tiles,
        "remark": "mlx-vlm 0.7.10 leaves out the whole of a picture of several tiles; compared with that mended",
        "image": "<|patch|>",
        "images": {"size": {"height": 56, "width": 56}},
        "text": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 128, "attention_chunk_size": 32,
                 "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 16,
                 "no_rope_layers": [1, 1, 1, 0],
                 "num_hidden_layers": 4,
                 "num_experts_per_tok": 1,
                 "use_qk_norm": True},
        "vision": {"initializer_range": 0.02, "norm_eps": 1e-5, "patch_size": 14, "image_size": 56,
                   "pixel_shuffle_ratio": 0.5, "projector_dropout": 0.0,
                   "projector_input_dim": 64, "projector_output_dim": 64, "rope_theta": 10_000.0,
                   "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "vision_output_dim": 64,
                   "intermediate_size": 128},
    },
    "llava_next": {**CLIP, "config": GRID, "images": {**CLIP["images"], **GRID},
                   "remark": "mlx-vlm 0.7.10 makes more embeddings of a picture than it has tokens"},
    "llava_onevision": {**SIGLIP, "text_type": "qwen2", "config": GRID, "images": GRID,
                        "processor": {"num_image_tokens": 64}},
    "paddleocr_vl": {
        "flat": True,
        "images": {"temporal_patch_size": 1},
        "config": {"hidden_size": 1024},  # its projector's output has no other width
        "image": "<|IMAGE_PLACEHOLDER|>",
        "text": {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}, "bos_token_id": BOS,
                 "eos_token_id": EOS, "use_bias": False, "head_dim": 16, "rope_parameters": None},
    },
    "paligemma": {"met": "other logits", **SIGLIP,
                  "remark": "its prompts are read in both directions, so that a text gets other logits in pieces",
                  "images": {"image_seq_length": 64}, "text_type": "gemma",
                  "text": {"query_pre_attn_scalar": 16, "hidden_act": "gelu_pytorch_tanh"}},
    "minimax_m3_vl": {"image": "]<]image[>["},
    "step3p7": {"remark": "one picture in a prompt, as in mlx-vlm 0.7.10", "image": "<im_patch>",
                "vision": {"mlp_ratio": 2.0, "image_size": 728, "patch_size": 14},
                "text": {"num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "share_expert_dim": 32}},
    "qwen4_exp": {**QWEN, "text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_budget": 256, "indexer_compress_ratio": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "indexer_head_dim": 16, "hc_lowrank": 8,
        "rope_parameters": {"type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10_000.0,
                            "partial_rotary_factor": 0.25}}},
    "mllama": {
        "remark": "mlx-vlm 0.7.10 runs a text alone through layers that transformers skips, so it may be refused",
        "first": "<bos><|im_start|>", "vision": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
        "text": {"cross_attention_layers": [1]},
    },
    "ernie4_5_moe_vl": {"flat": True, "image": "<|IMAGE_PLACEHOLDER|>",
                        "text": {"moe_num_experts": [4, 4], "moe_intermediate_size": [32, 16],
                                 "moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 2],
                                 "mrope_section": [3, 3, 2], "freq_allocation": 2},
                        "config": {"pixel_hidden_size": 32, "im_patch_id": MARKERS.index("<|IMAGE_PLACEHOLDER|>")},
                        "change": _small_pictures_of_ernie, "has_sentencepiece": True},
    "molmo2": {
        "image": "<|image|>",
        "template": template_with("<|image|>"),
        "text": {"additional_vocab_size": 0},
        "vision": None,
        "config": {
            **{name: MARKERS.index(marker) for name, marker in {
                "image_start_token_id": "<im_start>", "low_res_image_start_token_id": "<low_res_im_start>",
                "image_end_token_id": "<im_end>", "image_low_res_id": "<im_low>", "image_patch_id": "<im_patch>",
                "image_col_id": "<im_col>", "frame_start_token_id": "<frame_start>",
                "frame_end_token_id": "<frame_end>"}.items()},
            "vit_config": {**VISION, "image_patch_size": 14, "image_num_pos": 729, "image_size": None,
                           "image_default_input_size": [378, 378]},
            "adapter_config": {**VISION, "text_hidden_size": 64, "vit_layers": [-1, -2], "image_size": None}},
    },
    "qwen3_omni_moe": {
        **QWEN,
        "config": {"enable_audio_output": False, "thinker_config": {
            "text_config": {**TEXT, "decoder_sparse_step": 1, "mlp_only_layers": [],
                            "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}},
            "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
            "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                             "output_dim": 64, "downsample_hidden_size": 8},
            "image_token_id": MARKERS.index("<|image_pad|>"), "audio_token_id": MARKERS.index("<|audio_pad|>"),
            **QWEN["config"]},
            "talker_config": {"text_config": {**TEXT, "decoder_sparse_step": 1, "mlp_only_layers": []},
                              "code_predictor_config": {}}},
        "names": {"audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
                  "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
                  "audio_bos_token": "<boa_token>", "audio_eos_token": "<eoa_token>"},
    },
    "qwen2_vl": {
        **QWEN,
        "vision_type": "qwen2_vl",
        "flat": True,
        "text": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "intermediate_size": 128},
        "vision": {"hidden_size": 64},
    },
    "deepseekocr": {**DEEPSEEK, "change": _small_sam, "vision": {
        "hidden_size": 1024, "width": 1024, "image_size": 224, "patch_size": 14}},
    "deepseekocr_2": {
        **DEEPSEEK,
        "met": "ended with 14",  # by its alarm
        "remark": "its towers have one size: a picture takes 20 seconds here, and no comparison ended in 4 minutes",
        "change": _small_encoder,
        "vision": {"width": {"qwen2-0-5b": {"dim": 896}}},
        "config": {**DEEPSEEK["config"],
                   "projector_config": {"projector_type": "linear", "input_dim": 896, "n_embed": 64}},
    },
    "glm5_next": {
        **GLM,
        "images": {"patch_size": 14},
        "processor": {"image_processor": {"max_image_tokens": 64}},
        "text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "v_head_dim": 16,
                 "kv_lora_rank": 16, "q_lora_rank": 16, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2,
                 "index_kpool": 4, "linear_head_dim": 32, "linear_num_heads": 2, "num_hidden_layers": 4},
        "vision": {"patch_size": 14, "projection_intermediate_size": 64},
    },
    "granite4_vision": {
        **SIGLIP,
        "text_type": "granitemoehybrid",
        "text": {"embedding_multiplier": 1.0, "attention_multiplier": 0.25, "residual_multiplier": 1.0,
                 "logits_scaling": 1.0, "layer_types": ["attention"] * 3, "shared_intermediate_size": 128,
                 "num_local_experts": 0},
        "vision": {"hidden_size": 64},
        "config": {**GRID, "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1],
                   "use_spatial_sampling": False},
        "images": {**CLIP["images"], **GRID, "image_processor_type": "LlavaNextImageProcessor"},
    },
    "idefics2": {
        "text_type": "mistral",
        "names": {"image_boundary_token": "<fake_token_around_image>"},
        "config": {"perceiver_config": {"model_type": "idefics2", "num_key_value_heads": 2, "resampler_depth": 1,
                                        "resampler_head_dim": 16, "resampler_n_heads": 4,
                                        "resampler_n_latents": 64}},
    },
    "jina_vlm": {
        "model_type": "jvlm",
        "change": _tokens_of_jina,
        "image": "<|image|>",
        "template": template_with("<|image|>"),
        "config": _numbers(image_start_token_id="<im_start>", image_end_token_id="<im_end>",
                           image_patch_token_id="<im_patch>", image_column_token_id="<im_col>"),
        "text": {"n_layers": 2, "additional_vocab_size": 8, "block_config": {
            "attn_config": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}, "ffn_config": {"size": 128}}},
        "vision": {"n_layers": 2, "vit_layers": [-1, -2], "output_size": 64, "patch_size": 14, "image_size": 378,
                   "input_size": [378, 378],
                   "block_config": {"attn_config": {"n_heads": 2, "head_dim": 16}, "ffn_config": {"size": 64}},
                   "vl_connector_config": {"mlp_projector_config": {"size": 64}}},
    },
    "kimi_k3": {
        "is_converted": True,
        "image": "<|media_pad|>",
        "config": _numbers(media_placeholder_token_id="<|media_pad|>"),
        "text": {**MLA, "hidden_act": "situ", "model_type": "kimi_linear", "num_hidden_layers": 4,
                 "num_shared_experts": 1, "num_experts_per_token": 2, "num_key_value_heads": 4,
                 "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2,
                                        "head_dim": 32, "short_conv_kernel_size": 4}},
        "vision": {"patch_size": 14, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2, "vt_hidden_size": 32,
                   "vt_intermediate_size": 64, "qkv_hidden_size": 32, "mm_hidden_size": 32, "text_hidden_size": 64},
    },
    "mage_vl": {
        **QWEN,
        "text_type": "qwen3",
        "images": {"temporal_patch_size": 1},
        "vision": {"hidden_size": 64, "text_hidden_size": 64, "temporal_patch_size": 1},
    },
    "mimo_v2": {
        **QWEN,
        "config": {**QWEN["config"], "audio_config": {
            "out_hidden_size": 64, "input_local_dim": 16, "input_local_attn_heads": 2, "input_local_head_dim": 8,
            "input_local_intermediate_size": 16, "input_local_layers": 1, "audio_channels": 2,
            "speech_vocab_size": 16, "speech_zeroemb_idx": 8}},
        "text": {"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "v_head_dim": 16,
                 "swa_head_dim": 16, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
                 "swa_num_key_value_heads": 2, "sliding_window_size": 24, "partial_rotary_factor": 0.5},
    },
    "minicpmo": {**SIGLIP, "text_type": "qwen3", "config": {"init_audio": False, "init_tts": False}},
    "minicpmv4_6": MINICPM,
    "minicpmv4_7": {
        **MINICPM,
        "image": "<|image_pad|>",
        "config": {"insert_layer_id": 0, "newline_id": 600, **_numbers(
            image_start_id="<image>", image_end_id="</image>", slice_start_id="<slice>", slice_end_id="</slice>",
            video_token_id="<|video_pad|>")},
    },
    "muse_glimmer": {
        "image": "<|patch|>",
        "config": {"out_hidden_size": 128, "projector_hidden_size": 64},
        "processor": {"max_image_tokens": 64},
        "text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                 "layer_rope_theta": [10_000.0, 10_000.0, 0],
                 "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}},
    },
    "nemotron_h_nano_omni": {
        "text_type": "nemotron_h",
        "images": {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3},
        "config": {"projector_hidden_size": 64, "vit_hidden_size": 32, **_numbers(img_context_token_id="<image>")},
        "vision": {"max_resolution": 64},
        "text": {"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16,
                 "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False,
                 "use_conv_bias": True, "hybrid_override_pattern": ["M", "*", "-"]},
    },
    "zaya1_vl": {
        "flat": True,
        "mend": _name_tokens,
        "remark": "mlx-vlm 0.7.10's own generation names its tokens otherwise than its network; compared with that "
                  "mended",
        "text": {"ffn_hidden_size": 64, "zaya_mlp_expansion": 16},
    },
    "hunyuan_vl": {
        "change": _tokens_of_hunyuan,
        "text": {"rope_scaling": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [2, 2, 2, 2]}},
        "vision": {"patch_size": 16},
        "config": _numbers(image_start_token_id="<im_start>", image_end_token_id="<im_end>"),
    },
    "deepseek_v41": {
        "tokens": 4,
        "remark": "mlx-vlm 0.7.10's own replies differ from run to run after some tokens; the first 4 are compared",
        "vision": {"num_layers": 2, "patch_size": 14, "downsample_ratio": 3, "min_pixels": 256,
                   "max_image_tokens": 64},
        "config": {"hc_mult": 2, "hc_sinkhorn_iters": 4},
        "text": {"num_key_value_heads": 1, "num_hidden_layers": 3, "qk_rope_head_dim": 8, "q_lora_rank": 32,
                 "o_lora_rank": 32, "o_groups": 2, "compress_ratios": [0, 2, 1], "kv_source_layer_ids": [1, 2],
                 "index_source_layer_ids": [1, 2], "candidate_source_layer_id": -1, "index_n_heads": 2,
                 "index_head_dim": 32, "index_topk": 512, "num_experts_per_tok": 4,
                 "head_dim": 32, "moe_intermediate_size": 32, "engram_layer_ids": [1],
                 "engram_num_embeddings": [400], "engram_vocab_size": 50, "engram_max_ngram_size": 3,
                 "engram_n_heads": 2, "engram_head_dim": 16, "engram_pad_token_id": PAD,
                 "engram_compressed_vocab_size": 360},
    },
    "molmo_point": {
        "met": "what follows a picture gets other logits",
        "remark": "it writes points as tokens outside its vocabulary: after a picture its logits have another width",
        "image": "<|image|>",
        "template": template_with("<|image|>"),
        "text": {"additional_vocab_size": 0},
        "vision": {"image_patch_size": 14, "image_num_pos": 729, "image_default_input_size": [378, 378]},
        "config": {
            **_numbers(image_start_token_id="<im_start>", image_end_token_id="<im_end>", image_patch_id="<im_patch>",
                       image_high_res_id="<im_patch>", image_col_id="<im_col>",
                       image_non_indexable_patch_id="<im_low>", frame_start_token_id="<frame_start>",
                       frame_end_token_id="<frame_end>", patch_token_id="<patch_start>",
                       subpatch_token_id="<patch_end>", location_token_id="<patch_newline>"),
            "patch_embed_dim": 32,
            "adapter_config": {**VISION, "text_hidden_size": 64, "vit_layers": [-1, -2], "image_size": None}},
    },
    "muse_spark": {
        "met": "No Metal back-end",
        "remark": "its networks run on Apple's GPUs only (`[metal_kernel] No Metal back-end`)",
        "image": "<|patch|>",
        "text": {"post_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
                 "layer_rope_theta": [10_000.0, 10_000.0, 0], "final_logit_softcapping": 30.0,
                 "output_multiplier": 1.0, "moe_hidden_size": 64,
                 "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        "vision": {"pos_emb_height": 8, "pos_emb_width": 8},
        "config": {"out_hidden_size": 128, "projector_hidden_size": 64, "audio_config": {"out_hidden_size": 64}},
    },
    "phi4mm": {
        "flat": True,
        "vision_type": "siglip2_vision_model",
        "text": {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
        "config": {"mm_hidden_size": 32, "image_token_index": -200, "audio_processor": {"config": {
            "attention_dim": 16, "attention_heads": 2, "num_blocks": 1, "linear_units": 16, "conv_channels": 16,
            "ext_pw_out_channel": 16, "depthwise_seperable_out_channel": 16}}},
    },
    "prism_hadamard_qwen35": {
        "image": "<|image_pad|>",
        "is_converted": True,
        "text": {**MINICPM["text"], "intermediate_size": 512, "num_experts": 0},
        "vision": {"deepstack_visual_indexes": [], "out_hidden_size": 64, "num_position_embeddings": 64},
        "images": {"image_processor_type": "Qwen2VLImageProcessor"},
        "config": {"schema_version": 2, "tensor_namespace": "mlx-vlm-qwen3_5",
                   "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
                   "modules": [{"path": f"model.layers.{layer}.mlp.down_proj", "embedding": False,
                                "dtype": "float16", "block": 512} for layer in range(4)]},
    },
    "deepseek_v4": {
        "met": "a text gets other logits at once",
        "remark": "in mlx-vlm 0.7.10 a text gets other logits token by token than at once, from the 8th on",
        "flat": True,
        "text": {"num_key_value_heads": 1, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "num_hidden_layers": 3,
                 "head_dim": 32, "qk_rope_head_dim": 8, "compress_ratios": [0, 4, 0], "num_hash_layers": 0,
                 "hc_mult": 2, "hc_sinkhorn_iters": 4, "index_n_heads": 2, "index_head_dim": 32},
        "config": {"vision_n_layers": 1, "vision_dim": 32, "vision_n_heads": 2, "vision_inter_dim": 32,
                   "vision_min_pixels": 256, "vision_config": {}},
    },
    "got": {"flat": True, "config": _numbers(
        im_patch_token="<im_patch>", im_start_token="<im_start>", im_end_token="<im_end>"),
        "vision": {"patch_size": 16, "embed_dim": 32, "out_chans": 16}},
    "llava": CLIP,
    "llava_bunny": {**SIGLIP, "text_type": "qwen2", "vision": {"projection_dim": 768},
                    "config": {"auto_map": {}, "mm_hidden_size": 32, "image_token_index": -200}},
    "llmjpvl": {**NO_PROCESSOR, **SIGLIP, "text_type": "llama"},
    "locateanything": {"text_type": "qwen2", "text": {"tie_word_embeddings": True}, "vision": {"patch_size": 14}},
    "molmo": {
        "text": {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 128,
                 "embedding_size": VOCABULARY, "additional_vocab_size": 8},
        "vision": {"d_model": 64, "image_emb_dim": 32, "image_num_heads": 2, "image_num_key_value_heads": 2,
                   "image_num_layers": 2, "image_head_dim": 16, "image_mlp_dim": 64, "vit_layers": [-1, -2],
                   "hidden_size": 64, "intermediate_size": None},
    },
    "moondream3": {"text": {"num_key_value_heads": 4, "rope_dim": 8},
                   "vision": {"patch_size": 14, "proj_inner_dim": 64, "proj_out_dim": 64}},
    "phi3_v": {"change": _few_layers_of_clip, "flat": True, "vision_type": "phi3_v", "names": {"image_token": None}},
    "phi4_siglip": {"model_type": "phi4-siglip", "strict": True,
                    "vision_type": "siglip2_vision_model", "config": {"mm_hidden_size": 32}},
    "unlimited_ocr": {"met": "torchvision", **DEEPSEEK, "change": _small_sam,
                      "remark": "its image processor is that of transformers, which needs torchvision", "vision": {
        "hidden_size": 1024, "width": 1024, "image_size": 224, "patch_size": 14}},
    "mistral_large3": NO_PROCESSOR,
    "youtu_vl": {**NO_PROCESSOR, "flat": True,
                 "text": {**MLA, "model_type": "youtu_vl"}, "vision": {"num_patches": 64}},
}  # fmt: skip


def _sentencepiece(folder: Path) -> Tokenizer:
    """Write a tokenizer of letters and bytes as a file of SentencePiece, and return the same one."""
    import sentencepiece

    names: dict[str, Any] = {f"{name.strip('<>')}_{what}": value
             for at, name in enumerate(MARKERS[:4]) for what, value in (("id", at), ("piece", name))}  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"] * 9),
        model_prefix=str(folder / "tokenizer"),
        model_type="char",
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=list(MARKERS[4:]),
        minloglevel=2,
        **names,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    vocabulary = {pieces.id_to_piece(at): at for at in range(pieces.get_piece_size())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def _random(name: str, like: mx.array, key: mx.array) -> mx.array:
    if name.endswith(".signs"):
        return like
    if like.dtype == mx.uint32:  # quantised
        return mx.random.randint(0, 1 << 31, like.shape, mx.uint32, key=key)
    return mx.random.normal(like.shape, key=key) * (0.05 if "embed_tokens" in name else 0.2) + (
        "norm" in name
    )


def write(folder: Path, family: str, seed: int = 5) -> Path:
    """Write a family's model."""
    own = OWN.get(family, {})
    if "change" in own:
        own["change"]()
    module = importlib.import_module(f"mlx_vlm.models.{own.get('module', family)}")
    image = MARKERS.index(own.get("image", "<image>"))
    config: dict[str, Any] = {
        "model_type": own.get("model_type", family),
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": [EOS],
        "image_token_id": image,
        "image_token_index": image,
        **own.get("config", {}),
    }
    config["text_config"] = {"model_type": own.get("text_type", family), **TEXT, **own.get("text", {})}
    if (vision := own.get("vision", {})) is not None and ("vision" in own or hasattr(module, "VisionConfig")):
        type_of = own.get("vision_type") or getattr(
            getattr(module, "VisionConfig", None), "model_type", family
        )
        config["vision_config"] = {"model_type": type_of, **VISION, **vision}
    if own.get("strict"):  # its configurations take no other names
        for part in ("text", "vision"):
            known = inspect.signature(getattr(module, f"{part.title()}Config")).parameters
            config[f"{part}_config"] = {k: v for k, v in config[f"{part}_config"].items() if k in known}
    if own.get("flat"):
        config = {**config["text_config"], **config}
    names = {"image_token": MARKERS[image], **own.get("names", {})}
    names = {name: marker for name, marker in names.items() if marker is not None}
    write_tokenizer(
        folder,
        _sentencepiece(folder) if own.get("has_sentencepiece") else byte_level(MARKERS),
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=names,
    )
    if (template := own.get("template")) is not None:
        (folder / "chat_template.jinja").write_text(template)
    images = {**IMAGES, **own.get("images", {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4, **own.get("processor", {})}))
    (folder / "config.json").write_text(json.dumps(config))
    given = json.loads(json.dumps(config))
    given.setdefault("audio_config", {})
    made = module.ModelConfig.from_dict(given)
    from mlx_vlm.utils import update_module_configs

    made = update_module_configs(made, module, given, ["text", "vision", "perceiver", "projector", "audio"])
    shapes = tree_flatten(module.Model(made).parameters())
    if (total := sum(value.size for _, value in shapes)) > MAX_WEIGHTS:
        large = sorted(shapes, key=lambda each: -each[1].size)[:3]
        raise ValueError(f"{family} has {total:,} weights: {[(name, value.shape) for name, value in large]}")
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {name: _random(name, value, key) for (name, value), key in zip(shapes, keys, strict=True)}
    form = {"format": "mlx"} if own.get("is_converted") else None
    mx.save_safetensors(str(folder / "model.safetensors"), weights, form)
    return folder
