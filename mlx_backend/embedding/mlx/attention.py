"""Attention in both directions, over padded rows, in bounded memory.

The scores of a long text are computed for some hundred queries at a time: where MLX has no fused kernel (on a CPU)
they would else take gigabytes, and in a layer with a window most keys need not be looked at.
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 512  # queries


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array | None,
    *,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Attend with (rows, heads, tokens, head) arrays to the first `lengths` keys of each row (None: to all).

    With a `window`, only to keys that are at most so many tokens away.
    """
    count = queries.shape[2]
    parts = []
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        first, last = (0, count) if window is None else (max(0, begin - window), min(count, end + window))
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, begin:end],
                keys[:, :, first:last],
                values[:, :, first:last],
                scale=scale,
                mask=_mask(begin, end, first, last, lengths, window),
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _mask(
    begin: int, end: int, first: int, last: int, lengths: mx.array | None, window: int | None
) -> mx.array | None:
    column = mx.arange(first, last)
    mask = None if lengths is None else (column[None] < lengths[:, None])[:, None, None]
    if window is not None and (end - first > window + 1 or last - begin > window + 1):
        line = mx.arange(begin, end)[:, None]
        near = mx.abs(line - column[None]) <= window
        mask = near if mask is None else mask & near
        # Padding looks at itself: with nothing to look at it would become NaN, and NaN times zero is NaN.
        mask = mask | (line == column[None])
    return mask
