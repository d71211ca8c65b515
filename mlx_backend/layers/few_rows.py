"""Quantised products of many rows, computed a few rows at a time: without kernels that have to be compiled first.

MLX's CUDA build has kernels for quantised matrices that multiply fewer than 8 rows. Those for more are compiled on the
machine when they are first used: each takes 15 to 35 seconds, and gpt-oss-20b needs six. Until that has been done in
other processes (kernel_compiler.py) rows go through the others, 7 at a time. The rows of a mixture of experts do that
anyway, unless the experts have a multiple of 128 outputs. On a CPU the products are the same, bit for bit.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_ROWS = 7
"""The most rows for which MLX has compiled kernels."""
ALIGNED_OUTPUTS = 128
"""Outputs of which a multiple is computed by other kernels than numbers between."""

_lock = threading.Lock()
_users = 0
_quantized_matmul, _gather_qmm = mx.quantized_matmul, mx.gather_qmm


def use_few_rows() -> Callable[[], None]:
    """Have all networks of this process compute that way, until the function that is returned is called once."""
    global _users
    with _lock:
        _users += 1
        mx.quantized_matmul, mx.gather_qmm = _matmul_of_few, _gather_of_few
    return _stop


def _stop() -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            mx.quantized_matmul, mx.gather_qmm = _quantized_matmul, _gather_qmm


def _matmul_of_few(x: mx.array, w: mx.array, *args: Any, **named: Any) -> mx.array:
    rows = x.size // x.shape[-1]
    if rows <= MAX_ROWS or w.ndim > 2 or len(args) > 2 or not named.get("transpose", True):
        return _quantized_matmul(x, w, *args, **named)
    flat = x.reshape(rows, x.shape[-1])
    pieces = [
        _quantized_matmul(flat[at : at + MAX_ROWS], w, *args, **named) for at in range(0, rows, MAX_ROWS)
    ]
    return mx.concatenate(pieces).reshape(*x.shape[:-1], -1)


def _gather_of_few(x: mx.array, w: mx.array, *args: Any, **named: Any) -> mx.array:
    which = named.get("rhs_indices")
    if (
        which is None
        or named.get("lhs_indices") is not None
        or len(args) > 2
        or (x.shape[-2], w.shape[-2] % ALIGNED_OUTPUTS) != (1, 0)
        or not named.get("transpose", True)
    ):
        return _gather_qmm(x, w, *args, **named)
    shape = mx.broadcast_shapes(x.shape[:-2], which.shape)
    if (rows := math.prod(shape)) <= MAX_ROWS:
        return _gather_qmm(x, w, *args, **named)
    flat = mx.broadcast_to(x, (*shape, *x.shape[-2:])).reshape(rows, 1, -1)
    indices = mx.broadcast_to(which, shape).reshape(rows)
    pieces = [
        _gather_qmm(
            flat[at : at + MAX_ROWS], w, *args, **named | {"rhs_indices": indices[at : at + MAX_ROWS]}
        )
        for at in range(0, rows, MAX_ROWS)
    ]
    return mx.concatenate(pieces).reshape(*shape, 1, -1)
