"""Quantised weights that are dequantised for long prompts: the same replies, in bounded memory, where it is faster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from engine_models import write_model
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import dequantized, load_engine
from mlx_backend.engine.mlx.dequantized import (
    DequantizableLinear,
    DequantizableSwitchLinear,
    Dequantizing,
    make_dequantizable,
)
from mlx_backend.engine.mlx.prefill_plan import PrefillPacer
from mlx_backend.engine.mlx.warm_up import ChunkCost, DequantizedCost
from mlx_backend.engine.threaded import ThreadedEngine

FORMATS = [
    {"mode": "affine", "bits": bits, "group_size": size} for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64)
] + [
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
]


def layers(quantization: dict[str, Any]) -> Iterator[Any]:
    mx.random.seed(1)
    for bias in (True, False):
        linear: Any = nn.Linear(64, 96, bias=bias)
        yield linear.to_quantized(**quantization)
        yield SwitchLinear(64, 96, 4, bias=bias).to_quantized(**quantization)


def inputs(layer: Any, rows: int) -> tuple[Any, ...]:
    x = mx.random.normal((1, rows, 64))
    if isinstance(layer, nn.QuantizedLinear):
        return (x,)
    return x.reshape(rows, 1, 64), mx.sort(mx.random.randint(0, 4, (rows,)).astype(mx.uint32)), True


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dequantising found faster, for any number of rows that is tried."""
    monkeypatch.setattr(dequantized, "_seconds", lambda layer, _: float(type(layer) in LEFT_ALONE))


LEFT_ALONE = (nn.QuantizedLinear, QuantizedSwitchLinear)


class Layers(nn.Module):  # type: ignore[misc]  # MLX's modules have no types
    """A network of layers in a row."""

    def __init__(self, every: list[Any]) -> None:
        super().__init__()
        self.layers = every

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize(
    "quantization", FORMATS, ids=lambda each: f"{each['mode']}-{each['bits']}-{each['group_size']}"
)
def test_in_every_format_a_long_run_has_the_outputs_that_it_has_quantised(
    quantization: dict[str, Any],
) -> None:
    for layer in layers(quantization):
        given = inputs(layer, 64)
        expected = layer(*given)
        dequantizing = make_dequantizable([Layers([layer])], mx.float32)
        assert dequantizing is not None
        found = layer(*given)
        assert dequantizing.was_used
        assert found.dtype == expected.dtype
        assert mx.allclose(found, expected, atol=1e-5)
        with dequantizing.without_products():
            assert layer(*given).shape == expected.shape


@pytest.mark.usefixtures("always_faster")
def test_a_few_rows_are_computed_as_they_were() -> None:
    for layer in layers(FORMATS[4]):
        given = inputs(layer, 63)
        expected = layer(*given)
        dequantizing = make_dequantizable([Layers([layer])], mx.float32)
        assert dequantizing is not None
        assert mx.array_equal(layer(*given), expected)
        assert not dequantizing.was_used


def test_a_layer_is_left_alone_if_it_is_not_faster_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    slow, fast = 0.010, 0.009

    def seconds(layer: Any, given: tuple[Any, ...]) -> float:
        tried.append(given[0].size // 64)
        return slow if type(layer) in LEFT_ALONE else fast

    monkeypatch.setattr(dequantized, "_seconds", seconds)
    network = Layers(list(layers(FORMATS[4])))
    assert make_dequantizable([network], mx.float32) is None
    assert {type(layer) for layer in network.layers} == set(LEFT_ALONE)
    assert sorted({*tried}) == list(dequantized.ROW_COUNTS)
    slow = fast = 1.0
    tried.clear()
    assert make_dequantizable([network], mx.float32) is None
    assert {*tried} == {dequantized.ROW_COUNTS[0]}, "one that takes a second is not timed with more rows"


def test_layers_are_dequantised_from_the_number_of_rows_on_for_which_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(layer: Any, given: tuple[Any, ...]) -> float:
        rows: int = given[0].size // 64
        return rows * 1e-5 if type(layer) in LEFT_ALONE else 1e-3 + rows * 1e-6

    monkeypatch.setattr(dequantized, "_seconds", seconds)
    network = Layers(list(layers(FORMATS[4])))
    assert make_dequantizable([network], mx.float32) is not None
    assert [layer.min_rows for layer in network.layers] == [256] * 4
    assert {type(layer) for layer in network.layers} == {DequantizableLinear, DequantizableSwitchLinear}


@pytest.mark.usefixtures("always_faster")
def test_the_weights_of_a_layer_are_freed_before_many_others_are_dequantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 512

    def peak_memory(max_pending: int) -> int:
        """Return the bytes that a run of 16 layers takes at most, counted in dequantised layers."""
        monkeypatch.setattr(dequantized, "MAX_PENDING_BYTES", max_pending * 4 * size**2)
        network = Layers([nn.Linear(size, size, bias=False).to_quantized(64, 4) for _ in range(16)])
        mx.eval(network.parameters())
        dequantizing = make_dequantizable([network], mx.float32)
        assert dequantizing is not None
        assert dequantizing.total_bytes == 16 * 4 * size**2
        x = mx.ones((64, size))
        mx.eval(x)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(network(x))
        return (mx.get_peak_memory() - before) // (4 * size**2)

    assert peak_memory(1) < peak_memory(4) < peak_memory(16)


# -- in an engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["affine", "mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("quantised")
    original = write_model(scratch / "original", eos_token_id=[])
    chosen: dict[str, Any] = (
        {"q_mode": request.param} if request.param != "affine" else {"q_bits": 4, "q_group_size": 64}
    )
    mlx_lm.convert(str(original), mlx_path=str(scratch / "quantised"), quantize=True, **chosen)
    return scratch / "quantised"


def replies(engine: ThreadedEngine) -> list[list[int]]:
    requests = [
        GenerationRequest(
            prompt=[20 + (3 * at) % min(30 + length, 480) for at in range(length)], max_tokens=12
        )
        for length in (10, 90, 700)
    ]
    return [[each.token for each in engine.generate(one) if isinstance(each, TokenDelta)] for one in requests]


def chunk_cost(engine: ThreadedEngine) -> ChunkCost:
    cost: ChunkCost = engine._scheduler._batch.loaded.runtime.chunk_cost  # type: ignore[attr-defined]  # a ThreadedEngine, declared as an Engine
    return cost


@pytest.mark.usefixtures("always_faster")
def test_replies_are_the_same_with_dequantised_weights(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(folder, dequantize=False) as engine:
        expected = replies(engine)
        assert chunk_cost(engine).dequantized is None
    caplog.set_level("INFO")
    with load_engine(folder) as engine:
        cost = chunk_cost(engine)
        assert replies(engine) == expected
    assert "dequantised weights, from 64 rows on" in caplog.text
    assert cost.dequantized is not None
    assert cost.dequantized.min_tokens == 32, "each token has two experts"
    # Attention is measured without the layers' products: a matrix of scores, 4 heads and 4 bytes each, and some copies.
    assert 4 * 4 <= cost.per_pair <= 4 * 4 * 16
    assert cost.working_bytes(64, 64) > cost.working_bytes(16, 16) + cost.dequantized.nbytes


@pytest.mark.usefixtures("always_faster")
def test_a_network_that_cannot_wait_for_its_layers_runs_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(folder, dequantize=False) as engine:
        expected = replies(engine)

    def wait_for(dequantizing: Dequantizing, *_: Any) -> None:
        if dequantizing._is_forced:
            raise RuntimeError("cannot be evaluated while it is compiled")

    monkeypatch.setattr(Dequantizing, "wait_for", wait_for)
    with load_engine(folder) as engine:
        assert chunk_cost(engine).dequantized is None
        assert replies(engine) == expected
    assert "not computed with dequantised weights: RuntimeError" in caplog.text


# -- what chunks take -------------------------------------------------------------------------------------------


def test_chunks_are_as_long_as_fits_into_the_longest_stall_beside_what_dequantising_takes() -> None:
    # Measured on an H100 with gpt-oss-20b's shapes in mxfp4, where 1024 tokens a second would be a chunk of 256.
    cost = ChunkCost(1_500, 0, 0, DequantizedCost({64: 0.086, 128: 0.145, 512: 0.216, 2048: 0.31}, 1 << 30))
    pacer = PrefillPacer(None, cost.rate, cost.work)
    assert pacer.chunk_size(0, others_wait=True) == 2048
    for _ in range(3):
        pacer.record(2048, 0.4)  # behind many tokens
    assert pacer.chunk_size(0, others_wait=True) == 1024
    assert PrefillPacer(None, cost.rate).chunk_size(0, others_wait=True) == 256


def test_the_time_of_a_chunk_lies_between_those_measured_next_to_it() -> None:
    cost = DequantizedCost({64: 1.0, 256: 2.0, 1024: 4.0}, 0)
    assert cost.seconds_of(160) == 1.5
    assert [cost.seconds_of(each) for each in cost.seconds] == [1.0, 2.0, 4.0]
    assert cost.seconds_of(2560) == 8.0
    assert DequantizedCost({64: 1.0}, 0).seconds_of(128) == 2.0
    assert DequantizedCost({64: 1.0, 128: 0.5}, 0).seconds_of(256) == 0.5, "a longer one is never faster"


def test_a_chunk_for_which_nothing_is_dequantised_needs_no_memory_for_that() -> None:
    cost = ChunkCost(1_000, 10, 0, DequantizedCost({64: 0.1}, 5_000))
    assert (cost.working_bytes(63, 63), cost.working_bytes(64, 64)) == (630, 5_640)
    assert cost.work(63) == 127
    assert cost.work(64) == 100
