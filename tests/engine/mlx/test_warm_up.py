"""What is run when a model is loaded: its speed and its working memory, and on a GPU what is slow the first time."""

from pathlib import Path

import mlx.core as mx
import pytest
from engine_models import write_model

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.chunk_sizes import PADDED_SIZES
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.engine.threaded import ThreadedEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[])


def replies(engine: ThreadedEngine) -> list[list[int]]:
    requests = [GenerationRequest(prompt=[20 + at] * 90, max_tokens=12) for at in range(3)]
    return [[each.token for each in engine.generate(one) if isinstance(each, TokenDelta)] for one in requests]


def test_a_warm_up_leaves_nothing_behind_and_changes_no_reply(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(folder) as engine:
        expected = replies(engine)
    caplog.set_level("INFO")
    for module in ("runtime", "batch"):
        monkeypatch.setattr(f"mlx_backend.engine.mlx.{module}.is_gpu", lambda: True)
    with load_engine(folder, warm_up_seconds=0) as engine:
        assert replies(engine) == expected
    assert "to warm up" not in caplog.text
    with load_engine(folder, warm_up_seconds=60, context_length=512) as engine:
        loaded = engine._scheduler._batch.loaded  # type: ignore[attr-defined]  # a ThreadedEngine, declared as an Engine
        assert loaded.steps > 0
        assert not loaded.sequences
        assert len(loaded.runtime.prefixes) == 0
        assert loaded.runtime.cache_budget.used == 0
        assert loaded.prefill_queue.pacer.rate == loaded.runtime.chunk_cost.rate
        assert replies(engine) == expected
    assert "Prompts of up to 512 tokens were run to warm up" in caplog.text


def test_a_warm_up_stops_before_its_time_is_up() -> None:
    sizes: list[int] = []

    class Timed(WarmUp):
        def _run(self, lengths: list[int]) -> list[tuple[float, int]]:  # type: ignore[override]  # without the caches
            sizes.extend(lengths)
            return [(0.1, 0)]

    Timed(None, list, max_tokens=4096, num_tokens=9, agree=lambda value: value).run_lengths(0.25)
    assert sizes == [PADDED_SIZES[0]], "three times 0.1 seconds are too much"
    sizes.clear()
    Timed(None, list, max_tokens=100, num_tokens=9, agree=lambda value: value).run_lengths(60)
    assert sizes == [each for each in PADDED_SIZES if each <= 100]


def test_chunks_are_measured_with_various_tokens_that_the_model_has() -> None:
    """Equal ones would all go to the same few of a mixture's experts, and take less time than a text."""
    seen: list[int] = []

    def network(tokens: mx.array, cache: object) -> None:
        seen.extend(as_ints(tokens[0]))

    for num_tokens in (9, 100_000):
        seen.clear()
        WarmUp(network, list, max_tokens=4096, num_tokens=num_tokens, agree=lambda value: value).measure()
        assert len(set(seen)) > 8
        assert 0 <= min(seen) < max(seen) < num_tokens


def test_the_working_memory_of_a_chunk_is_what_its_computation_takes(folder: Path) -> None:
    with load_engine(folder) as engine:
        cost = engine._scheduler._batch.loaded.runtime.chunk_cost  # type: ignore[attr-defined]  # a ThreadedEngine, declared as an Engine
    assert cost.rate > 0
    # Attention on a CPU makes a matrix of scores: 4 heads, 4 bytes each, and a copy or two.
    assert 4 * 4 <= cost.per_pair <= 4 * 4 * 8
    assert cost.working_bytes(64, 1000) > cost.working_bytes(64, 64) > 64 * 64 * 4
