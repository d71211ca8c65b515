"""An engine whose layers have an implementation for many rows: the same replies, and what its chunks take."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from architectures import write
from engine_models import write_adapter, write_model
from engine_requests import engine_and_batch

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.layers.many_rows import ManyRows, ManyRowsExperts

MODULE = "mlx_backend.layers.many_rows"


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


@pytest.fixture(scope="module", params=["float32", "affine", "mxfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp(request.param)
    original = write_model(scratch / "original", eos_token_id=[])
    if request.param == "float32":
        return original
    chosen: dict[str, Any] = (
        {"q_mode": "mxfp4"} if request.param == "mxfp4" else {"q_bits": 4, "q_group_size": 64}
    )
    mlx_lm.convert(str(original), mlx_path=str(scratch / "quantised"), quantize=True, **chosen)
    return scratch / "quantised"


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with load_engine(folder, dequantize=False) as engine:
        return replies(engine)


def replies(engine: Engine) -> list[list[int]]:
    requests = [
        GenerationRequest(
            prompt=[20 + (3 * at) % min(30 + length, 480) for at in range(length)], max_tokens=12
        )
        for length in (10, 90, 700)
    ]
    return [[each.token for each in engine.generate(one) if isinstance(each, TokenDelta)] for one in requests]


@pytest.mark.usefixtures("always_faster")
def test_replies_are_the_same_with_layers_for_many_rows(
    folder: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with engine_and_batch(folder) as (engine, batch):
        cost, many_rows = batch.runtime.chunk_cost, batch.runtime.many_rows
        assert many_rows is not None
        many_rows.was_used = False
        assert replies(engine) == expected
        assert many_rows.was_used
    assert "Long prompts: " in caplog.text
    assert cost.many_rows_bytes == many_rows.largest_bytes
    # The second chunk had a matrix of scores, of 4 heads and 4 bytes each. Threads decide when others are freed.
    assert cost.working_bytes(64, 128) >= 4 * 4 * 64 * 128
    assert cost.memory.per_pair <= 4 * 4 * 16


@pytest.mark.usefixtures("always_faster")
def test_caches_that_are_not_possible_are_refused_without_a_warning_of_layers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model", "qwen3", bits=4)
    with pytest.raises(EngineError, match="--kv-bits is not possible with this model"):
        load_engine(folder, kv_bits=8)
    assert "Weights are not dequantised" not in caplog.text


@pytest.mark.usefixtures("always_faster")
def test_a_network_that_cannot_wait_for_its_layers_runs_as_it_is(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def applies(many_rows: ManyRows, *_: Any) -> bool:
        if many_rows.is_enabled and many_rows.min_rows:  # in the network, not by itself
            raise RuntimeError("cannot be evaluated while it is compiled")
        return not many_rows.min_rows

    monkeypatch.setattr(ManyRows, "applies", applies)
    with engine_and_batch(folder) as (engine, batch):
        assert batch.runtime.chunk_cost.many_rows_bytes == 0
        assert replies(engine) == expected
    assert "rows not grouped by expert: RuntimeError" in caplog.text


@pytest.mark.usefixtures("always_faster")
def test_every_network_is_tried_the_draft_model_and_adapters_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", eos_token_id=[])
    adapter = write_adapter(tmp_path / "adapter", model)
    networks: set[int] = set()
    layers_of: dict[int, Any] = {}
    products = ManyRowsExperts.products

    def counted(layer: Any, *given: mx.array) -> mx.array:
        layers_of[id(layer)] = layer
        return products(layer, *given)

    monkeypatch.setattr(ManyRowsExperts, "products", counted)
    with engine_and_batch(model, draft_model=str(model), adapters={"one": adapter}, warm_up_seconds=0) as (
        _,
        batch,
    ):
        runtime = batch.runtime
        draft = runtime.networks.draft
        assert draft is not None
        for number, network in enumerate([*runtime.networks.by_adapter.values(), draft.network]):
            if any(id(module) in layers_of for module in network.modules()):
                networks.add(number)
    assert networks == {0, 1, 2}


@pytest.mark.usefixtures("always_faster")
def test_chunks_that_do_not_end_a_prompt_leave_out_the_experts_of_the_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", eos_token_id=[])
    called: list[Any] = []
    products = ManyRowsExperts.products

    def noted(layer: Any, *given: mx.array) -> mx.array:
        called.append(layer)
        return products(layer, *given)

    with engine_and_batch(model, prefill_chunk=64, cache_bytes=0) as (engine, batch):
        *others, last = batch.runtime.networks.by_adapter[""].layers
        monkeypatch.setattr(ManyRowsExperts, "products", noted)
        list(engine.generate(GenerationRequest(prompt=[20] * 4 * 64, max_tokens=1)))
    assert {sum(each is layer for each in called) for layer in _experts(others)} == {4}
    assert not any(each is layer for each in called for layer in _experts([last])), (
        "only the last token needs it"
    )


def _experts(blocks: list[Any]) -> list[Any]:
    return [each for block in blocks for each in block.modules() if isinstance(each, ManyRowsExperts)]
