"""What is run when a model is loaded: its speed and its working memory, and on a GPU what is slow the first time."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_models import write_model
from engine_requests import engine_and_batch

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.chunk_cost import PADDED_SIZES
from mlx_backend.engine.mlx.kv_cache import LayerCaches
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.engine.threaded import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[])


def replies(engine: Engine) -> list[list[int]]:
    requests = [GenerationRequest(prompt=[20 + at] * 90, max_tokens=12) for at in range(3)]
    return [[each.token for each in engine.generate(one) if isinstance(each, TokenDelta)] for one in requests]


def test_a_warm_up_leaves_nothing_behind_and_changes_no_reply(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(folder) as engine:
        expected = replies(engine)
    caplog.set_level("INFO")
    monkeypatch.setattr("mlx_backend.engine.mlx.warm_up.MAX_RUN_SECONDS", 60.0)
    for module in ("runtime", "tuning"):
        monkeypatch.setattr(f"mlx_backend.engine.mlx.{module}.is_gpu", lambda: True)
    with load_engine(folder, warm_up_seconds=0) as engine:
        assert replies(engine) == expected
    assert "to warm up" not in caplog.text
    with engine_and_batch(folder, warm_up_seconds=60, context_length=512) as (engine, batch):
        while engine.status().detail:
            pass
        assert batch.steps > 0
        assert not batch.sequences
        assert len(batch.runtime.prefix_store.prefixes) == 0
        assert batch.runtime.cache_budget.used == 0
        assert batch.prefill_queue.pacer.rate == batch.runtime.chunk_cost.rate
        assert replies(engine) == expected
    assert "Prompts of up to 512 tokens were run to warm up" in caplog.text


def test_a_warm_up_stops_before_its_time_is_up() -> None:
    sizes: list[int] = []

    class Timed(WarmUp):
        def _run(self, lengths: list[int]) -> list[tuple[float, int]]:  # type: ignore[override]  # without the caches
            sizes.extend(lengths)
            return [(0.1, 0)]

    warm_up = Timed(None, list, max_tokens=4096, room=1 << 30, num_tokens=9, agree=lambda value: value)
    list(warm_up.run_lengths(0.25))
    assert sizes == [PADDED_SIZES[0]], "three times 0.1 seconds are too much"
    sizes.clear()
    warm_up = Timed(None, list, max_tokens=100, room=1 << 30, num_tokens=9, agree=lambda value: value)
    list(warm_up.run_lengths(60))
    assert sizes == [each for each in PADDED_SIZES if each <= 100]


def test_chunks_are_measured_with_various_tokens_that_the_model_has() -> None:
    """Equal ones would all go to the same few of a mixture's experts, and take less time than a text."""
    seen: list[int] = []

    def network(tokens: mx.array, cache: object) -> None:
        seen.extend(as_ints(tokens[0]))

    for num_tokens in (9, 100_000):
        seen.clear()
        WarmUp(
            network,
            list,
            max_tokens=4096,
            room=1 << 30,
            num_tokens=num_tokens,
            agree=lambda value: value,
        ).measure()
        assert len(set(seen)) > 8
        assert 0 <= min(seen) < max(seen) < num_tokens


def test_the_working_memory_of_long_chunks_is_foreseen_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache needs the last layer's attention. A CPU makes a matrix of the other one's scores."""
    folder = write_model(
        tmp_path / "model",
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=32_768,
        eos_token_id=[],
    )
    monkeypatch.setattr("mlx_backend.engine.mlx.runtime.prepares_for_lengths", lambda: True)
    with engine_and_batch(folder) as (engine, batch):
        while engine.status().detail:
            pass
        runtime = batch.runtime
        cost = runtime.chunk_cost
        assert cost.rate > 0
        network, make_caches = runtime.networks.by_adapter[""], runtime.networks.fresh_layers
        for tokens, context in ((64, 2048), (1024, 1024), (1024, 8192)):
            foreseen = cost.working_bytes(tokens, context)
            # Other threads may free arrays of the tokens before so late that they count, though not in every run.
            taken = (run_after(network, context - tokens, tokens, make_caches("")) for _ in range(5))
            assert any(0.9 * each <= foreseen <= 4 * each for each in taken)


def run_after(network: Any, before: int, tokens: int, layers: LayerCaches) -> int:
    """Return how many bytes a chunk takes after so many tokens."""
    run(network, 1, layers)
    if before:
        run(network, before - 1, layers)
    return run(network, tokens, layers)


def run(network: Any, tokens: int, layers: LayerCaches) -> int:
    """Return how many bytes a chunk takes in addition to what was there before."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    network(mx.arange(tokens)[None] % 200, cache=layers)
    mx.eval([layer.state for layer in layers])
    return mx.get_peak_memory() - before
