"""Rows of a mixture of experts in blocks: the same products, whatever share of the rows an expert has."""

import mlx.core as mx
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_backend.layers.many_rows import BLOCK, RowBlocks, use_many_rows_layers

INPUTS, OUTPUTS = 32, 48
MODULE = "mlx_backend.layers.many_rows"


@pytest.mark.parametrize(
    "counts",
    [
        [1],
        [BLOCK],
        [BLOCK + 1],
        [0, 0, 5],
        [5, 0, 0, 0],
        [BLOCK, 0, BLOCK - 1, 1],
        [2 * BLOCK, 3 * BLOCK, BLOCK],
        [1] * 20,
        [BLOCK + 1] * 7,
        [0, 1000, 3],
    ],
    ids=str,
)
def test_each_row_is_multiplied_by_its_experts_weights(counts: list[int]) -> None:
    weights = mx.random.normal((len(counts), OUTPUTS, INPUTS), key=mx.random.key(1))
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    x = mx.random.normal((len(experts), 1, INPUTS), key=mx.random.key(2))
    found = RowBlocks.of(mx.array(experts, mx.uint32), len(counts)).multiply(x, weights)
    expected = mx.stack([row @ weights[expert].T for row, expert in zip(x, experts, strict=True)])
    assert found.shape == (len(experts), 1, OUTPUTS)
    assert mx.allclose(found, expected, atol=1e-4)


def test_there_are_few_more_blocks_than_the_rows_fill() -> None:
    one_each = RowBlocks.of(mx.arange(16, dtype=mx.uint32), 256)
    assert one_each.experts.shape == (16,)
    assert RowBlocks.of(mx.zeros((10 * BLOCK,), mx.uint32), 4).experts.shape == (14,)


@pytest.mark.parametrize("quantised", [True, False])
def test_on_a_gpu_a_mixture_has_the_same_outputs_and_arranges_its_rows_once(
    monkeypatch: pytest.MonkeyPatch, *, quantised: bool
) -> None:
    """Its three matrices are multiplied with rows of the same experts."""
    monkeypatch.setattr(f"{MODULE}.is_gpu", lambda: True)
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 0)
    arranged: list[int] = []
    arrange = RowBlocks.of

    def counted(indices: mx.array, num_experts: int) -> RowBlocks:
        arranged.append(indices.size)
        return arrange(indices, num_experts)

    monkeypatch.setattr(RowBlocks, "of", counted)
    mx.random.seed(3)
    mixture = SwitchGLU(64, 96, 4)
    if quantised:
        for name in ("gate_proj", "up_proj"):
            mixture[name] = mixture[name].to_quantized(64, 4)
        mixture.down_proj = mixture.down_proj.to_quantized(32, 8)
    x = mx.random.normal((1, 50, 64))
    experts = mx.random.randint(0, 3, (1, 50, 2))  # the last has no rows
    expected = mixture(x, experts)
    assert use_many_rows_layers([mixture], mx.float32, dequantize=True) is not None
    arranged.clear()
    for _ in range(2):
        assert mx.allclose(mixture(x, experts), expected, atol=1e-4)
    assert arranged == [100, 100]
