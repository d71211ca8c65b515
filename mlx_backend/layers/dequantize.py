"""Dequantising a layer: by MLX's own function, or on an NVIDIA GPU by faster kernels of our own.

MLX's CUDA kernels write few bytes at a time. On an H100 they take 1.08 ms to dequantise 265 million weights to bfloat16
from mxfp4, 0.61 ms from 4 bits and 1.02 ms from 8 bits. Ours take 0.38, 0.33 and 0.41 ms for the same values, bit for
bit, and somewhat longer into the GPU's own memory (`IN_GPU_MEMORY`). Whether the values are the same is tried
on a layer of each kind when a model is loaded.

Knows nothing of what is done with the weights.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from mlx_backend.device.mlx import prepares_for_lengths

log = logging.getLogger(__name__)

MAX_THREADS, MIN_THREADS = 256, 64
"""Threads of a block."""
WORD_BITS = 32
# MLX puts the output of a custom kernel into memory that the processor can use too (cudaMallocManaged), which the GPU
# has to fetch page by page: chunks took twice as long. With an initial value, whatever it is, the output is put into
# the GPU's own memory, as all other arrays are.
IN_GPU_MEMORY: Final = 0
MAX_WORDS = 1 << 31
"""Words that a grid may have."""

type Part = slice | tuple[int, slice]
"""Outputs of a layer, or of an expert of a mixture."""
type Dequantizer = Callable[[Any, mx.Dtype, Part | None], mx.array]
"""Takes a layer, the dtype of its activations, and the part whose weights are wanted, if not all are."""

# One thread dequantises the values of one word and writes them at once.
_WRITE: Final = """
    using Parts = uint2;
    const Parts* from = reinterpret_cast<const Parts*>(values);
    Parts* to = reinterpret_cast<Parts*>(out + word * VALUES);
    for (int k = 0; k < sizeof(values) / sizeof(Parts); ++k) to[k] = from[k];
"""
_AFFINE: Final = f"""
    constexpr int VALUES = {WORD_BITS} / BITS;
    const size_t word = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint32_t packed = weight[word];
    const size_t group = word * VALUES / GROUP;
    const T scale = scales[group];
    const T bias = biases[group];
    alignas(16) T values[VALUES];
    for (int k = 0; k < VALUES; ++k) {{
        values[k] = scale * T((packed >> (BITS * k)) & ((1u << BITS) - 1u)) + bias;
    }}
{_WRITE}"""
# A value is a float with two bits of exponent and one of mantissa. As bits of a float32 it is 2^-126 times as large,
# also if it is subnormal. The scale of a group of 32 is a power of 2 that a byte gives: 127 is 1, and 255 is NaN.
_MXFP4: Final = f"""
    constexpr int VALUES = 8;
    const size_t word = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint32_t packed = weight[word];
    const uint32_t exponent = scales[word / 4];
    const float scale = __uint_as_float(
        exponent == 255 ? 0x7fc00000u : exponent == 0 ? 0x00400000u : exponent << 23);
    alignas(16) T values[VALUES];
    for (int k = 0; k < VALUES; ++k) {{
        const uint32_t bits = packed >> (4 * k);
        values[k] = T(__uint_as_float(((bits & 8u) << 28) | ((bits & 7u) << 22)) * 0x1p126f * scale);
    }}
{_WRITE}"""


def dequantized(layer: Any, dtype: mx.Dtype, part: Part | None = None) -> mx.array:
    """Return the dequantised weights of a layer or of a part of it, by MLX's function.

    They are in the dtype of the scales, or in `dtype` if the scales are exponents (uint8).
    """
    weight, scales, biases = layer["weight"], layer["scales"], layer.get("biases")
    if part is not None:
        weight, scales, biases = (each if each is None else each[part] for each in (weight, scales, biases))
    return mx.dequantize(
        weight,
        scales,
        biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=None if mx.issubdtype(scales.dtype, mx.floating) else dtype,
    )


def fastest_dequantizer(layer: Any, dtype: mx.Dtype) -> Dequantizer:
    """Return what dequantises such layers: our kernel, if it gives the same values, or MLX's function."""
    if not prepares_for_lengths() or not has_kernel(layer):
        return dequantized
    try:
        is_right = bool(mx.array_equal(dequantized_by_kernel(layer, dtype), dequantized(layer, dtype)).item())
    except Exception as error:
        log.debug("The kernel that dequantises %s of %d bits cannot run: %r", layer.mode, layer.bits, error)
        return dequantized
    if not is_right:
        log.debug("The kernel dequantises %s of %d bits differently.", layer.mode, layer.bits)
    return dequantized_by_kernel if is_right else dequantized


def has_kernel(layer: Any) -> bool:
    """Whether a kernel can dequantise a layer of this format and size."""
    words = layer.weight.size
    is_known = (layer.mode, layer.bits) in {("mxfp4", 4), ("affine", 4), ("affine", 8)}
    return is_known and words < MAX_WORDS and math.gcd(words, MAX_THREADS) >= MIN_THREADS


def dequantized_by_kernel(layer: Any, dtype: mx.Dtype, part: Part | None = None) -> mx.array:
    """Return what `dequantized` returns, by a kernel; only with CUDA."""
    assert part is None  # on a GPU, a whole layer is dequantised at once
    weight, scales = layer["weight"], layer["scales"]
    inputs = [weight, scales]
    if layer.mode == "mxfp4":
        kernel, template = _mxfp4_kernel(), [("T", dtype)]
    else:
        inputs.append(layer["biases"])
        dtype = scales.dtype
        kernel = _affine_kernel()
        template = [("T", dtype), ("BITS", layer.bits), ("GROUP", layer.group_size)]
    weights: mx.array
    [weights] = kernel(
        inputs=inputs,
        template=template,
        grid=(weight.size, 1, 1),
        threadgroup=(math.gcd(weight.size, MAX_THREADS), 1, 1),
        output_shapes=[(*weight.shape[:-1], weight.shape[-1] * WORD_BITS // layer.bits)],
        output_dtypes=[dtype],
        init_value=IN_GPU_MEMORY,
    )
    return weights


@functools.cache
def _mxfp4_kernel() -> Any:
    return _kernel("dequantize_mxfp4", ["weight", "scales"], _MXFP4)


@functools.cache
def _affine_kernel() -> Any:
    return _kernel("dequantize_affine", ["weight", "scales", "biases"], _AFFINE)


def _kernel(name: str, inputs: list[str], source: str) -> Any:
    # MLX finds compiled kernels by name alone: the digest keeps it from running one of an older version of this file.
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(f"{name}_{digest}", inputs, ["out"], source)
