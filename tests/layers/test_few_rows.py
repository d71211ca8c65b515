"""Products a few rows at a time are the same, and MLX's own function comes back."""

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_backend.layers.few_rows import use_few_rows

ORIGINAL = mx.quantized_matmul
FORMATS: list[dict[str, Any]] = [
    {"bits": 8, "group_size": 64},
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
]


@pytest.mark.parametrize("quantization", FORMATS, ids=["affine", "mxfp4"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 30), (1, 1, 8)], ids=str)
def test_rows_have_the_same_products_a_few_at_a_time(
    quantization: dict[str, Any], shape: tuple[int, ...]
) -> None:
    layer, embedding = (kind(192, 128).to_quantized(**quantization) for kind in (_linear, nn.Embedding))
    x = mx.random.normal((*shape, 128))
    expected = layer(x), embedding.as_linear(x)
    mx.eval(expected)
    stop = use_few_rows()
    try:
        assert mx.quantized_matmul is not ORIGINAL
        assert all(map(mx.array_equal, (layer(x), embedding.as_linear(x)), expected))
    finally:
        stop()


def _linear(outputs: int, inputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def test_the_function_is_mlx_s_own_again_when_the_last_model_needs_no_other() -> None:
    first, second = use_few_rows(), use_few_rows()
    first()
    assert mx.quantized_matmul is not ORIGINAL
    second()
    assert mx.quantized_matmul is ORIGINAL
