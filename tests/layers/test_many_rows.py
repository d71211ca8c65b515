"""Layers with an implementation for many rows: the same outputs, in bounded memory, and only where it is faster."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.layers.many_rows import (
    MAX_PENDING_SHARE,
    MIN_ROWS,
    MIN_ROWS_OF_QUICK_BITS,
    ManyRows,
    ManyRowsExperts,
    ManyRowsLinear,
    ManyRowsQuantizedExperts,
    use_many_rows_layers,
)

MODULE = "mlx_backend.layers.many_rows"
WIDTH, OUTPUTS, EXPERTS = 64, 96, 4
FOUR_BITS = {"mode": "affine", "bits": 4, "group_size": 64}
FORMATS: list[dict[str, Any]] = [
    {"mode": "affine", "bits": bits, "group_size": size} for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64)
] + [
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]
AS_THEY_ARE = (nn.QuantizedLinear, QuantizedSwitchLinear, SwitchLinear)


class Layers(nn.Module):  # type: ignore[misc]  # MLX's modules have no types
    """A network of layers in a row."""

    def __init__(self, *every: Any) -> None:
        super().__init__()
        self.layers = list(every)

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return x


def quantised_layers(quantization: dict[str, Any]) -> Iterator[Any]:
    mx.random.seed(1)
    for bias in (True, False):
        yield nn.Linear(WIDTH, OUTPUTS, bias=bias).to_quantized(**quantization)
        yield SwitchLinear(WIDTH, OUTPUTS, EXPERTS, bias=bias).to_quantized(**quantization)


def inputs(layer: Any, rows: int) -> tuple[Any, ...]:
    x = mx.random.normal((1, rows, WIDTH))
    if isinstance(layer, nn.QuantizedLinear):
        return (x,)
    experts = mx.random.randint(0, EXPERTS, (rows,)).astype(mx.uint32)
    return (
        x.reshape(rows, 1, WIDTH),
        mx.sort(mx.where(experts == 1, 2, experts)),
        True,
    )  # one expert has no rows


def prepare(*layers: Any, dequantize: bool = True) -> ManyRows | None:
    return use_many_rows_layers([Layers(*layers)], mx.float32, dequantize=dequantize)


@pytest.fixture(autouse=True)
def small_layers_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", 0)


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the implementation for many rows used for a few."""
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS", 2)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS_OF_QUICK_BITS", 2)
    monkeypatch.setattr(f"{MODULE}.MIN_ROWS_OF_SMALL_FLOATS", 2)
    monkeypatch.setattr(f"{MODULE}.has_fast_blas", lambda: True)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize(
    "quantization", FORMATS, ids=lambda each: f"{each['mode']}-{each['bits']}-{each['group_size']}"
)
def test_in_every_format_many_rows_have_the_outputs_that_they_have_quantised(
    quantization: dict[str, Any],
) -> None:
    for layer in quantised_layers(quantization):
        given = inputs(layer, 64)
        expected = layer(*given)
        many_rows = prepare(layer)
        assert many_rows is not None
        found = layer(*given)
        assert many_rows.was_used
        assert found.dtype == expected.dtype
        assert mx.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("grown", [True, False])
def test_of_a_run_for_its_caches_nothing_is_computed_once_all_have_grown(*, grown: bool) -> None:
    old, new = KVCache(), KVCache()
    state = mx.zeros((1, 1, 4, 8))
    for layer in (*quantised_layers(FOUR_BITS), SwitchLinear(WIDTH, OUTPUTS, EXPERTS)):
        given = inputs(layer, MIN_ROWS)
        expected = layer(*given)
        many_rows = prepare(layer)
        assert many_rows is not None
        with many_rows.filling([old, new]):
            old.update_and_fetch(state, state)
            if grown:
                new.update_and_fetch(state, state)
            found = layer(*given)
        assert found.shape == expected.shape
        assert mx.allclose(found, 0 * expected if grown else expected, atol=1e-5)
        assert mx.allclose(layer(*given), expected, atol=1e-5)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("quantised", [True, False])
def test_the_layer_that_computes_logits_is_left_alone(*, quantised: bool) -> None:
    """Or all logits of a chunk, which are not read, would be computed to have its weights freed."""
    words, positions = nn.Embedding(500, WIDTH), nn.Embedding(OUTPUTS, WIDTH)
    inner, head = (nn.Linear(WIDTH, size).to_quantized(**FOUR_BITS) for size in (OUTPUTS, 500))
    embeddings = [each.to_quantized(**FOUR_BITS) if quantised else each for each in (words, positions)]
    assert prepare(*embeddings, inner, head) is not None
    assert (type(inner), type(head)) == (ManyRowsLinear, nn.QuantizedLinear)


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("bias", [True, False])
def test_the_rows_of_experts_that_are_not_quantised_are_grouped(*, bias: bool) -> None:
    layer = SwitchLinear(WIDTH, OUTPUTS, EXPERTS, bias=bias)
    given = inputs(layer, 64)
    expected = layer(*given)
    many_rows = prepare(layer, dequantize=False)
    assert many_rows is not None
    assert type(layer) is ManyRowsExperts
    assert mx.allclose(layer(*given), expected, atol=1e-5)
    assert many_rows.was_used
    assert many_rows.max_pending_bytes == 0


def test_a_few_rows_are_computed_as_they_were() -> None:
    for layer in (*quantised_layers(FOUR_BITS), SwitchLinear(WIDTH, OUTPUTS, EXPERTS)):
        given = inputs(layer, MIN_ROWS_OF_QUICK_BITS - 1)
        expected = layer(*given)
        many_rows = prepare(layer)
        assert many_rows is not None
        assert mx.array_equal(layer(*given), expected)
        assert not many_rows.was_used


@pytest.mark.usefixtures("always_faster")
def test_what_is_not_to_be_dequantised_and_what_is_small_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = list(quantised_layers(FOUR_BITS))
    assert prepare(*layers, dequantize=False) is None
    monkeypatch.setattr(f"{MODULE}.MIN_WEIGHTS", EXPERTS * WIDTH * OUTPUTS)
    assert prepare(*layers) is not None
    assert [type(layer) for layer in layers[:2]] == [nn.QuantizedLinear, ManyRowsQuantizedExperts]


@pytest.mark.parametrize(
    ("quantization", "rows"),
    [
        (FOUR_BITS, 4),
        ({"mode": "affine", "bits": 6, "group_size": 64}, 8),
        ({"mode": "mxfp8", "bits": 8, "group_size": 32}, 4),
        (FORMATS[-3], 64),
        (FORMATS[-1], 64),
    ],
    ids=lambda each: f"{each['mode']}-{each['bits']}" if isinstance(each, dict) else str(each),
)
def test_a_format_says_from_how_many_rows_of_each_matrix_on_it_is_dequantised(
    quantization: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.has_fast_blas", lambda: True)
    layers = list(quantised_layers(quantization))
    assert prepare(*layers) is not None
    assert [layer.min_rows for layer in layers] == [rows, EXPERTS * rows] * 2
    assert {type(layer) for layer in layers} == {ManyRowsLinear, ManyRowsQuantizedExperts}


@pytest.mark.parametrize("is_fast", [True, False])
def test_floats_of_four_bits_are_dequantised_on_a_cpu_only_with_a_fast_blas(
    monkeypatch: pytest.MonkeyPatch, *, is_fast: bool
) -> None:
    monkeypatch.setattr(f"{MODULE}.has_fast_blas", lambda: is_fast)
    assert (prepare(*quantised_layers(FORMATS[-3])) is not None) is is_fast
    assert prepare(*quantised_layers(FOUR_BITS)) is not None


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("wrong", ["rows", "numbers", "error"])
def test_an_implementation_that_gives_other_outputs_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device may get wrong what others get right: each kind of layer is compared when it is loaded."""
    products = ManyRowsExperts.products

    def wrong_products(layer: Any, *given: mx.array) -> mx.array:
        if wrong == "error":
            raise ValueError("no such kernel")
        outputs = products(layer, *given)
        return outputs[::-1] if wrong == "rows" else outputs * mx.nan

    monkeypatch.setattr(ManyRowsExperts, "products", wrong_products)
    layer = SwitchLinear(WIDTH, OUTPUTS, EXPERTS)
    assert prepare(layer, nn.Linear(WIDTH, OUTPUTS).to_quantized(**FOUR_BITS)) is not None
    assert type(layer) is SwitchLinear
    reason = {"rows": "off by 1", "numbers": "off by nan", "error": "no such kernel"}[wrong]
    assert (
        f"SwitchLinear is computed as it is, also for long prompts: {'ValueError' if wrong == 'error' else ''}"
        in caplog.text
    )
    assert reason in caplog.text


@pytest.mark.usefixtures("always_faster")
def test_on_a_gpu_decode_steps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = list(quantised_layers(FOUR_BITS))
    monkeypatch.setattr(f"{MODULE}.is_gpu", lambda: True)
    assert prepare(*layers) is not None
    assert [layer.min_rows for layer in layers] == [64] * 4


def peak_memory(network: Any, *given: mx.array | bool) -> int:
    """Return the bytes that a run needs at most in addition to its inputs and what is quantised."""
    mx.eval(network.parameters(), [each for each in given if isinstance(each, mx.array)])
    assert prepare(network) is not None
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(network(*given))
    return mx.get_peak_memory() - before


@pytest.mark.usefixtures("always_faster")
def test_dequantised_weights_are_freed_before_those_of_many_other_layers_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{MODULE}.is_gpu", lambda: True)

    def peak_with(layers_pending: int) -> int:
        monkeypatch.setattr(f"{MODULE}.gpu_memory", lambda: layers_pending * 4 * 512**2 / MAX_PENDING_SHARE)
        network = Layers(*(nn.Linear(512, 512, bias=False).to_quantized(64, 4) for _ in range(16)))
        return peak_memory(network, mx.ones((64, 512)))

    assert peak_with(1) < peak_with(4) < peak_with(16)


@pytest.mark.usefixtures("always_faster")
def test_a_part_of_the_weights_at_a_time_is_dequantised_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.PART_BYTES", 4 * 512 * 100)  # no whole number of parts
    inputs, layer = mx.random.normal((4, 512)), nn.Linear(512, 512).to_quantized(64, 4)
    mixture, experts = SwitchLinear(512, 512, 16).to_quantized(64, 4), mx.arange(64, dtype=mx.uint32) // 4
    expected = layer(inputs), mixture(mx.ones((64, 1, 512)), experts, True)
    assert peak_memory(layer, inputs) < 4 * 512**2 / 2
    assert peak_memory(mixture, mx.ones((64, 1, 512)), experts, True) < 4 * 512**2
    found = layer(inputs), mixture(mx.ones((64, 1, 512)), experts, True)
    assert all(mx.allclose(*pair, atol=1e-4) for pair in zip(found, expected, strict=True))
