"""Bidirectional attention over padded batches, in bounded memory.

The scores of a long text are computed for a few hundred queries at a time: where MLX has no fused kernel (on a CPU)
they would otherwise take gigabytes, and in a layer with a sliding window most keys need not be looked at.
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 512
"""Queries whose scores are computed at a time."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    lengths: mx.array | None,
    *,
    scale: float,
    window: int | None = None,
) -> mx.array:
    """Attend with arrays of (batch, heads, tokens, head size) to the first `lengths` keys of each text (None: to all).

    With a `window`, only to keys that are at most that many tokens away.
    """
    count = queries.shape[2]
    parts = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        first, last = (0, count) if window is None else (max(0, start - window), min(count, stop + window))
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, start:stop],
                keys[:, :, first:last],
                values[:, :, first:last],
                scale=scale,
                mask=attention_mask(start, stop, first, last, lengths, window),
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def attention_mask(
    start: int, stop: int, first: int, last: int, lengths: mx.array | None, window: int | None
) -> mx.array | None:
    """Return the mask for queries `start` to `stop` and keys `first` to `last`; None if nothing is masked."""
    keys = mx.arange(first, last)
    mask = None if lengths is None else (keys[None] < lengths[:, None])[:, None, None]
    if window is not None and (stop - first > window + 1 or last - start > window + 1):
        queries = mx.arange(start, stop)[:, None]
        nearby = mx.abs(queries - keys[None]) <= window
        mask = nearby if mask is None else mask & nearby
        # Padding attends to itself: with nothing to attend to it would become NaN, and NaN times zero is NaN.
        mask = mask | (queries == keys[None])
    return mask
