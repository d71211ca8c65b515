"""Which layers a chunk of a prompt can leave out: those that no cache depends on.

A chunk that does not end its prompt is run to fill the caches. What follows the last layer that writes into one, such
as the experts of the last block, is not needed. Which layers those are is found by trying: their outputs are made NaN,
and floating-point numbers that are computed from NaN are NaN. Only layers called last in a run are ever left out.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.layers.many_rows import ManyRows


def find_unread(many_rows: ManyRows, run: Callable[[], Sequence[mx.array]]) -> int:
    """Note which of the layers with an implementation for many rows are unread, and return their number.

    `run` runs a network on a few tokens, and returns all arrays that are kept of it. It is called about log2(calls of
    layers) + 2 times, and none of these layers multiplies anything.
    """
    with many_rows.without_products() as calls:
        expected = run()
    if not expected:
        return 0

    def is_unread_from(first: int) -> bool:
        with many_rows.without_products(nan_from=first):
            return all(map(mx.array_equal, run(), expected))  # NaN equals nothing

    first = bisect_left(range(len(calls)), True, key=is_unread_from)
    read = {id(layer) for layer in calls[:first]}  # a layer may be called again later
    unread: dict[int, Any] = {id(layer): layer for layer in calls[first:] if id(layer) not in read}
    for layer in unread.values():
        layer.is_unread = True
    return len(unread)
