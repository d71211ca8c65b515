"""Quantised weights in long runs: a layer's weights are dequantised first, where that is faster.

MLX's kernels for quantised weights are made for the few tokens of a decode step. Given many, as in a chunk of a
prompt, its CUDA backend multiplies the rows of a mixture's experts one by one, and its CPU backend does so with every
row. There it can be many times faster to dequantise a whole layer, to multiply as if it had never been quantised, and
to free that memory again. Whether it is depends on the device, the shape and the format, so layers of each kind are
timed both ways when a model is loaded. Metal's kernels are made for many rows too, and are left alone.

Knows no caches and no requests. The sources of the layers it replaces are in `KNOWN_SOURCES` (mlx_lm_patches.py).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_backend.device.mlx import gpu_memory, is_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

log = logging.getLogger(__name__)

ROW_COUNTS = (64, 128, 256, 512, 1024, 2048)  # for which layers are timed, until dequantising is faster
MIN_GAIN = 1.25  # how many times faster that has to be
TIMED_RUNS = 3
MAX_TIMED_SECONDS = 0.2  # of a layer as it is, for more rows to be timed
MAX_OUTPUTS = 128  # of a layer that is timed on a CPU, where both ways take as long for each of them
MAX_PENDING_BYTES = 1 << 27  # of dequantised weights that wait to be freed,
MAX_PENDING_SHARE = 1 / 16  # and of a GPU's memory: it stands still for a moment each time that is waited for


class Dequantizing:
    """What the layers of networks that may be dequantised have in common. Together they take `total_bytes` then."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.was_used = False  # since somebody set it to False
        self.skips_products = False  # whether layers compute nothing, and all their outputs are 0
        self._max_pending = int(gpu_memory() * MAX_PENDING_SHARE) or MAX_PENDING_BYTES
        self._pending = 0  # bytes that have been dequantised since an output was waited for
        self._is_disabled = self._is_forced = False

    @property
    def max_pending_bytes(self) -> int:
        """The most that may wait to be freed beside the layer that is computed."""
        return min(self._max_pending, self.total_bytes)

    def disable(self) -> None:
        """Dequantise no more."""
        self._is_disabled = True

    @contextmanager
    def always(self) -> Iterator[None]:
        """Dequantise for any number of rows, and wait for each layer."""
        self._is_forced = True
        try:
            yield
        finally:
            self._is_forced = False

    @contextmanager
    def without_products(self) -> Iterator[None]:
        """Compute none of the layers' products, only what comes between them."""
        self.skips_products = True
        try:
            yield
        finally:
            self.skips_products = False

    def applies(self, rows: int, min_rows: int) -> bool:
        """Whether a layer is to be dequantised for so many rows."""
        if self._is_disabled or not (self._is_forced or rows >= min_rows):
            return False
        self.was_used = True
        return True

    def wait_for(self, output: mx.array, nbytes: int) -> None:
        """Wait for a layer's output if much has been dequantised; MLX may free it only when it is computed."""
        self._pending += nbytes
        if self._is_forced or self._pending > self._max_pending:
            mx.eval(output)
            self._pending = 0


class DequantizableLinear(nn.QuantizedLinear):  # type: ignore[misc]  # MLX's modules have no types
    """A quantised layer that is dequantised for `min_rows` rows and more."""

    dequantizing: Dequantizing
    min_rows: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs ([..., outputs])."""
        if self.dequantizing.skips_products:
            return _no_outputs(x, x.shape[:-1], self["weight"].shape[0])
        if not self.dequantizing.applies(x.size // x.shape[-1], self.min_rows):
            output: mx.array = super().__call__(x)
            return output
        weights = _dequantized(self, x.dtype)
        output = x @ weights.T
        self.dequantizing.wait_for(output, weights.nbytes)
        return output + self["bias"] if "bias" in self else output


class DequantizableSwitchLinear(QuantizedSwitchLinear):  # type: ignore[misc]  # mlx-lm has no types
    """The same for the experts of a mixture. Many rows come sorted by their experts."""

    dequantizing: Dequantizing
    min_rows: int

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs of each row's expert ([..., outputs])."""
        if self.dequantizing.skips_products:
            rows = mx.broadcast_shapes(x.shape[:-2], indices.shape)
            return _no_outputs(x, (*rows, x.shape[-2]), self.output_dims)
        if not sorted_indices or not self.dequantizing.applies(indices.size, self.min_rows):
            output: mx.array = super().__call__(x, indices, sorted_indices)
            return output
        weights = _dequantized(self, x.dtype)
        output = mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
        self.dequantizing.wait_for(output, weights.nbytes)
        return output + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else output


def _no_outputs(x: mx.array, rows: Sequence[int], outputs: int) -> mx.array:
    """Return zeros for a layer's outputs, which are computed behind its inputs."""
    return mx.zeros((*rows, outputs), x.dtype) + 0 * x[..., :1]


_DEQUANTIZABLE: dict[type, type] = {
    nn.QuantizedLinear: DequantizableLinear,
    QuantizedSwitchLinear: DequantizableSwitchLinear,
}


def _dequantized(layer: Any, dtype: mx.Dtype) -> mx.array:
    """Return a layer's weights as numbers: of the kind of its scales, or of `dtype` where those are exponents."""
    return mx.dequantize(
        layer["weight"],
        layer["scales"],
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=None if mx.issubdtype(layer["scales"].dtype, mx.floating) else dtype,
    )


def make_dequantizable(networks: Iterable[Any], dtype: mx.Dtype) -> Dequantizing | None:
    """Have layers of networks dequantised for as many rows as that is faster for; None if it is for none.

    `dtype` is that of their activations.
    """
    if is_gpu() and mx.metal.is_available():
        return None
    dequantizing, started = Dequantizing(), perf_counter()
    limits: dict[tuple[Any, ...], int | None] = {}  # by kind of layer
    for layer in (module for network in networks for module in network.modules()):
        # NVFP4 with a scale for each expert is dequantised by no function of MLX's.
        if type(layer) not in _DEQUANTIZABLE or layer.get("global_scale") is not None:
            continue
        kind = (type(layer), layer.weight.shape, layer.scales.dtype, layer.bits, layer.group_size, layer.mode)
        if kind not in limits:
            limits[kind] = _min_rows(layer, dtype)
            log.debug("Dequantised for so many rows: %s: %s.", kind, limits[kind])
        if (min_rows := limits[kind]) is not None:
            layer.__class__ = _DEQUANTIZABLE[type(layer)]
            layer.dequantizing, layer.min_rows = dequantizing, min_rows
            dequantizing.total_bytes += layer.scales.size * layer.group_size * dtype.size
    found = [each for each in limits.values() if each is not None]
    if not found:
        return None
    log.info(
        "Long prompts are computed with dequantised weights, from %d rows on (found out in %.1f s).",
        min(found),
        perf_counter() - started,
    )
    return dequantizing


def _min_rows(layer: Any, dtype: mx.Dtype) -> int | None:
    """Return from how many rows on a layer should be dequantised; None: for no number that was tried."""
    timed = layer if is_gpu() else _part(layer)
    for rows in ROW_COUNTS:
        inputs = _inputs(timed, rows, dtype)
        quantized = _seconds(timed, inputs)
        with_dequantizing = _seconds(_always_dequantized(timed), inputs)
        if quantized > MIN_GAIN * with_dequantizing:
            return rows
        if quantized > MAX_TIMED_SECONDS:
            break
    return None


def _part(layer: Any) -> Any:
    """Return a layer with some of the outputs of another."""
    part = _copy(layer, type(layer))
    for name in ("weight", "scales", "biases", "bias"):
        if (value := layer.get(name)) is not None:
            part[name] = mx.contiguous(
                value[..., :MAX_OUTPUTS] if name == "bias" else value[..., :MAX_OUTPUTS, :]
            )
    return part


def _always_dequantized(layer: Any) -> Any:
    copy = _copy(layer, _DEQUANTIZABLE[type(layer)])
    copy.dequantizing, copy.min_rows = Dequantizing(), 0
    return copy


def _copy(layer: Any, kind: Any) -> Any:
    copy = kind.__new__(kind)
    copy.__dict__.update(layer.__dict__)
    dict.update(copy, layer)  # a module's own `update` is for its parameters
    return copy


def _inputs(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    """Return what a layer is called with for so many rows; those of experts are spread over all of them."""
    width = layer.scales.shape[-1] * layer.group_size
    if isinstance(layer, nn.QuantizedLinear):
        return (mx.ones((1, rows, width), dtype),)
    experts = mx.arange(rows, dtype=mx.uint32) * layer.num_experts // rows
    return mx.ones((rows, 1, width), dtype), experts, True


def _seconds(layer: Any, inputs: tuple[Any, ...]) -> float:
    """Return how long a layer takes when all that is slow the first time has been done."""
    mx.eval(layer(*inputs))
    least = float("inf")
    for _ in range(TIMED_RUNS):
        started = perf_counter()
        mx.eval(layer(*inputs))
        least = min(least, perf_counter() - started)
    return least
