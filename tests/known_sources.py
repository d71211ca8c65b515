"""The sources of mlx and mlx-lm that this engine was written for, so that an upgrade is a decision and not an accident.

Tried with mlx-lm 0.32.2 on mlx 0.32.4. A test compares the digests in `KNOWN_SOURCES` with the installed source.
Besides what is replaced or used in engine/mlx/mlx_lm_patches, the engine rests on how the cache classes behave: all
their state is in instance attributes, `merge`, `extract`, `filter` and `extend` make batches and take them apart, and
`save_prompt_cache` lays files out in a certain way.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect

KNOWN_SOURCES: dict[str, str] = {
    "mlx.nn.Conv1d": "8a6ffc53d31f365c",
    "mlx.nn.QuantizedLinear": "bd5bdef45d3be81e",
    "mlx.nn.RoPE": "627d3750e5aab4b7",
    "mlx_lm.models.afm7.KVReuseAttention": "635429f4a189ff75",
    "mlx_lm.models.base.create_attention_mask": "a8ebacf963b3f96e",
    "mlx_lm.models.base.scaled_dot_product_attention": "8deba4a8a8fb4e29",
    "mlx_lm.models.cache.ArraysCache": "57f70ab445ac06a4",
    "mlx_lm.models.cache.BatchKVCache": "474e6fe46261a118",
    "mlx_lm.models.cache.BatchRotatingKVCache": "ce5df245ade3e814",
    "mlx_lm.models.cache.CacheList": "ccf928f229ddf1df",
    "mlx_lm.models.cache.ChunkedKVCache": "f8850fad374b1300",
    "mlx_lm.models.cache.KVCache": "9e33b1620e278398",
    "mlx_lm.models.cache.QuantizedKVCache": "d24f51c8c3ec664c",
    "mlx_lm.models.cache.RotatingKVCache": "0ccede170f3532a2",
    "mlx_lm.models.cache._BaseCache": "bbc0249f16c8c226",
    "mlx_lm.models.cache.load_prompt_cache": "1a64604fd5bd03f4",
    "mlx_lm.models.cache.make_prompt_cache": "ae8ee8ce5ac69f2a",
    "mlx_lm.models.cache.save_prompt_cache": "30590484ea78ffe4",
    "mlx_lm.models.deepseek_v3.DeepseekV3Attention": "2fdb470c022448ec",
    "mlx_lm.models.gated_delta.gated_delta_update": "261212fc0a75471f",
    "mlx_lm.models.glm4_moe_lite.Glm4MoeLiteAttention": "82ac3bbe3e1c0104",
    "mlx_lm.models.gpt2.GPT2Model": "a1bda0b149489ada",
    "mlx_lm.models.gpt_bigcode.GPTBigCodeModel": "773745ddaaaa9e2e",
    "mlx_lm.models.llama4.Attention": "01574f2ed25f46ca",
    "mlx_lm.models.llama4.LlamaModel": "341b0f143579f042",
    "mlx_lm.models.llama4.Model": "bb1f2e32adae143a",
    "mlx_lm.models.rope_utils.Llama3RoPE": "0308fc565df55065",
    "mlx_lm.models.rope_utils.ProportionalRoPE": "98abc69972f2c90a",
    "mlx_lm.models.rope_utils.SuScaledRoPE": "9b6b1c87968a0be7",
    "mlx_lm.models.rope_utils.YarnRoPE": "0d55b251820dfcf6",
    "mlx_lm.models.ssm.ssm_update": "f5b9ba938efe5a86",
    "mlx_lm.models.switch_layers.QuantizedSwitchLinear": "831d2e1eed0af008",
    "mlx_lm.models.switch_layers.SwitchLinear": "7316d3764459dff4",
    "mlx_lm.tokenizer_utils.TokenizerWrapper": "99b30b4093dc627d",
    "mlx_lm.utils.load_model": "7ee59ae12366f86b",
}


def changed_sources() -> dict[str, str]:
    """Return the names in `KNOWN_SOURCES` whose installed source is another one, with the digests of that."""
    return {name: found for name, known in KNOWN_SOURCES.items() if (found := _source_digest(name)) != known}


def _source_digest(name: str) -> str:
    """Return the digest of a function's or class's source, "missing" if there is none of this name."""
    module, _, attribute = name.rpartition(".")
    try:
        source = inspect.getsource(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError):
        return "missing"
    return hashlib.sha256(source.encode()).hexdigest()[:16]
