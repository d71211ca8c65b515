"""What README and `recommend` say of caches is what `show` and the server count for networks of these shapes."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_backend.device.memory import format_bytes
from mlx_backend.engine.mlx.runtime import cache_costs
from mlx_backend.models.spec import RECOMMENDED_MODELS

README = Path(__file__).parents[3] / "README.md"

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_scaling": None,
}
QWEN: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


def qwen(layers: int, **changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5", "text_config": QWEN | {"num_hidden_layers": layers} | changes}


SHAPES: dict[str, dict[str, Any]] = {
    "mlx-community/Qwen3.5-4B-MLX-4bit": qwen(32),
    "mlx-community/Qwen3.5-9B-4bit": qwen(32),
    "mlx-community/gpt-oss-20b-MXFP4-Q8": GPT_OSS | {"num_hidden_layers": 24},
    "mlx-community/gemma-4-26b-a4b-it-4bit": GEMMA,
    "mlx-community/Qwen3.8-27B-4bit": qwen(64, num_attention_heads=24, linear_num_value_heads=48),
    "mlx-community/Qwen3.6-35B-A3B-4bit": qwen(40, num_key_value_heads=2),
    "mlx-community/gpt-oss-120b-MXFP4-Q8": GPT_OSS | {"num_hidden_layers": 36},
}
"""What caches depend on in the configurations of the models; widths and experts are smaller than theirs."""
SMALL = {"hidden_size": 256, "intermediate_size": 64, "vocab_size": 64, "num_local_experts": 4}
CONTEXTS = (32 << 10, 128 << 10)


def bytes_of(shape: dict[str, Any]) -> list[list[int]]:
    """Return the bytes of caches for the two contexts: not quantised, with 8 and with 4 bits."""
    module = import_module(f"mlx_lm.models.{shape['model_type']}")
    config = SMALL | shape
    if "text_config" in shape:
        config["text_config"] = SMALL | shape["text_config"]
    network = module.Model(module.ModelArgs.from_dict(config))
    network.set_dtype(mx.bfloat16)
    costs = cache_costs(network)
    return [[costs[bits](tokens) for tokens in CONTEXTS] for bits in (None, 8, 4)]


@pytest.mark.parametrize("model", RECOMMENDED_MODELS, ids=lambda model: model.repository)
def test_the_memory_of_long_conversations_is_counted_from_the_models_shapes(model: Any) -> None:
    found = bytes_of(SHAPES[model.repository])
    assert [model.at_32k, model.at_128k] == found[0]
    [row] = re.findall(rf"^\|[^|]*\| `{model.repository}`.*\|$", README.read_text("utf-8"), re.MULTILINE)
    cells = [cell.strip() for cell in row.split("|")[4:-1]]
    assert cells == [" · ".join(map(format_bytes, each)) for each in found]
