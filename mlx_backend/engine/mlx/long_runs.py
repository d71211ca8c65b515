"""Layers in long runs, as of a chunk of a prompt: computed in another way than for a few tokens, where it is faster.

MLX's kernels for quantised weights are made for the few tokens of a decode step. Given many, its CUDA backend
multiplies the rows of a mixture's experts one by one, and its CPU backend does so with every row. There it can be many
times faster to dequantise a whole layer, to multiply as if it had never been quantised, and to free that memory again.
On a CPU even the rows of experts that are not quantised are multiplied one by one, though those of one expert could be
a matrix. What is faster depends on the device, the shape and the format, so layers of each kind are timed both ways
when a model is loaded. Metal's kernels are made for many rows too, and are left alone.

Knows no caches and no requests. The sources of the layers it replaces are in `KNOWN_SOURCES` (mlx_lm_patches.py).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.device.mlx import gpu_memory, is_gpu
from mlx_backend.engine.mlx.arrays import as_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

log = logging.getLogger(__name__)

ROW_COUNTS = (
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
    2048,
)  # for which layers are timed, until the other way is faster
MIN_ROWS_ON_GPU = 64  # so that decode steps are left alone
MIN_GAIN = 1.25  # how many times faster that has to be
MIN_WEIGHTS = 1 << 16  # of a layer for which it matters
TIMED_RUNS = 3
MAX_TIMED_SECONDS = 0.2  # of a layer as it is, for more rows to be timed
MAX_OUTPUTS = 128  # of a layer that is timed on a CPU, where both ways take as long for each of them
MAX_PENDING_BYTES = 1 << 27  # of dequantised weights that wait to be freed,
MAX_PENDING_SHARE = 1 / 16  # and of a GPU's memory: it stands still for a moment each time that is waited for


class LongRuns:
    """What the layers of networks that have another way for long runs have in common.

    Their dequantised weights take `dequantized_bytes` together.
    """

    def __init__(self) -> None:
        self.dequantized_bytes = 0
        self.was_used = False  # since somebody set it to False
        self.skips_products = False  # whether layers compute nothing, and all their outputs are 0
        self._max_pending = int(gpu_memory() * MAX_PENDING_SHARE) or MAX_PENDING_BYTES
        self._pending = 0  # bytes that have been dequantised since an output was waited for
        self._is_disabled = self._is_forced = False

    @property
    def max_pending_bytes(self) -> int:
        """The most that may wait to be freed beside the layer that is computed."""
        return min(self._max_pending, self.dequantized_bytes)

    def disable(self) -> None:
        """Compute all runs like short ones from now on."""
        self._is_disabled = True

    @contextmanager
    def always(self) -> Iterator[None]:
        """Compute all runs like long ones, and wait for each layer."""
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
        """Whether so many rows are a long run for a layer."""
        if self._is_disabled or not (self._is_forced or rows >= min_rows):
            return False
        self.was_used = True
        return True

    def wait_for(self, output: mx.array, nbytes: int) -> None:
        """Wait for an output if much has been dequantised; MLX may free it only when that is computed."""
        self._pending += nbytes
        if self._is_forced or self._pending > self._max_pending:
            mx.eval(output)
            self._pending = 0


class LongRunLinear(nn.QuantizedLinear):  # type: ignore[misc]  # MLX's modules have no types
    """A quantised layer that is dequantised for `min_rows` rows and more."""

    long_runs: LongRuns
    min_rows: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs ([..., outputs])."""
        is_long = self.long_runs.applies(x.size // x.shape[-1], self.min_rows)
        if self.long_runs.skips_products:
            return _no_outputs(x, x.shape[:-1], self["weight"].shape[0])
        if not is_long:
            output: mx.array = super().__call__(x)
            return output
        weights = _dequantized(self, x.dtype)
        output = x @ weights.T
        self.long_runs.wait_for(output, weights.nbytes)
        return output + self["bias"] if "bias" in self else output


class LongRunExperts(SwitchLinear):  # type: ignore[misc]  # mlx-lm has no types
    """Experts whose rows are grouped for long runs. Many rows come sorted by their experts."""

    long_runs: LongRuns
    min_rows: int

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs of each row's expert ([..., outputs])."""
        return _experts_outputs(self, super().__call__, x, indices, sorted_indices)

    def products(self, x: mx.array, indices: mx.array) -> mx.array:
        """Multiply sorted rows ([rows, 1, inputs]) by their experts' weights."""
        return _grouped(x, indices, lambda expert, rows: rows @ self["weight"][expert].T)


class LongRunQuantizedExperts(QuantizedSwitchLinear):  # type: ignore[misc]  # mlx-lm has no types
    """Quantised experts that are dequantised for long runs: those that have rows, where these have to be grouped."""

    long_runs: LongRuns
    min_rows: int

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs of each row's expert ([..., outputs])."""
        return _experts_outputs(self, super().__call__, x, indices, sorted_indices)

    def products(self, x: mx.array, indices: mx.array) -> mx.array:
        """Multiply sorted rows ([rows, 1, inputs]) by their experts' weights."""
        if not is_gpu():
            return _grouped(x, indices, self._product)
        weights = _dequantized(self, x.dtype)
        output = mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
        self.long_runs.wait_for(output, weights.nbytes)
        return output

    def _product(self, expert: int, rows: mx.array) -> mx.array:
        output = rows @ _dequantized(self, rows.dtype, expert).T
        mx.eval(output)  # which a CPU loses nothing by, and frees the weights
        return output


def _experts_outputs(
    layer: Any, as_it_is: Callable[..., mx.array], x: mx.array, indices: mx.array, is_sorted: bool
) -> mx.array:
    is_long = is_sorted and layer.long_runs.applies(indices.size, layer.min_rows)
    if layer.long_runs.skips_products:
        rows = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        return _no_outputs(x, (*rows, x.shape[-2]), layer.output_dims)
    if not is_long:
        return as_it_is(x, indices, is_sorted)
    output: mx.array = layer.products(x, indices)
    return output + mx.expand_dims(layer["bias"][indices], -2) if "bias" in layer else output


def _grouped(x: mx.array, indices: mx.array, product: Callable[[int, mx.array], mx.array]) -> mx.array:
    """Return products of sorted rows ([rows, 1, inputs]), of which `product` computes those of each expert."""
    outputs, start = [], 0
    for expert, same in groupby(as_ints(indices)):
        end = start + len(list(same))
        outputs.append(product(expert, x[start:end, 0]))
        start = end
    return mx.concatenate(outputs)[:, None]


def _no_outputs(x: mx.array, rows: Sequence[int], outputs: int) -> mx.array:
    """Return zeros for a layer's outputs, which are computed behind its inputs."""
    return mx.zeros((*rows, outputs), x.dtype) + 0 * x[..., :1]


def _dequantized(layer: Any, dtype: mx.Dtype, expert: int | None = None) -> mx.array:
    """Return the weights of a layer, or of an expert, as numbers.

    They are of the kind of its scales, or of `dtype` where those are exponents.
    """
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    if expert is not None:
        weight, scales, biases = (each if each is None else each[expert] for each in (weight, scales, biases))
    return mx.dequantize(
        weight,
        scales,
        biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=None if mx.issubdtype(scales.dtype, mx.floating) else dtype,
    )


_OTHER_WAY: dict[type, type] = {
    nn.QuantizedLinear: LongRunLinear,
    QuantizedSwitchLinear: LongRunQuantizedExperts,
    SwitchLinear: LongRunExperts,
}


def prepare_long_runs(networks: Iterable[Any], dtype: mx.Dtype, *, dequantize: bool) -> LongRuns | None:
    """Have layers of networks computed in the other way for as many rows as that is faster for; None if it never is.

    `dtype` is that of their activations. Without `dequantize` no weights are dequantised.
    """
    long_runs, started = LongRuns(), perf_counter()
    limits: dict[tuple[Any, ...], int | None] = {}  # by kind of layer
    for layer in (module for network in networks for module in network.modules()):
        if not _has_other_way(layer, dequantize=dequantize):
            continue
        kind = _kind(layer)
        if kind not in limits:
            limits[kind] = _min_rows(layer, dtype)
            log.debug("From how many rows on a run is long: %s: %s.", kind, limits[kind])
        if (min_rows := limits[kind]) is not None:
            layer.__class__ = _OTHER_WAY[type(layer)]
            layer.long_runs, layer.min_rows = long_runs, min_rows
            if "scales" in layer:
                long_runs.dequantized_bytes += _num_weights(layer) * dtype.size
    found = [each for each in limits.values() if each is not None]
    if not found:
        return None
    log.info(
        "Long prompts are computed %s, from %d rows on (found out in %.1f s).",
        "with dequantised weights" if long_runs.dequantized_bytes else "with their rows grouped by expert",
        min(found),
        perf_counter() - started,
    )
    return long_runs


def _has_other_way(layer: Any, *, dequantize: bool) -> bool:
    if type(layer) not in _OTHER_WAY or mx.metal.is_available():
        return False
    if type(layer) is SwitchLinear:
        return not is_gpu() and _num_weights(layer) >= MIN_WEIGHTS
    # NVFP4 with a scale for each expert is dequantised by no function of MLX's.
    return dequantize and layer.get("global_scale") is None and _num_weights(layer) >= MIN_WEIGHTS


def _num_weights(layer: Any) -> int:
    size: int = layer.scales.size * layer.group_size if "scales" in layer else layer.weight.size
    return size


def _kind(layer: Any) -> tuple[Any, ...]:
    format_of = (
        (layer.scales.dtype, layer.bits, layer.group_size, layer.mode)
        if "scales" in layer
        else layer.weight.dtype
    )
    return type(layer), layer.weight.shape, format_of


def _min_rows(layer: Any, dtype: mx.Dtype) -> int | None:
    """Return from how many rows on a layer should be computed in the other way; None: for no number that was tried."""
    timed = layer if is_gpu() else _part(layer)
    for rows in (each for each in ROW_COUNTS if not is_gpu() or each >= MIN_ROWS_ON_GPU):
        inputs = _inputs(timed, rows, dtype)
        seconds = _seconds(timed, inputs)
        if seconds > MIN_GAIN * _seconds(_with_other_way(timed), inputs):
            return rows
        if seconds > MAX_TIMED_SECONDS:
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


def _with_other_way(layer: Any) -> Any:
    copy = _copy(layer, _OTHER_WAY[type(layer)])
    copy.long_runs, copy.min_rows = LongRuns(), 0
    return copy


def _copy(layer: Any, kind: Any) -> Any:
    copy = kind.__new__(kind)
    copy.__dict__.update(layer.__dict__)
    dict.update(copy, layer)  # a module's own `update` is for its parameters
    return copy


def _inputs(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    """Return what a layer is called with for so many rows; those of experts are spread over all of them."""
    width = layer.scales.shape[-1] * layer.group_size if "scales" in layer else layer.weight.shape[-1]
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
