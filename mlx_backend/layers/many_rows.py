"""Layers with a faster implementation for many rows (prefill, embeddings) than for a few (decode).

Weights are dequantised, and the rows of a mixture of experts are grouped by expert.

MLX's kernels for quantised weights are made for the few tokens of a decode step. Given many, its CUDA backend
multiplies the rows of a mixture of experts one by one, and its CPU backend multiplies all rows one by one. It can be
many times faster to dequantise a whole layer, multiply, and free that memory again. Rows of experts that are not
quantised are multiplied one by one on a CPU too, and slowly with CUDA: 2.0 ms for 8,192 rows, sorted by 32 experts, and
matrices of 2,880 x 2,880 in bfloat16 on an H100, where it takes 0.9 ms in blocks of rows (`RowBlocks`). What is faster
depends on the device, the shape and the format. Here a rule says from how many rows on it is (`_min_rows`), so that
nothing is timed when a model is loaded, and a prompt is computed the same way after the next start. On a Mac MLX's own
kernels are used: they are made for many rows too.

The sources of the layers it replaces are in tests/known_sources.py.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.device.blas import has_fast_blas
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


MAX_PENDING_SHARE = 1 / 16
"""Of a GPU's memory, the most that dequantised weights take that wait to be freed: each wait stalls it briefly."""


class ManyRows:
    """What the replaced layers share.

    They use their implementation for many rows while `is_enabled`, each from its own number of rows on; `min_rows` is
    the smallest of these. `largest_bytes` of dequantised weights are needed at a time, and at most `dequantized_bytes`
    wait to be freed: on a GPU those of the largest layer, and of all.
    """

    def __init__(self) -> None:
        self.min_rows = 0
        self.has_experts = False  # whose rows are tokens times experts per token
        self.is_enabled = True
        self.dequantized_bytes = self.largest_bytes = 0
        self.was_used = False  # since the caller last set it to False
        self._max_pending = int(gpu_memory() * MAX_PENDING_SHARE)
        self._pending = 0  # bytes that have been dequantised since an output was waited for
        self._arranged: tuple[mx.array, RowBlocks] | None = None
        self._is_forced = False
        self._is_filled: Callable[[], bool] = lambda: False

    @property
    def max_pending_bytes(self) -> int:
        """The most bytes that may wait to be freed, without those of the layer that is computed."""
        return min(self._max_pending, self.dequantized_bytes)

    @property
    def max_dequantized_bytes(self) -> int:
        """The most bytes that dequantised weights may take at a time."""
        return self.max_pending_bytes + self.largest_bytes

    @contextmanager
    def always(self) -> Iterator[None]:
        """Use the implementation for many rows for any number of rows, and wait for each layer."""
        self._is_forced = True
        try:
            yield
        finally:
            self._is_forced = False

    @contextmanager
    def filling(self, caches: Sequence[Any]) -> Iterator[None]:
        """In a run of which only the caches are needed, compute nothing more of these layers once all have grown.

        MLX never computes what nothing reads. But these layers wait for many rows, to free weights, or on a CPU to see
        each row's expert, and with them for all that their inputs need, such as the last layer's attention.
        """
        before = [getattr(each, "offset", None) for each in caches]
        self._is_filled = lambda: all(
            getattr(each, "offset", None) != offset for each, offset in zip(caches, before, strict=True)
        )
        try:
            yield
        finally:
            self._is_filled = lambda: False

    def unread(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array | None:
        """Return what stands for outputs of this shape that nothing will read; None if they are to be computed."""
        return mx.zeros(shape, dtype) if self._is_filled() else None

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


MIN_ROWS = 8
"""Rows of a matrix, on an average if it is one of a mixture, from which on it is faster. That is where it took at most
0.8 of the time: on an H100 with 32 experts in mxfp4, on a CPU with OpenBLAS and matrices of 256 x 256 and larger."""
MIN_ROWS_OF_QUICK_BITS, QUICK_BITS = 4, (2, 4, 8)
"""The same on a CPU with OpenBLAS, for bits that do not span words; the others are dequantised two to four times as
slowly."""
MIN_ROWS_OF_SMALL_FLOATS = 64
"""The same on a CPU for floats of 4 bits (mxfp4, nvfp4), which MLX dequantises slowly there: never with a slow BLAS."""
MIN_ROWS_ON_GPU = 64
"""Rows from which on it is used on a GPU: decode steps stay as they are."""
COMPARED_ROWS = 64
"""Rows that both implementations are compared with."""
MIN_WEIGHTS = 1 << 16
"""Weights of a layer; smaller ones are left alone."""
PART_BYTES = 1 << 22
"""Weights that are dequantised at a time on a CPU. They are multiplied while they are in its caches.

More than 32 MB of memory are moreover mapped and cleared anew each time: 8 rows through 14,336 x 4,096 weights of 4
bits took 352 ms at once, 94 so, and 302 as MLX does it.
"""
MAX_DIFFERENCE = 0.05
"""Of the outputs, as a share of their root mean square; rounding in half precision makes less than 0.01."""
MAX_OUTPUTS = 128
"""Outputs of a layer that are compared."""


class ManyRowsLinear(nn.QuantizedLinear):  # type: ignore[misc]  # MLX's modules have no types
    """A quantised layer that is dequantised for `min_rows` rows and more."""

    many_rows: ManyRows
    min_rows: int
    dequantize: Dequantizer

    def __call__(self, x: mx.array) -> mx.array:
        """Return the outputs ([..., outputs])."""
        unread = self.many_rows.unread((*x.shape[:-1], self["weight"].shape[0]), x.dtype)
        if unread is not None:
            return unread
        if not self.many_rows.applies(x.size // x.shape[-1], self.min_rows):
            few: mx.array = super().__call__(x)
            return few
        output: mx.array
        if is_gpu():
            weights = self.dequantize(self, x.dtype, None)
            output = x @ weights.T
            self.many_rows.wait_for(output, weights.nbytes)
        else:
            output = _product_in_parts(self, x)
        if "bias" in self:
            output += self["bias"]
        return output


class _SortedExperts:
    """What both kinds of experts do with rows. mlx-lm sorts them by expert if there are many (64 or more)."""

    many_rows: ManyRows
    min_rows: int

    def __call__(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the outputs of each row's expert ([..., outputs])."""
        rows = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        unread: mx.array | None = self.many_rows.unread((*rows, x.shape[-2], self.output_dims), x.dtype)
        if unread is not None:
            return unread
        output: mx.array
        if not (sorted_indices and self.many_rows.applies(indices.size, self.min_rows)):
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
            return _grouped(x, indices, lambda expert, rows: _product_in_parts(self, rows, expert))
        weights = self.dequantize(self, x.dtype, None)
        output = self.many_rows.blocks_of(indices, self.num_experts).multiply(x, weights)
        self.many_rows.wait_for(output, weights.nbytes)
        return output


def _product_in_parts(layer: Any, x: mx.array, expert: int | None = None) -> mx.array:
    """Multiply rows ([..., inputs]) by the weights of a layer or an expert, of which a part is dequantised at a time.

    To wait costs nothing on a CPU, and frees a part's weights before the next one's are there.
    """
    outputs, step = layer["weight"].shape[-2], max(1, PART_BYTES // (x.shape[-1] * x.itemsize))
    products = []
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        weights = layer.dequantize(layer, x.dtype, part if expert is None else (expert, part))
        products.append(x @ weights.T)
        mx.eval(products[-1])
    return mx.concatenate(products, axis=-1) if len(products) > 1 else products[0]


def _grouped(x: mx.array, indices: mx.array, product: Callable[[int, mx.array], mx.array]) -> mx.array:
    """Return the products of sorted rows ([rows, 1, inputs]); `product` computes those of one expert."""
    outputs, start = [], 0
    experts: list[int] = indices.tolist()  # type: ignore[assignment]  # declared as any number, or a list of such
    for expert, same in groupby(experts):
        end = start + len(list(same))
        outputs.append(product(expert, x[start:end, 0]))
        start = end
    return mx.concatenate(outputs)[:, None]


_MANY_ROWS: dict[type, type] = {
    nn.QuantizedLinear: ManyRowsLinear,
    QuantizedSwitchLinear: ManyRowsQuantizedExperts,
    SwitchLinear: ManyRowsExperts,
}


def use_many_rows_layers(
    networks: Iterable[Any],
    dtype: mx.Dtype,
    *,
    dequantize: bool,
    find: Callable[[Any, mx.Dtype], Dequantizer | None] | None = None,
) -> ManyRows | None:
    """Replace the layers that have an implementation for many rows; return None if there are none.

    `dtype` is that of their activations. Without `dequantize` no weights are dequantised. `find` returns what
    dequantises layers like this one, or None if they are to be left alone (`right_dequantizer` if no other is given).
    Layers that compute logits are left alone: nothing reads a chunk's logits, so MLX never computes them.
    """
    many_rows = ManyRows()
    found: dict[tuple[Any, ...], Dequantizer | None] = {}  # by kind of layer
    replaced: list[int] = []
    for layer in many_rows_candidates(networks, dequantize=dequantize):
        kind = kind_of(layer)
        if kind not in found:
            found[kind] = (find or right_dequantizer)(layer, dtype)
        if (dequantizer := found[kind]) is None:
            continue
        layer.__class__ = _MANY_ROWS[type(layer)]
        layer.many_rows, layer.min_rows, layer.dequantize = many_rows, _min_rows(layer), dequantizer
        replaced.append(layer.min_rows)
        many_rows.has_experts |= isinstance(layer, _SortedExperts)
        if "scales" in layer:
            nbytes = _num_weights(layer) * dtype.size
            if is_gpu():
                many_rows.dequantized_bytes += nbytes
            else:
                nbytes = min(nbytes, PART_BYTES)
            many_rows.largest_bytes = max(many_rows.largest_bytes, nbytes)
    if not replaced:
        return None
    many_rows.min_rows = min(replaced)
    log.info(
        "Long prompts: %s, from %d rows on (tokens, or tokens times experts per token).",
        "weights are dequantised" if many_rows.largest_bytes else "rows are grouped by expert",
        many_rows.min_rows,
    )
    return many_rows


def many_rows_candidates(networks: Iterable[Any], *, dequantize: bool) -> list[Any]:
    """Return the layers of networks that an implementation for many rows can replace."""
    if mx.metal.is_available():
        return []
    every = (module for network in networks for module in _all_but_logits(network))
    return [layer for layer in every if _is_candidate(layer, dequantize=dequantize)]


def _all_but_logits(network: Any) -> list[Any]:
    """Return the modules of a network except those with one output for each token of its vocabulary."""
    modules = network.modules()
    embeddings = [each for each in modules if isinstance(each, nn.Embedding | nn.QuantizedEmbedding)]
    words = max((each.weight.shape[0] for each in embeddings), default=0)
    return [each for each in modules if not (type(each) is nn.QuantizedLinear and len(each.weight) == words)]


def _is_candidate(layer: Any, *, dequantize: bool) -> bool:
    if type(layer) not in _MANY_ROWS:
        return False
    if type(layer) is SwitchLinear:
        return _num_weights(layer) >= MIN_WEIGHTS
    if _is_of_small_floats(layer) and not (is_gpu() or has_fast_blas()):
        return False
    # MLX has no function that dequantises NVFP4 with a global scale for each expert.
    return dequantize and layer.get("global_scale") is None and _num_weights(layer) >= MIN_WEIGHTS


def _is_of_small_floats(layer: Any) -> bool:
    return "scales" in layer and layer.bits == 4 and layer.mode != "affine"


def _num_weights(layer: Any) -> int:
    size: int = layer.scales.size * layer.group_size if "scales" in layer else layer.weight.size
    return size


def kind_of(layer: Any) -> tuple[Any, ...]:
    """Return what layers have in common that are computed alike."""
    format_of = (
        (layer.scales.dtype, layer.bits, layer.group_size, layer.mode)
        if "scales" in layer
        else layer.weight.dtype
    )
    return type(layer), layer.weight.shape, format_of


def _min_rows(layer: Any) -> int:
    """Return from how many rows on a layer uses its implementation for many rows."""
    rows = MIN_ROWS
    if not is_gpu() and _is_of_small_floats(layer):
        rows = MIN_ROWS_OF_SMALL_FLOATS
    elif not is_gpu() and has_fast_blas() and layer.get("scales") is not None and layer.bits in QUICK_BITS:
        rows = MIN_ROWS_OF_QUICK_BITS
    if layer.weight.ndim == 3:
        rows *= layer.weight.shape[0]
    return max(rows, MIN_ROWS_ON_GPU) if is_gpu() else rows


def right_dequantizer(layer: Any, dtype: mx.Dtype) -> Dequantizer | None:
    """Return what dequantises such layers; None if with many rows they have other outputs than with few."""
    try:
        dequantizer = fastest_dequantizer(layer, dtype) if "scales" in layer else dequantized
        few = _part(layer)
        many = _copy(few, _MANY_ROWS[type(layer)])
        many.many_rows, many.min_rows, many.dequantize = ManyRows(), 0, dequantizer
        inputs = inputs_of(few, COMPARED_ROWS, dtype)
        _compare(many(*inputs), _one_by_one(few, inputs))
    except Exception as error:
        log.warning("%s is computed as it is, also for long prompts: %r", type(layer).__name__, error)
        return None
    return dequantizer


def _one_by_one(layer: Any, inputs: tuple[Any, ...]) -> mx.array:
    """Return the outputs of a layer for one row at a time: for more, MLX's CUDA build may have to compile a kernel."""
    x, *rest = inputs
    if rest:
        return mx.concatenate([layer(x[at : at + 1], rest[0][at : at + 1]) for at in range(len(x))])
    return mx.concatenate([layer(x[:, at : at + 1]) for at in range(x.shape[1])], axis=1)


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


def _copy(layer: Any, kind: Any) -> Any:
    copy = kind.__new__(kind)
    copy.__dict__.update(layer.__dict__)
    dict.update(copy, layer)  # a module's own `update` is for its parameters
    return copy


def inputs_of(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    """Return what a layer is called with for `rows`, which are spread over all of its experts."""
    width = layer.scales.shape[-1] * layer.group_size if "scales" in layer else layer.weight.shape[-1]
    x = mx.random.normal((rows, 1, width), key=mx.random.key(rows)).astype(dtype)
    if isinstance(layer, nn.QuantizedLinear):
        return (x.reshape(1, rows, width),)
    return x, mx.arange(rows, dtype=mx.uint32) * layer.num_experts // rows, True
