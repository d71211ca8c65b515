"""Sharding: one network over several processes, and how many processes can share it.

Tensor parallel where mlx-lm supports it for the architecture (every rank has a part of every layer), else pipeline
parallel (every rank has some of the layers). Knows nothing of requests, or of how the ranks communicate.
"""

from __future__ import annotations

import logging
from math import gcd
from typing import TYPE_CHECKING, Any

from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx

log = logging.getLogger(__name__)

# What is divided among ranks in whole numbers: its key in config.json, and the words for it.
_HEADS = {
    "num_attention_heads": "attention heads",
    "linear_num_key_heads": "linear key heads",
    "linear_num_value_heads": "linear value heads",
}
_SHARED_HEADS = {"num_key_value_heads": "key-value heads", "num_attention_groups": "key-value heads"}
_COUNTS = ("num_attention_heads", "n_heads", "num_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads")


def shard(network: Any, config: Mapping[str, Any], group: mx.distributed.Group, name: str) -> None:
    """Reduce a network whose weights are not read yet to this rank's part. Raises EngineError if that is impossible."""
    size = group.size()
    inner: Any = getattr(network, "model", None)
    if hasattr(network, "shard"):
        heads = _heads(config)
        if not all(_divides(size, count, shared=kind in _SHARED_HEADS) for kind, count in heads.items()):
            raise EngineError(_refusal(name, size, heads))
        try:
            network.shard(group)
        except Exception as error:
            raise EngineError(f"{_refusal(name, size, heads)} ({type(error).__name__}: {error})") from error
        if any(getattr(module, count, None) == 0 for module in network.modules() for count in _COUNTS):
            raise EngineError(_refusal(name, size, heads))
        log.info("Each of the %d ranks has a part of every layer.", size)
    elif hasattr(inner, "pipeline"):
        layers = len(inner.layers)
        try:
            inner.pipeline(group)
        except Exception as error:
            raise EngineError(
                f"The {layers} layers of {name!r} cannot be divided among {size} processes: {error}."
            ) from error
        log.info("This rank has layers %d to %d of %d.", inner.start_idx, inner.end_idx - 1, layers)
    else:
        raise EngineError(
            f"{name!r} cannot be run by {size} processes: mlx-lm has no way to divide a "
            f"{config.get('model_type')!r} model. Start one process."
        )


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    inner = config.get("text_config")
    written = {**config, **inner} if isinstance(inner, dict) else config
    return {
        kind: written[kind]
        for kind in (*_HEADS, *_SHARED_HEADS)
        if isinstance(written.get(kind), int) and written[kind] > 0
    }


def _divides(size: int, count: int, *, shared: bool) -> bool:
    # Several ranks may have the same key-value head, where the architecture's sharding provides for it.
    return count % size == 0 or (shared and size % count == 0)


def _refusal(name: str, size: int, heads: Mapping[str, int]) -> str:
    divisor = gcd(*heads.values())
    counts = [str(count) for count in range(1, divisor + 1) if divisor % count == 0]
    kinds = _HEADS | _SHARED_HEADS
    listed = " and ".join(f"{count} {kinds[kind]}" for kind, count in heads.items()) or "its layers"
    possible = f" Possible are {_or(counts)} processes." if heads else ""
    return f"{name!r} cannot be divided among {size} processes: it has {listed}.{possible}"


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
