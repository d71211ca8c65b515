"""Empty caches of the kind that the options ask for, and the reason, in words, if a network cannot run on them.

Knows nothing of batches, prefixes or memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import GROUP_SIZES

if TYPE_CHECKING:
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.models.engine_options import EngineOptions

FIRST_TOKENS_KEPT = 4  # of a text that outgrows --max-kv-size, as in mlx-lm: much attention goes to them


def fresh_caches(network: Any, options: EngineOptions) -> LayerCaches:
    """Return a network's empty caches. Raises EngineError where it has none of the kind that is asked for."""
    layers: LayerCaches = make_prompt_cache(network)
    other = ", ".join(sorted({type(layer).__name__ for layer in layers if type(layer) is not KVCache}))
    if options.kv_bits is not None and options.max_kv_size is not None:
        raise EngineError(
            "--kv-bits and --max-kv-size are not possible together: a cache of a limited size cannot be quantised. "
            "Give one of them."
        )
    if options.max_kv_size is not None:
        if other:
            raise EngineError(
                f"--max-kv-size is not possible with this model: its {other} cannot be limited so; limit the "
                "context with --context-length instead."
            )
        return [RotatingKVCache(options.max_kv_size, keep=FIRST_TOKENS_KEPT) for _ in layers]
    if options.kv_bits is None:
        return layers
    if other:
        raise EngineError(f"--kv-bits is not possible with this model: its {other} cannot be quantised.")
    return [layer.to_quantized(group_size=options.kv_group_size, bits=options.kv_bits) for layer in layers]


def run_first(network: Any, tokens: mx.array, layers: LayerCaches, options: EngineOptions) -> None:
    """Run a network on its empty caches. Raises EngineError if it runs, but not on caches of this kind."""
    try:
        mx.eval(network(tokens, cache=layers))
    except Exception as error:
        if options.kv_bits is None and options.max_kv_size is None:
            raise
        own = make_prompt_cache(network)
        # Raises if the caches are not the reason.
        mx.eval(network(tokens, cache=own))
        raise EngineError(_refusal(options, error, own)) from error


def _refusal(options: EngineOptions, error: Exception, own: LayerCaches) -> str:
    """Say in words why a network that runs on its `own` caches cannot run on those that were asked for."""
    if options.kv_bits is None:
        return (
            "--max-kv-size is not possible with this model: its layers cannot run on caches of a limited size. Start "
            "the server without it."
        )
    text = (
        "--kv-bits is not possible with this model: its layers cannot run on caches of "
        f"{options.kv_bits} bits in groups of {options.kv_group_size}"
    )
    if "[quantize]" in str(error):
        sizes = {each.shape[-1] for layer in own for each in (layer.keys, layer.values) if each is not None}
        possible = [group for group in GROUP_SIZES if not any(size % group for size in sizes)]
        advice = f"Give --kv-group-size {max(possible)}, or start" if possible else "Start"
        return (
            f"{text}, because the sizes of its keys and values ({', '.join(map(str, sorted(sizes)))}) are not "
            f"multiples of that. {advice} the server without --kv-bits."
        )
    return f"{text}, because its attention reads only plain ones. Start the server without it."
