"""KV caches made as the options ask, copied, merged, rewound and compacted.

`LayerCaches`, mlx-lm's cache objects, are one sequence's cache. Knows nothing of batches, prefixes or memory.
"""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_backend.engine.mlx.mlx_lm_patches.attention import Quantization
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache, SharedArrays
from mlx_backend.engine.mlx.mlx_lm_patches.sliding_windows import (
    RewindableRotatingKVCache,
    holds_every_token,
    is_in_order,
    set_write_index,
)
from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.engine_options import GROUP_SIZES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.models.engine_options import EngineOptions


type LayerCaches = list[Any]  # one for each layer of the network


TOKEN_BYTES = 4
"""Bytes of a token in `as_bytes`."""
MAX_SLACK = 1.25
"""Allocated over used length of a layer, beyond which a copy is worth its time."""
# The types of most of what a layer's attributes hold, which `alias` need not copy.
_PLAIN = {int, bool, type(None)}


def fresh_caches(network: Any, options: EngineOptions) -> LayerCaches:
    """Return a network's empty caches. Raises EngineError where it has none of the kind that is asked for.

    Quantised are those that hold all tokens; windows and states are short, and stay as they are.
    """
    layers: LayerCaches = make_prompt_cache(network)
    if options.kv_bits is None:
        return list(map(GrowingKVCache.of, layers))
    kinds = {type(part) for layer in layers for part in parts_of(layer)}
    if KVCache not in kinds:
        other = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise EngineError(f"--kv-bits is not possible with this model: its {other} cannot be quantised.")
    quantization = Quantization(options.kv_group_size, options.kv_bits)
    return [_quantized(layer, quantization) for layer in layers]


def _quantized(layer: Any, quantization: Quantization) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_quantized(each, quantization) for each in layer.caches))
    return GrowingKVCache(SharedArrays((), quantization)) if type(layer) is KVCache else layer


def parts_of(layer: Any) -> LayerCaches:
    """Return the caches of a layer, which may have several."""
    return (
        [part for each in layer.caches for part in parts_of(each)]
        if isinstance(layer, CacheList)
        else [layer]
    )


def is_quantized(layer: Any) -> bool:
    """Whether a cache, or one of its parts, holds quantised keys and values."""
    return any(isinstance(part, GrowingKVCache) and part.is_quantized for part in parts_of(layer))


def kind_of(layer: Any) -> str:
    """Return what a cache is called in messages."""
    return "quantised KVCache" if is_quantized(layer) else type(layer).__name__


def run_first(network: Any, tokens: mx.array, layers: LayerCaches, options: EngineOptions) -> None:
    """Run a network on its empty caches. Raises EngineError if it runs, but not on caches of this kind."""
    try:
        mx.eval(network(tokens, cache=layers))
    except Exception as error:
        if options.kv_bits is None:
            raise
        own = make_prompt_cache(network)
        # Raises if the caches are not the reason.
        mx.eval(network(tokens, cache=own))
        raise EngineError(_refusal(options, error, own)) from error


def _refusal(options: EngineOptions, error: Exception, own: LayerCaches) -> str:
    """Say in words why a network that runs on its `own` caches cannot run on those that were asked for."""
    text = (
        "--kv-bits is not possible with this model: its layers cannot run on caches of "
        f"{options.kv_bits} bits in groups of {options.kv_group_size}"
    )
    if "[quantize]" in str(error):
        full = [part for layer in own for part in parts_of(layer) if type(part) is KVCache]
        sizes = {each.shape[-1] for layer in full for each in (layer.keys, layer.values) if each is not None}
        possible = [group for group in GROUP_SIZES if not any(size % group for size in sizes)]
        advice = f"Give --kv-group-size {max(possible)}, or start" if possible else "Start"
        return (
            f"{text}, because the sizes of its keys and values ({', '.join(map(str, sorted(sizes)))}) are not "
            f"multiples of that. {advice} the server without --kv-bits."
        )
    return f"{text} ({first_line(error)}). Start the server without it."


def as_bytes(tokens: Sequence[int] | bytes) -> bytes:
    """Pack tokens into bytes, four each, so that comparing two prefixes is one memcmp; return bytes as they are."""
    return tokens if isinstance(tokens, bytes) else array("I", tokens).tobytes()


def alias(layer: Any) -> Any:
    """Return a cache layer with the same contents but independent of the first: writing to either copies."""
    match layer:
        case mx.array():
            return copy.copy(layer)
        case SharedArrays():
            return layer.copy()
        case list():
            return [alias(item) for item in layer]
        case tuple():
            return tuple(alias(item) for item in layer)
        case _ if hasattr(type(layer), "state"):  # the instance's would be computed: slices of all it holds
            twin = layer.__class__.__new__(layer.__class__)
            twin.__dict__.update(
                {
                    name: value if type(value) in _PLAIN else alias(value)
                    for name, value in layer.__dict__.items()
                }
            )
            return twin
        case _:
            return layer


def merged(caches: Sequence[LayerCaches]) -> LayerCaches:
    """Return the caches of several sequences as one batch's, in their order."""
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def select_rows(rows: Sequence[int], layers: LayerCaches) -> LayerCaches:
    """Keep some rows of a batch's caches; one alone gets caches of the model's own kind."""
    if len(rows) == 1:
        return extract_row(layers, rows[0])
    for layer in layers:
        layer.filter(list(rows))
    return layers


def extract_row(layers: LayerCaches, row: int) -> LayerCaches:
    """Return the caches of one row of a batch's, of the model's own kind."""
    return [_extract(layer, row) for layer in layers]


def _extract(layer: Any, row: int) -> Any:
    """Extract a row also where nothing is cached, as in a layer without attention: mlx-lm's batches cannot."""
    match layer:
        case CacheList():
            return CacheList(*(_extract(each, row) for each in layer.caches))
        case BatchKVCache(keys=None):
            return GrowingKVCache()
        case BatchRotatingKVCache(keys=None):
            return RotatingKVCache(layer.max_size)
        case ArraysCache() if any(each is None for each in layer.cache):
            own = ArraysCache(len(layer.cache))
            own.cache = [each if each is None else each[row : row + 1] for each in layer.cache]
            return own
    return GrowingKVCache.of(layer.extract(row))


def can_merge(layer: Any) -> bool:
    """Whether caches of this kind can be merged into a batch's."""
    return hasattr(layer, "merge") and not is_quantized(layer)


def can_rewind(layer: Any) -> bool:
    """Whether the tokens of a step can be taken back from a cache, all but the first."""
    return isinstance(layer, RotatingKVCache) or type(layer) in (KVCache, GrowingKVCache)


def rewind(layers: LayerCaches, count: int) -> None:
    """Take back the last `count` tokens, which must be fewer than the last step had."""
    for layer in layers if count else ():
        if isinstance(layer, RotatingKVCache):
            RewindableRotatingKVCache.trim(layer, count)
        else:
            layer.trim(count)


def rewind_copies(layers: LayerCaches, count: int) -> LayerCaches:
    """Return copies to read without the last `count` tokens, which must be fewer than the last step had."""
    copies = [layer.reader() if isinstance(layer, GrowingKVCache) else alias(layer) for layer in layers]
    rewind(copies, count)
    return copies


def compact_copies(layers: LayerCaches) -> LayerCaches:
    """Return copies that hold what a prefix needs and little else, of kinds that mlx-lm reads from files."""
    return [_compact(alias(layer)) for layer in layers]


def can_cut(layers: LayerCaches) -> bool:
    """Whether all tokens of caches but the first ones can be dropped, however many."""
    return all(
        type(layer) in (KVCache, GrowingKVCache)
        or (isinstance(layer, RotatingKVCache) and holds_every_token(layer))
        for layer in layers
    )


def cut(layers: LayerCaches, length: int) -> None:
    """Keep the first tokens of caches for which `can_cut` is true, as slices."""
    for layer in layers:
        if layer.keys is not None:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            layer.offset = length
            if isinstance(layer, RotatingKVCache):
                set_write_index(layer, length)


def is_growing(layer: Any) -> bool:
    """Whether a cache holds all tokens in arrays that prefixes can share."""
    return isinstance(layer, GrowingKVCache) and not layer.empty()


def _compact(layer: Any) -> Any:
    """Drop what a layer holds in addition to its tokens: what has left a window, and much of the room for growth."""
    match layer:
        case CacheList():
            layer.caches = tuple(_compact(each) for each in layer.caches)
        case ArraysCache():  # whose arrays may be slices of a batch's
            layer.cache = [mx.contiguous(each) if each is not None else None for each in layer.cache]
        case GrowingKVCache():
            if layer.arrays.room > MAX_SLACK * layer.offset:
                layer.arrays = layer.arrays.part(0, layer.offset).own_memory()
            return layer.to_file()
        case KVCache() if layer.keys is not None and layer.keys.shape[2] > MAX_SLACK * layer.offset:
            keep_slice(layer, slice(layer.offset))
        case RotatingKVCache() if layer.keys is not None and is_in_order(layer):
            length = layer.keys.shape[2]
            keep_slice(layer, slice(max(0, length - layer.max_size), length))
            set_write_index(layer, min(length, layer.max_size))
    return layer


def keep_slice(layer: Any, tokens: slice) -> None:
    """Keep some tokens of a layer, and only the memory of those."""
    # A slice, and `whole[...] = slice` too, would hold on to the whole array.
    layer.keys = mx.contiguous(layer.keys[..., tokens, :])
    layer.values = mx.contiguous(layer.values[..., tokens, :])
