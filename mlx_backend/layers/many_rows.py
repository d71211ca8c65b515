"""Layers with a faster implementation for many rows (prefill, embeddings) than for a few (decode).

Weights are dequantised, and the rows of a mixture of experts are grouped by expert.

MLX's kernels for quantised weights are made for the few tokens of a decode step. Given many, its CUDA backend
multiplies the rows of a mixture of experts one by one, and its CPU backend multiplies all rows one by one. It can be
many times faster to dequantise a whole layer, multiply, and free that memory again. Rows of experts that are not
quantised are multiplied one by one on a CPU too, and slowly with CUDA: 2.0 ms for 8,192 rows, sorted by 32 experts, and
matrices of 2,880 x 2,880 in bfloat16 on an H100, where it takes 0.9 ms in blocks of rows (`RowBlocks`). What is faster
depends on the device, the shape and the format, so each kind of layer is timed with both implementations when a model
is loaded. On a Mac MLX's own kernels are used: they are made for many rows too.

The sources of the layers it replaces are in `KNOWN_SOURCES` (engine/mlx/mlx_lm_patches.py).
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.device.mlx import gpu_memory, is_gpu
from mlx_backend.layers.dequantize import dequantized, fastest_dequantizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_backend.layers.dequantize import Dequantizer

log = logging.getLogger(__name__)


BLOCK = 64
"""Rows of a block."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Rows of a mixture of experts in blocks of one expert each, and where they are in those.

    Each expert's rows are padded to whole blocks, which makes at most one more block for each expert. How many rows an
    expert has is not read back: nothing here waits for the device.

    `sources` ([blocks * BLOCK]) has the row at each place, any row where a block is padded. `experts` ([blocks]) has
    the expert of each block, and `places` ([rows]) the place of each row.
    """

    sources: mx.array
    experts: mx.array
    places: mx.array

    @classmethod
    def of(cls, indices: mx.array, num_experts: int) -> RowBlocks:
        """Arrange rows that are sorted by expert; `indices` ([rows]) has the expert of each."""
        rows = indices.size
        num_blocks = rows // BLOCK + min(rows, num_experts)
        # With few kinds of operations: CUDA takes up to a minute to compile each, the first time on a machine.
        experts = mx.arange(num_experts, dtype=mx.uint32)
        counts = _counts(indices[None] == experts[:, None])
        blocks = (counts + BLOCK - 1) // BLOCK
        is_before = experts[:, None] > experts[None]
        first_rows, first_places = ((is_before * each).sum(axis=1) for each in (counts, blocks * BLOCK))
        places = mx.arange(rows, dtype=mx.int32) + (first_places - first_rows)[indices]
        # The outputs of blocks after the last row's are never used.
        starts = BLOCK * mx.arange(num_blocks, dtype=mx.int32)
        block_experts = _counts(starts[:, None] >= first_places[None]) - 1
        block_rows = starts + (first_rows - first_places)[block_experts]
        sources = (block_rows[:, None] + mx.arange(BLOCK, dtype=mx.int32)).reshape(-1)
        return cls(mx.minimum(sources, rows - 1), block_experts.astype(mx.uint32), places)

    def multiply(self, x: mx.array, weights: mx.array) -> mx.array:
        """Multiply rows ([rows, 1, inputs]) by their experts' weights ([experts, outputs, inputs])."""
        blocks = x[:, 0][self.sources].reshape(-1, BLOCK, x.shape[-1])
        outputs = mx.gather_mm(blocks, weights.swapaxes(-1, -2), rhs_indices=self.experts)
        return outputs.reshape(-1, outputs.shape[-1])[self.places][:, None]


def _counts(which: mx.array) -> mx.array:
    return which.astype(mx.int32).sum(axis=1)


MAX_PENDING_BYTES, MAX_PENDING_SHARE = 1 << 27, 1 / 16
"""The most dequantised weights that wait to be freed, and as a share of a GPU's memory: each wait stalls it briefly."""


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
        """The most bytes that may wait to be freed, without those of the layer that is computed."""
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


# Timed in this order until the implementation for many rows is faster.
ROW_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
MIN_ROWS_ON_GPU = 64
"""Rows from which on it is used on a GPU: decode steps stay as they are."""
MIN_GAIN = 1.25
"""How many times as fast it has to be."""
MIN_WEIGHTS = 1 << 16
"""Weights of a layer; smaller ones are left alone."""
MAX_DIFFERENCE = 0.05
"""Of the outputs, as a share of their root mean square; rounding in half precision makes less than 0.01."""
TIMED_RUNS = 3
MAX_TIMED_SECONDS = 0.2
"""Time of MLX's own implementation beyond which no larger number of rows is timed."""
MAX_OUTPUTS = 128
"""Outputs of a layer that are timed on a CPU; the ratio is the same for all of them."""


class ManyRowsLinear(nn.QuantizedLinear):  # type: ignore[misc]  # MLX's modules have no types
    """A quantised layer that is dequantised for `min_rows` rows and more."""

    many_rows: ManyRows
    min_rows: int
    is_unread: bool
    dequantize: Dequantizer

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs ([..., outputs])."""
        has_many = self.many_rows.applies(x.size // x.shape[-1], self.min_rows)
        if (value := self.many_rows.outputs_instead(self)) is not None:
            return _outputs(value, x, x.shape[:-1], self["weight"].shape[0])
        if not has_many:
            output: mx.array = super().__call__(x)
            return output
        weights = self.dequantize(self, x.dtype, None)
        output = x @ weights.T
        self.many_rows.wait_for(output, weights.nbytes)
        return output + self["bias"] if "bias" in self else output


class _SortedExperts:
    """What both kinds of experts do with rows. mlx-lm sorts them by expert if there are many (64 or more)."""

    many_rows: ManyRows
    min_rows: int
    is_unread: bool

    def __call__(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs of each row's expert ([..., outputs])."""
        has_many = sorted_indices and self.many_rows.applies(indices.size, self.min_rows)
        if (value := self.many_rows.outputs_instead(self)) is not None:
            rows = mx.broadcast_shapes(x.shape[:-2], indices.shape)
            return _outputs(value, x, (*rows, x.shape[-2]), self.output_dims)
        output: mx.array
        if not has_many:
            output = super().__call__(x, indices, sorted_indices)  # type: ignore[misc]  # the other base class's
            return output
        output = self.products(x, indices)
        return output + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else output


class ManyRowsExperts(_SortedExperts, SwitchLinear):  # type: ignore[misc]  # mlx-lm has no types
    """Experts whose rows are grouped by expert: in blocks on a GPU."""

    def products(self, x: mx.array, indices: mx.array) -> mx.array:
        """Multiply sorted rows ([rows, 1, inputs]) by their experts' weights."""
        if is_gpu():
            return self.many_rows.blocks_of(indices, self.num_experts).multiply(x, self["weight"])
        return _grouped(x, indices, lambda expert, rows: rows @ self["weight"][expert].T)


class ManyRowsQuantizedExperts(_SortedExperts, QuantizedSwitchLinear):  # type: ignore[misc]  # as above
    """Quantised experts that are dequantised: all of them on a GPU, on a CPU those that have rows, one at a time."""

    dequantize: Dequantizer

    def products(self, x: mx.array, indices: mx.array) -> mx.array:
        """Multiply sorted rows ([rows, 1, inputs]) by their experts' weights."""
        if not is_gpu():
            return _grouped(x, indices, self._product)
        weights = self.dequantize(self, x.dtype, None)
        output = self.many_rows.blocks_of(indices, self.num_experts).multiply(x, weights)
        self.many_rows.wait_for(output, weights.nbytes)
        return output

    def _product(self, expert: int, rows: mx.array) -> mx.array:
        output = rows @ self.dequantize(self, rows.dtype, expert).T
        mx.eval(output)  # costs nothing on a CPU, and frees the weights
        return output


def _grouped(x: mx.array, indices: mx.array, product: Callable[[int, mx.array], mx.array]) -> mx.array:
    """Return the products of sorted rows ([rows, 1, inputs]); `product` computes those of one expert."""
    outputs, start = [], 0
    experts: list[int] = indices.tolist()  # type: ignore[assignment]  # declared as any number, or a list of such
    for expert, same in groupby(experts):
        end = start + len(list(same))
        outputs.append(product(expert, x[start:end, 0]))
        start = end
    return mx.concatenate(outputs)[:, None]


def _outputs(value: float, x: mx.array, rows: Sequence[int], outputs: int) -> mx.array:
    """Return a layer's outputs, all of this value, which still depend on its inputs."""
    return mx.full((*rows, outputs), value, x.dtype) + 0 * x[..., :1]


_MANY_ROWS: dict[type, type] = {
    nn.QuantizedLinear: ManyRowsLinear,
    QuantizedSwitchLinear: ManyRowsQuantizedExperts,
    SwitchLinear: ManyRowsExperts,
}


def use_many_rows_layers(networks: Iterable[Any], dtype: mx.Dtype, *, dequantize: bool) -> ManyRows | None:
    """Replace the layers for which the implementation for many rows is faster; return None if there are none.

    `dtype` is that of their activations. Without `dequantize` no weights are dequantised. Layers that compute logits
    are left alone: nothing reads a chunk's logits, so MLX never computes them.
    """
    many_rows, started = ManyRows(), perf_counter()
    limits: dict[tuple[Any, ...], tuple[int | None, Dequantizer]] = {}  # by kind of layer
    for layer in (module for network in networks for module in _all_but_logits(network)):
        if not _is_candidate(layer, dequantize=dequantize):
            continue
        kind = _kind(layer)
        if kind not in limits:
            limits[kind] = _limit(layer, dtype)
            log.debug("Many rows from %s on, dequantised by %s: layers %s.", *limits[kind], kind)
        min_rows, dequantizer = limits[kind]
        if min_rows is not None:
            layer.__class__ = _MANY_ROWS[type(layer)]
            layer.many_rows, layer.min_rows, layer.dequantize = many_rows, min_rows, dequantizer
            layer.is_unread = False  # find_unread (unread_outputs.py) sets it
            many_rows.has_experts |= isinstance(layer, _SortedExperts)
            if "scales" in layer:
                nbytes = _num_weights(layer) * dtype.size
                many_rows.dequantized_bytes += nbytes
                many_rows.largest_layer_bytes = max(many_rows.largest_layer_bytes, nbytes)
    found = [each for each, _ in limits.values() if each is not None]
    if not found:
        return None
    many_rows.min_rows = min(found)
    log.info(
        "Long prompts: %s, from %d rows on (tokens, or tokens times experts per token). Timing took %.1f s.",
        "weights are dequantised" if many_rows.dequantized_bytes else "rows are grouped by expert",
        many_rows.min_rows,
        perf_counter() - started,
    )
    return many_rows


def _all_but_logits(network: Any) -> list[Any]:
    """Return the modules of a network except those with one output for each token of its vocabulary."""
    modules = network.modules()
    embeddings = [each for each in modules if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    words = max((each.weight.shape[0] for each in embeddings), default=0)
    return [each for each in modules if not (type(each) is nn.QuantizedLinear and len(each.weight) == words)]


def _is_candidate(layer: Any, *, dequantize: bool) -> bool:
    if type(layer) not in _MANY_ROWS or mx.metal.is_available():
        return False
    if type(layer) is SwitchLinear:
        return _num_weights(layer) >= MIN_WEIGHTS
    # MLX has no function that dequantises NVFP4 with a global scale for each expert.
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


def _limit(layer: Any, dtype: mx.Dtype) -> tuple[int | None, Dequantizer]:
    """Return from how many rows on such a layer uses its implementation for many rows, and what dequantises it."""
    try:
        dequantizer = fastest_dequantizer(layer, dtype) if "scales" in layer else dequantized
        return _min_rows(layer, dtype, dequantizer), dequantizer
    except Exception as error:
        log.warning("%s is computed as it is, also for long prompts: %r", type(layer).__name__, error)
        return None, dequantized


def _min_rows(layer: Any, dtype: mx.Dtype, dequantizer: Dequantizer) -> int | None:
    """Return from how many rows on the implementation for many rows is faster; None if it never was.

    Raises RuntimeError if its outputs are different.
    """
    timed = layer if is_gpu() else _part(layer)
    other = _for_many_rows(timed, dequantizer)
    for rows in (each for each in ROW_COUNTS if not is_gpu() or each >= MIN_ROWS_ON_GPU):
        inputs = _inputs(timed, rows, dtype)
        seconds = _seconds(timed, inputs)
        if seconds > MIN_GAIN * _seconds(other, inputs):
            _compare(other(*inputs), timed(*inputs))
            return rows
        if seconds > MAX_TIMED_SECONDS:
            break
    return None


def _compare(found: mx.array, expected: mx.array) -> None:
    """Raise RuntimeError if outputs differ by more than rounding."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    off = float(mx.sqrt(mx.mean(mx.square(found - expected)) / mx.mean(mx.square(expected))))
    if not off <= MAX_DIFFERENCE:  # NaN too
        raise RuntimeError(f"with many rows the outputs are off by {off:.0%}")


def _part(layer: Any) -> Any:
    """Return a copy of a layer with only its first outputs."""
    part = _copy(layer, type(layer))
    for name in ("weight", "scales", "biases", "bias"):
        if (value := layer.get(name)) is not None:
            part[name] = mx.contiguous(
                value[..., :MAX_OUTPUTS] if name == "bias" else value[..., :MAX_OUTPUTS, :]
            )
    return part


def _for_many_rows(layer: Any, dequantizer: Dequantizer) -> Any:
    copy = _copy(layer, _MANY_ROWS[type(layer)])
    copy.many_rows, copy.min_rows, copy.dequantize = ManyRows(), 0, dequantizer
    return copy


def _copy(layer: Any, kind: Any) -> Any:
    copy = kind.__new__(kind)
    copy.__dict__.update(layer.__dict__)
    dict.update(copy, layer)  # a module's own `update` is for its parameters
    return copy


def _inputs(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    """Return what a layer is called with for `rows`, which are spread over all of its experts."""
    width = layer.scales.shape[-1] * layer.group_size if "scales" in layer else layer.weight.shape[-1]
    x = mx.random.normal((rows, 1, width), key=mx.random.key(rows)).astype(dtype)
    if isinstance(layer, nn.QuantizedLinear):
        return (x.reshape(1, rows, width),)
    return x, mx.arange(rows, dtype=mx.uint32) * layer.num_experts // rows, True


def _seconds(layer: Any, inputs: tuple[Any, ...]) -> float:
    """Return the seconds that a layer takes, after a first run that may be slow."""
    mx.eval(layer(*inputs))
    least = float("inf")
    for _ in range(TIMED_RUNS):
        started = perf_counter()
        mx.eval(layer(*inputs))
        least = min(least, perf_counter() - started)
    return least
