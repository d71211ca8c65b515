"""Attention on keys and values that are held quantised, and of a few tokens by themselves.

mlx-lm's `QuantizedKVCache` gives attention tuples, which only its own function for them reads: not one with sinks
(gpt-oss), nor layers that compute attention by themselves (MLA). And for a prompt's chunk that function holds a
number for each pair of tokens, in every head. Here the cache (kv_caches.py) gives arrays, dequantised when they are
computed, so that every network runs on it as on any other and prompts take MLX's fused attention; for a few tokens,
as of a reply, attention reads what is held as it is, where MLX can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models import base

from mlx_backend.device.mlx import prepares_for_lengths

if TYPE_CHECKING:
    from collections.abc import Callable


MAX_SINGLE_QUERIES = 16
"""The most tokens of a segment for each of which attention is computed by itself."""


class Quantization(NamedTuple):
    """How keys and values are quantised, by the names that MLX's functions take."""

    group_size: int
    bits: int


class DequantizedArray(mx.array):
    """Keys or values that are held as `codes`, scales and biases.

    It is computed only if something reads it, and what is made of it is a plain array. It may not be changed in place,
    which networks do with none that a cache returns.
    """

    codes: tuple[mx.array, mx.array, mx.array]
    quantization: Quantization

    @classmethod
    def of(cls, codes: tuple[mx.array, mx.array, mx.array], quantization: Quantization) -> Self:
        """Return what the codes stand for."""
        array = cls(mx.dequantize(*codes, *quantization))
        array.codes, array.quantization = codes, quantization
        return array

    def times(self, rows: mx.array, *, transpose: bool) -> mx.array:
        """Multiply rows with it, as it is held."""
        return mx.quantized_matmul(rows, *self.codes, transpose=transpose, **self.quantization._asdict())


def compute_attention(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Compute attention as mlx-lm does, but that of a few tokens on quantised keys and values as they are held.

    Not with CUDA: MLX's products with quantised matrices take no slices there, as keys with room for more are.
    """
    is_held = isinstance(keys, DequantizedArray) and isinstance(values, DequantizedArray)
    if is_held and queries.shape[2] <= MAX_SINGLE_QUERIES and not prepares_for_lengths():
        return _attend_quantized(queries, keys, values, scale, mask, sinks)
    attended: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return attended


def _attend_quantized(
    queries: mx.array,
    keys: DequantizedArray,
    values: DequantizedArray,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Compute attention with each key-value head's queries as the rows of one matrix."""
    rows, heads, length, size = queries.shape
    _, kv_heads, context, _ = keys.shape
    by_head = (rows, kv_heads, heads // kv_heads, length, context)
    scores = keys.times((queries * scale).reshape(rows, kv_heads, -1, size), transpose=True).reshape(by_head)
    if isinstance(mask, str) and length > 1:  # "causal"
        places = mx.arange(context)
        mask = places[context - length :, None] >= places
    if isinstance(mask, mx.array):
        own = mx.broadcast_to(mask, (rows, heads, length, context)).reshape(by_head)
        scores = mx.where(own, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + own
    weights = mx.softmax(scores, axis=-1, precise=True)
    attended = values.times(weights.reshape(rows, kv_heads, -1, context), transpose=False)
    attended = attended.reshape(rows, heads, length, -1)
    if sinks is None:
        return attended
    # A sink is one more score, of a key whose value is zero.
    total = mx.logsumexp(scores.astype(mx.float32), axis=-1).reshape(rows, heads, length, 1)
    share = mx.sigmoid(total - sinks.astype(mx.float32)[:, None, None])
    return attended * share.astype(attended.dtype)


def attend_singly(
    compute: Callable[..., mx.array], queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any
) -> mx.array:
    """Compute the attention of each of a few tokens by itself, where each sees all keys up to its own."""
    length = queries.shape[2]
    if not 1 < length <= MAX_SINGLE_QUERIES or not isinstance(mask, str) or not isinstance(keys, mx.array):
        return compute(queries, keys, values, cache, mask)
    ends = range(keys.shape[2] - length + 1, keys.shape[2] + 1)
    singles = zip(mx.split(queries, length, axis=2), ends, strict=True)
    return mx.concatenate(
        [compute(q, keys[:, :, :end], values[:, :, :end], cache, None) for q, end in singles], axis=2
    )
