"""KV caches copied, merged, rewound and compacted. `LayerCaches`, mlx-lm's cache objects, are one sequence's cache."""

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
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.merged_caches import merge_rows
from mlx_backend.engine.mlx.mlx_lm_patches import (
    RewindableRotatingKVCache,
    holds_every_token,
    is_in_order,
    set_write_index,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


type LayerCaches = list[Any]  # one for each layer of the network


TOKEN_BYTES = 4  # of a token in `as_bytes`
PACKED_BITS = 32  # of an element in which quantised values are packed
_LENGTHENED = KVCache | QuantizedKVCache | RotatingKVCache | ChunkedKVCache  # kinds of caches for `lengthen`
_PLAIN = {int, bool, type(None)}  # most of what a layer's attributes hold
MAX_SLACK = 1.25  # allocated over used length of a layer; beyond it a copy is worth its time
MAX_OTHERS = 256  # tokens of a step that may be held for a prefix of a few, as caches grow by so many


def as_bytes(tokens: Sequence[int] | bytes) -> bytes:
    """Pack tokens into bytes, four each, so that comparing two prefixes is one memcmp; return bytes as they are."""
    return tokens if isinstance(tokens, bytes) else array("I", tokens).tobytes()


def alias(layer: Any) -> Any:
    """Return a cache layer with the same contents but independent of the first: writing to either copies."""
    match layer:
        case mx.array():
            return copy.copy(layer)
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
    return [merge_rows(layers) for layers in zip(*caches, strict=True)]


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
            return KVCache()
        case BatchRotatingKVCache(keys=None):
            return RotatingKVCache(layer.max_size)
        case ArraysCache() if any(each is None for each in layer.cache):
            own = ArraysCache(len(layer.cache))
            own.cache = [each if each is None else each[row : row + 1] for each in layer.cache]
            return own
    return layer.extract(row)


def can_merge(layer: Any) -> bool:
    """Whether caches of this kind can be merged into a batch's."""
    return hasattr(layer, "merge") and not getattr(layer, "keep", 0)


def can_rewind(layer: Any) -> bool:
    """Whether the tokens of a step can be taken back from a cache, all but the first."""
    if isinstance(layer, RotatingKVCache):
        return not layer.keep
    return type(layer) in (KVCache, QuantizedKVCache)


def can_lengthen(layers: LayerCaches) -> bool:
    """Whether `lengthen` knows the kinds of all these caches."""
    return all(isinstance(part, _LENGTHENED) for part in _growing(layers))


def lengthen(layers: LayerCaches, count: int, room: int) -> None:
    """Append zeros for so many tokens to what caches hold, and make room for some more.

    A window is only filled up, so its offset is not that of other layers then. Caches that hold nothing are left alone.
    """
    for part in _growing(layers):
        spare = 0 if isinstance(part, RotatingKVCache) else room
        if count + spare:
            zeros = [_zeros_like(each, part, count + spare) for each in (part.keys, part.values)]
            mx.eval(part.update_and_fetch(*zeros))
            part.trim(spare)


def _growing(layers: LayerCaches) -> list[Any]:
    parts = [
        part for layer in layers for part in (layer.caches if isinstance(layer, CacheList) else (layer,))
    ]
    # A model's own kind of cache need not have all methods of mlx-lm's.
    return [part for part in parts if not isinstance(part, ArraysCache) and not _is_empty(part)]


def _is_empty(layer: Any) -> bool:
    return isinstance(layer, _LENGTHENED) and bool(layer.empty())


def _zeros_like(held: Any, layer: Any, count: int) -> mx.array:
    """Return keys or values of so many tokens, as a layer is given them."""
    if isinstance(layer, QuantizedKVCache):
        packed, scales, _ = held
        shape, dtype = (*packed.shape[:2], count, packed.shape[-1] * PACKED_BITS // layer.bits), scales.dtype
    else:
        count = min(count, getattr(layer, "max_size", count))
        shape, dtype = (*held.shape[:2], count, held.shape[-1]), held.dtype
    return mx.zeros(shape, dtype)


def rewind(layers: LayerCaches, count: int) -> None:
    """Take back the last `count` tokens, which must be fewer than the last step had."""
    for layer in layers if count else ():
        if isinstance(layer, RotatingKVCache):
            RewindableRotatingKVCache.trim(layer, count)
        else:
            layer.trim(count)


def rewind_copies(layers: LayerCaches, count: int) -> LayerCaches:
    """Return copies without the last `count` tokens, which must be fewer than the last step had."""
    copies = [alias(layer) for layer in layers]
    rewind(copies, count)
    return copies


def compact_copies(layers: LayerCaches) -> LayerCaches:
    """Return copies that hold what a prefix needs and little else."""
    return [_compact(alias(layer)) for layer in layers]


def can_cut(layers: LayerCaches) -> bool:
    """Whether all tokens of caches but the first ones can be dropped, however many."""
    return all(
        type(layer) is KVCache
        or (isinstance(layer, RotatingKVCache) and not layer.keep and holds_every_token(layer))
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


def can_share(layers: LayerCaches) -> bool:
    """Whether a prefix can use the arrays of caches that a sequence goes on with, which copies what it writes to.

    They are computed with the sequence's next token; a state that no token depends on would not be.
    """
    return all(isinstance(layer, KVCache | RotatingKVCache) and can_rewind(layer) for layer in layers)


def shared_copies(layers: LayerCaches, others: int = 0) -> LayerCaches:
    """Return copies that share arrays with caches for which `can_share` is true, and their room for growth.

    A window is a slice of what its last step computed, with so many `others` beside its tokens. Only where that is far
    more than a prefix needs, as behind a long chunk, it is copied. `compact_copies` has to follow when the caches that
    the others share with are gone.
    """
    copies = [alias(layer) for layer in layers]
    cut = [layer for layer in copies if _is_far_longer(layer, others)]
    evaluate_async([_compact(layer).state for layer in cut])
    return copies


def hidden_bytes(layers: LayerCaches, others: int) -> int:
    """Return what `shared_copies` of layers hold beside what their `nbytes` tell."""
    windows = [layer for layer in layers if isinstance(layer, RotatingKVCache) and layer.keys is not None]
    return sum(
        others * layer.nbytes // layer.keys.shape[2] for layer in windows if not _is_far_longer(layer, others)
    )


def _is_far_longer(layer: Any, others: int) -> bool:
    """Whether a layer is a window of which far more is held than a prefix needs."""
    if not isinstance(layer, RotatingKVCache) or layer.keys is None:
        return False
    length: int = layer.keys.shape[2]
    return length > MAX_SLACK * layer.max_size or others > max(MAX_OTHERS, (MAX_SLACK - 1) * length)


def _compact(layer: Any) -> Any:
    """Drop what a layer holds beside its tokens: what has left a window, and much of the room for growth."""
    match layer:
        case CacheList():
            layer.caches = tuple(_compact(each) for each in layer.caches)
        case ArraysCache():  # whose arrays may be slices of a batch's
            layer.cache = [mx.contiguous(each) if each is not None else None for each in layer.cache]
        case KVCache() if layer.keys is not None and layer.keys.shape[2] > MAX_SLACK * layer.offset:
            keep_slice(layer, slice(layer.offset))
        case RotatingKVCache(keep=0) if layer.keys is not None and is_in_order(layer):
            length = layer.keys.shape[2]
            keep_slice(layer, slice(max(0, length - layer.max_size), length))
            set_write_index(layer, min(length, layer.max_size))
    return layer


def keep_slice(layer: Any, tokens: slice) -> None:
    """Keep some tokens of a layer, and only the memory of those."""
    # A slice, and `whole[...] = slice` too, would hold on to the whole array.
    layer.keys = mx.contiguous(layer.keys[..., tokens, :])
    layer.values = mx.contiguous(layer.values[..., tokens, :])
