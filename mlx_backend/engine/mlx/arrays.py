"""What is done with arrays everywhere here, with the types that MLX's own declarations leave out. Knows no tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def evaluate_async(*trees: Any) -> None:
    """Start computing arrays, in lists or dictionaries of any depth, without waiting for them."""
    mx.async_eval(*trees)  # type: ignore[no-untyped-call]  # declared without types


def as_ints(array: mx.array) -> list[int]:
    """Wait for an array of whole numbers ([size]) and return them."""
    return array.tolist()  # type: ignore[return-value]  # declared as any number, or a list of such


def as_floats(array: mx.array) -> list[float]:
    """Wait for an array of numbers ([size]) and return them."""
    return array.tolist()  # type: ignore[return-value]  # as above


def coarsest_dtype(network: Any) -> mx.Dtype:
    """Return the least precise kind of number among a network's parameters that are not packed into integers."""
    dtypes = {value.dtype for _, value in tree_flatten(network.parameters())}
    return next((each for each in (mx.bfloat16, mx.float16) if each in dtypes), mx.float32)
