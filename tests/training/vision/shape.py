"""The network's sizes, how pictures are cut for it, and the configuration files that say so. Knows no library.

Patches are small (8 pixels) and pictures are brought to about the same number of pixels: so the network reads fine
strokes without a lossy first layer, and what is shown has one size whatever the file's. Four patches are one place of
the prompt.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from training.vision import tokens

PATCH: Final = 8  # pixels a side
MERGE: Final = 2  # patches a side that become one place
SIDE: Final = PATCH * MERGE
MAX_PATCHES: Final = 400  # most patches of a picture
MAX_PLACES: Final = MAX_PATCHES // MERGE**2
MAX_PIXELS: Final = MAX_PATCHES * PATCH**2
MIN_PIXELS: Final = 128 * 128
FRAMES: Final = 2  # a still picture is shown twice
PATCH_BYTES: Final = 3 * PATCH**2

VISION: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl",
    "depth": 5,
    "hidden_size": 128,
    "intermediate_size": 256,
    "out_hidden_size": 160,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [2],
    "hidden_act": "gelu_pytorch_tanh",
}
TEXT: Final[dict[str, Any]] = {
    "model_type": "qwen3_vl_text",
    "num_hidden_layers": 4,
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": tokens.VOCABULARY,
    "max_position_embeddings": 4_096,
    "rope_theta": 10_000.0,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def config() -> dict[str, Any]:
    """Return the content of config.json."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": TEXT,
        "vision_config": VISION,
        "tie_word_embeddings": True,
        "image_token_id": tokens.ID["<|image_pad|>"],
        "video_token_id": tokens.ID["<|video_pad|>"],
        "vision_start_token_id": tokens.ID["<|vision_start|>"],
        "vision_end_token_id": tokens.ID["<|vision_end|>"],
        "eos_token_id": [tokens.ID[name] for name in tokens.STOPS],
        "pad_token_id": tokens.ID["<|endoftext|>"],
        "vocab_size": tokens.VOCABULARY,
        "torch_dtype": "float32",
    }


def write(folder: Path) -> None:
    """Write config.json, generation_config.json and preprocessor_config.json."""
    made = config()
    generation = {
        "eos_token_id": made["eos_token_id"],
        "pad_token_id": made["pad_token_id"],
        "do_sample": False,
    }
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    contents = {
        "config": made, "generation_config": generation, "preprocessor_config": preprocessor
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def size_of(height: int, width: int) -> tuple[int, int]:
    """Return the height and width that the processor gives a picture, both multiples of `SIDE`."""
    new_height, new_width = round(height / SIDE) * SIDE, round(width / SIDE) * SIDE
    if new_height * new_width > MAX_PIXELS:
        ratio = math.sqrt(height * width / MAX_PIXELS)
        new_height = max(SIDE, math.floor(height / ratio / SIDE) * SIDE)
        new_width = max(SIDE, math.floor(width / ratio / SIDE) * SIDE)
    elif new_height * new_width < MIN_PIXELS:
        ratio = math.sqrt(MIN_PIXELS / (height * width))
        new_height = math.ceil(height * ratio / SIDE) * SIDE
        new_width = math.ceil(width * ratio / SIDE) * SIDE
    return new_height, new_width
