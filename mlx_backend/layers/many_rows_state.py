"""What the layers of a model share that have an implementation for many rows (many_rows.py): which one they use."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.mlx import gpu_memory
from mlx_backend.layers.expert_blocks import RowBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx import nn

MAX_PENDING_BYTES = 1 << 27  # of dequantised weights that wait to be freed,
MAX_PENDING_SHARE = 1 / 16  # or a share of a GPU's memory: each wait stalls the GPU briefly


class _WithoutProducts:
    """A run in which no layer multiplies."""

    def __init__(self, nan_from: int | None) -> None:
        self.calls: list[nn.Module] = []
        self._nan_from = nan_from

    def outputs_of(self, layer: nn.Module) -> float:
        """Note the call of a layer and return the value of its outputs."""
        is_nan = self._nan_from is not None and len(self.calls) >= self._nan_from
        self.calls.append(layer)
        # Not 0: Gemma 3n divides by the root mean square of an output.
        return math.nan if is_nan else 1.0


class ManyRows:
    """What the replaced layers share.

    They use their implementation for many rows while `is_enabled`, each from its own number of rows on; `min_rows` is
    the smallest of these. Their dequantised weights would take `dequantized_bytes` together, those of the largest layer
    `largest_layer_bytes`.
    """

    def __init__(self) -> None:
        self.min_rows = 0
        self.has_experts = False  # whose rows are tokens times experts per token
        self.is_enabled = True
        self.dequantized_bytes = self.largest_layer_bytes = 0
        self.was_used = False  # since the caller last set it to False
        self._without: _WithoutProducts | None = None
        self._skips_unread = False
        self._max_pending = int(gpu_memory() * MAX_PENDING_SHARE) or MAX_PENDING_BYTES
        self._pending = 0  # bytes that have been dequantised since an output was waited for
        self._arranged: tuple[mx.array, RowBlocks] | None = None
        self._is_forced = False

    @property
    def max_pending_bytes(self) -> int:
        """The most bytes that may wait to be freed beside the layer that is computed."""
        return min(self._max_pending, self.dequantized_bytes)

    @property
    def max_dequantized_bytes(self) -> int:
        """The most bytes that dequantised weights may take at a time."""
        return self.max_pending_bytes + self.largest_layer_bytes

    @contextmanager
    def always(self) -> Iterator[None]:
        """Use the implementation for many rows for any number of rows, and wait for each layer."""
        self._is_forced = True
        try:
            yield
        finally:
            self._is_forced = False

    @contextmanager
    def without_products(self, nan_from: int | None = None) -> Iterator[list[nn.Module]]:
        """Compute none of the layers' products, only what comes between them: all outputs are 1.

        From call number `nan_from` on, they are NaN. Yields the layers that are called, in the order of their calls.
        """
        self._without = _WithoutProducts(nan_from)
        try:
            yield self._without.calls
        finally:
            self._without = None

    @contextmanager
    def without_unread(self) -> Iterator[None]:
        """Compute no products of layers whose `is_unread` is set, for a run of which only the caches are needed.

        MLX never computes what nothing reads. But these layers wait for many rows, to free weights, or on a CPU to see
        each row's expert, and everything that such a layer's inputs need would be computed for that.
        """
        self._skips_unread = True
        try:
            yield
        finally:
            self._skips_unread = False

    def outputs_instead(self, layer: Any) -> float | None:
        """Return what all outputs of a layer are in place of its products; None if it is to multiply."""
        if self._without is not None:
            return self._without.outputs_of(layer)
        return 0.0 if self._skips_unread and layer.is_unread else None

    def applies(self, rows: int, min_rows: int) -> bool:
        """Whether a layer should use the implementation for many rows."""
        if not self.is_enabled or not (self._is_forced or rows >= min_rows):
            return False
        self.was_used = True
        return True

    def blocks_of(self, indices: mx.array, num_experts: int) -> RowBlocks:
        """Return the blocks of rows whose experts are given. A layer's three matrices get the same `indices`."""
        if self._arranged is None or self._arranged[0] is not indices:
            self._arranged = indices, RowBlocks.of(indices, num_experts)
        return self._arranged[1]

    def wait_for(self, output: mx.array, nbytes: int) -> None:
        """Wait for an output if much has been dequantised: MLX can free it only when the output is computed."""
        self._pending += nbytes
        if self._is_forced or self._pending > self._max_pending:
            mx.eval(output)
            self._pending = 0
