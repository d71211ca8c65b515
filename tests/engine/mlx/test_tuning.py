"""A model is served while its kernels are compiled, and takes what is faster when that is there."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from engine_models import write_model
from engine_requests import engine_and_batch, together

from mlx_backend.engine.base import GenerationRequest
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.tuning import answer_requests
from mlx_backend.engine.threaded import Engine
from mlx_backend.layers.kernel_compiler import KernelCompiler, KernelJob

MODULE = "mlx_backend.engine.mlx"
OWN_MATMUL = mx.quantized_matmul


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("quantised")
    original = write_model(scratch / "original", eos_token_id=[])
    mlx_lm.convert(str(original), mlx_path=str(scratch / "model"), quantize=True, q_bits=4, q_group_size=64)
    return scratch / "model"


class Processes:
    """Stand in for those that compile: they are done when `ended` is set, and find out `found`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.found: dict[str, Any] | None = {"is_right": True, "by_kernel": False}

    def do(self, _compiler: KernelCompiler, _job: KernelJob) -> dict[str, Any] | None:
        self.ended.wait()
        return self.found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Processes]:
    """Have a CPU served as an NVIDIA GPU on which nothing has been compiled."""
    found = Processes()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KernelCompiler, "_do", lambda *given: found.do(*given))
    monkeypatch.setattr("mlx_backend.layers.many_rows.MIN_WEIGHTS", 0)
    monkeypatch.setattr(f"{MODULE}.runtime.prepares_for_lengths", lambda: True)
    monkeypatch.setattr(f"{MODULE}.tuning.is_gpu", lambda: True)
    yield found
    found.ended.set()


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt=[20 + (3 * at) % min(30 + length, 480) for at in range(length)], max_tokens=12
        )
        for length in (10, 90, 700)
    ]


def replies(engine: Engine) -> list[list[int]]:
    return [together(engine, [each])[0] for each in requests()]


def wait_until_tuned(engine: Engine) -> None:
    while engine.status().detail:
        pass


def test_a_model_is_served_before_its_kernels_are_compiled_and_faster_afterwards(
    folder: Path, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with engine_and_batch(folder, context_length=1024) as (engine, batch):
        assert engine.is_healthy()
        assert "are being compiled (0 of " in engine.status().detail
        assert mx.quantized_matmul is not OWN_MATMUL
        expected = replies(engine)
        assert batch.runtime.many_rows is None
        processes.ended.set()
        wait_until_tuned(engine)
        assert mx.quantized_matmul is OWN_MATMUL
        assert batch.runtime.many_rows is not None
        assert batch.runtime.many_rows.is_enabled
        assert batch.runtime.chunk_cost.many_rows_from > 0
        assert batch.prefill_queue.pacer.rate == batch.runtime.chunk_cost.rate
        assert replies(engine) == expected
    assert "Kernels for" in caplog.text
    assert "The model is ready and warm" in caplog.text


def test_requests_between_the_slices_get_the_same_replies(
    folder: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.tuning.BUSY_SECONDS", 0.0)
    with engine_and_batch(folder, context_length=1024) as (engine, batch):
        expected = replies(engine)
        processes.ended.set()
        rounds = 0
        while engine.status().detail or rounds < 2:
            assert together(engine, requests()) == expected
            rounds += 1
        while batch.sequences:  # a reply's last token is there before the reply has left
            pass
        assert batch.runtime.many_rows is not None


def test_the_made_up_requests_give_way_to_real_ones_and_leave_what_they_cached(
    folder: Path, processes: Processes
) -> None:
    processes.ended.set()
    [_, request, _] = requests()
    with engine_and_batch(folder, context_length=1024, warm_up_seconds=0) as (engine, batch):
        wait_until_tuned(engine)
        expected = together(engine, [request])
        made_up = answer_requests(batch, context_length=1024, seconds=60)
        ended = threading.Event()

        def interrupted(*, is_idle: bool) -> bool:
            """Three steps, and then a real request."""
            if is_idle and not ended.is_set() and len(steps) < 3:
                steps.append(next(made_up))
                return True
            made_up.close()  # type: ignore[attr-defined]  # a generator
            ended.set()
            return False

        steps: list[None] = []
        object.__setattr__(engine._info, "tune", interrupted)
        engine._scheduler.wake()
        assert ended.wait(60)
        assert len(steps) == 3
        assert not batch.sequences
        assert batch.runtime.cache_budget.used == 0
        prefixes = batch.runtime.prefix_store.prefixes
        assert prefixes.find_longest([0] * 250)[0] == 0
        assert prefixes.find_longest(request.prompt)[0] > 0
        assert together(engine, [request]) == expected


@pytest.mark.parametrize("found", [None, {"is_right": False, "by_kernel": False}], ids=["failed", "wrong"])
def test_layers_stay_as_they_are_if_their_kernels_cannot_be_had(
    folder: Path, processes: Processes, found: dict[str, Any] | None
) -> None:
    processes.found = found
    processes.ended.set()
    with engine_and_batch(folder, context_length=1024, warm_up_seconds=0) as (engine, batch):
        wait_until_tuned(engine)
        assert batch.runtime.many_rows is None
        assert mx.quantized_matmul is OWN_MATMUL
        assert len(replies(engine)) == 3


def test_a_failure_while_a_model_is_tuned_fails_no_request(
    folder: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(f"{MODULE}.warm_up.WarmUp.measure_many_rows", fails)
    with engine_and_batch(folder, context_length=1024) as (engine, batch):
        expected = replies(engine)
        processes.ended.set()
        wait_until_tuned(engine)
        assert replies(engine) == expected
        assert batch.runtime.many_rows is None
    assert "what makes it faster failed: RuntimeError('out of memory')" in caplog.text


def test_a_model_is_unloaded_at_once_while_its_kernels_are_compiled(
    folder: Path, processes: Processes
) -> None:
    with engine_and_batch(folder) as (engine, batch):
        kernels = batch.runtime.kernels
        assert kernels is not None
        engine.stop()
        assert mx.quantized_matmul is OWN_MATMUL
        assert not kernels.is_done
        assert not processes.ended.is_set()


def test_on_a_cpu_nothing_is_left_to_do(folder: Path) -> None:
    with engine_and_batch(folder) as (engine, batch):
        assert not engine.status().detail
        assert isinstance(batch, MLXBatch)
        assert batch.runtime.kernels is None
