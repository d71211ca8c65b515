"""Dequantising layers: MLX's values bit for bit, and by a kernel only where one gives them and is faster."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_backend.device.mlx import prepares_for_lengths
from mlx_backend.layers.dequantize import (
    dequantized,
    dequantized_by_kernel,
    fastest_dequantizer,
    has_kernel,
)

MODULE = "mlx_backend.layers.dequantize"
WITH_KERNELS: list[dict[str, Any]] = [
    {"mode": "affine", "bits": bits, "group_size": size} for bits in (4, 8) for size in (32, 64, 128)
] + [{"mode": "mxfp4", "bits": 4, "group_size": 32}]
WITHOUT: list[dict[str, Any]] = [
    {"mode": "affine", "bits": 2, "group_size": 64},
    {"mode": "affine", "bits": 3, "group_size": 64},
    {"mode": "affine", "bits": 6, "group_size": 64},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]


def named(quantization: dict[str, Any]) -> str:
    return f"{quantization['mode']}-{quantization['bits']}-{quantization['group_size']}"


def quantised(quantization: dict[str, Any], dtype: mx.Dtype = mx.bfloat16, width: int = 256) -> Any:
    layer = nn.Linear(width, 128, bias=False)
    layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(4)).astype(dtype)
    return layer.to_quantized(**quantization)


@pytest.mark.skipif(not prepares_for_lengths(), reason="the kernels are CUDA's")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("quantization", WITH_KERNELS, ids=named)
def test_kernels_give_the_values_of_mlx(quantization: dict[str, Any], dtype: mx.Dtype) -> None:
    layer = quantised(quantization, dtype)
    found, expected = (each(layer, dtype, None) for each in (dequantized_by_kernel, dequantized))
    assert found.dtype == expected.dtype
    assert mx.array_equal(found, expected)


@pytest.mark.skipif(not prepares_for_lengths(), reason="the kernels are CUDA's")
def test_the_kernel_knows_every_scale_of_mxfp4() -> None:
    """Those of 0, which is subnormal, and 255, which is no number, too."""
    layer = quantised(WITH_KERNELS[-1])
    layer.scales = mx.arange(layer.scales.size, dtype=mx.uint32).astype(mx.uint8).reshape(layer.scales.shape)
    found, expected = (each(layer, mx.bfloat16, None) for each in (dequantized_by_kernel, dequantized))
    assert mx.array_equal(found, expected, equal_nan=True)


def test_kernels_are_for_the_formats_that_people_use_most() -> None:
    assert [has_kernel(quantised(each)) for each in WITH_KERNELS] == [True] * len(WITH_KERNELS)
    assert [has_kernel(quantised(each)) for each in WITHOUT] == [False] * len(WITHOUT)
    experts = SwitchLinear(64, 96, 3).to_quantized(group_size=64, bits=4)
    assert has_kernel(experts)


def test_a_layer_that_does_not_fill_blocks_of_threads_has_no_kernel() -> None:
    layer = nn.Linear(64, 5, bias=False).to_quantized(group_size=64, bits=4)
    assert not has_kernel(layer)


def test_without_cuda_mlx_dequantises() -> None:
    if not prepares_for_lengths():
        assert fastest_dequantizer(quantised(WITH_KERNELS[0]), mx.bfloat16) is dequantized


def other_values(layer: Any, dtype: mx.Dtype, _: int | None = None) -> mx.array:
    return dequantized(layer, dtype) * 2


def same_values(layer: Any, dtype: mx.Dtype, _: int | None = None) -> mx.array:
    return dequantized(layer, dtype)


def no_values(*_: Any) -> mx.array:
    raise RuntimeError("this device has no such kernel")


@pytest.mark.parametrize(
    ("kernel", "is_used"), [(same_values, True), (other_values, False), (no_values, False)]
)
def test_a_kernel_is_used_if_it_gives_the_same(
    kernel: Callable[..., mx.array], monkeypatch: pytest.MonkeyPatch, *, is_used: bool
) -> None:
    monkeypatch.setattr(f"{MODULE}.prepares_for_lengths", lambda: True)
    monkeypatch.setattr(f"{MODULE}.dequantized_by_kernel", kernel)
    found = fastest_dequantizer(quantised(WITH_KERNELS[0]), mx.bfloat16)
    assert found is (kernel if is_used else dequantized)
