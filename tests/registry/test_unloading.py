"""Leases, and unloading: when idle for too long, on request, and when the server stops."""

import gc
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pool_harness import SOON, FakeService, PoolHarness, error_of, pool_threads, spec
from served_models import models_of_every_type

from mlx_backend.errors import EngineStopped
from mlx_backend.models.spec import ModelSpec
from mlx_backend.preparation import Preparation, PreparationCancelled
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import ModelLoading, ModelPinned, UnknownModel
from mlx_backend.registry.model_pool import DRAINING, NOT_LOADED, UNLOADED, ModelPool
from mlx_backend.settings import Settings

# -- leases -------------------------------------------------------------------------------------------------


def test_releasing_a_lease_twice_counts_once(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    first, second = pool.acquire("a", SOON), pool.acquire("a", SOON)
    first.release()
    first.release()
    assert harness.status("a").in_use == 1
    with pytest.raises(RuntimeError, match="'a' has been released"):
        _ = first.service
    second.release()
    assert harness.status("a").in_use == 0


def test_a_forgotten_lease_is_released(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    lease = pool.acquire("a", SOON)
    del lease
    gc.collect()
    assert harness.status("a").in_use == 0


def test_a_failing_block_releases_its_lease(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    with pytest.raises(ZeroDivisionError), pool.acquire("a", SOON):
        _ = 1 // 0
    assert harness.status("a").in_use == 0


# -- idle ---------------------------------------------------------------------------------------------------


def test_an_idle_model_is_unloaded_when_its_time_to_live_is_over(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", ttl=60))
    with pool.acquire("a", SOON) as lease:
        engine = lease.service.engine
        harness.clock.advance(1000)
        assert harness.status("a").state == "ready", "it is in use"
    harness.clock.advance(59)
    pool.acquire("a", 0).release()
    harness.clock.advance(59)
    pool.acquire("a", 0).release()
    assert engine.is_healthy(), "each use restarts the time"
    harness.clock.advance(60)
    harness.wait_for_state("a", "unloaded")
    assert not engine.is_healthy()
    pool.acquire("a", math.inf).release()
    assert harness.loads == ["a", "a"]


def test_a_model_that_was_loaded_but_never_used_is_unloaded_too(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", ttl=60))
    with pytest.raises(ModelLoading):
        pool.acquire("a", 0)
    harness.wait_for_state("a", "ready")
    harness.clock.advance(60)
    harness.wait_for_state("a", "unloaded")


def test_each_model_has_its_own_time_to_live_and_a_pinned_one_has_none(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", ttl=60), spec("b", ttl=20), spec("c", ttl=1, pinned=True), spec("d"))
    for name in "abcd":
        pool.acquire(name, SOON).release()
    harness.clock.advance(20)
    harness.wait_for_state("b", "unloaded")
    harness.clock.advance(40)
    harness.wait_for_state("a", "unloaded")
    assert [harness.status(name).state for name in "abcd"] == ["unloaded", "unloaded", "ready", "ready"]


def test_a_request_can_give_a_model_another_time_to_live_until_it_is_unloaded(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", ttl=60), spec("b", pinned=True), spec("c"))
    assert pool.keep("c", 5), "nothing happens to one that is not in memory"
    for name in "abc":
        pool.acquire(name, SOON).release()
    assert [pool.keep(name, 300) for name in "abc"] == [True, False, True]
    harness.clock.advance(299)
    assert [harness.status(name).unloads_in for name in "abc"] == [1, None, 1]
    with pool.acquire("a", SOON):
        assert harness.status("a").unloads_in == 300
        harness.clock.advance(1)
        harness.wait_for_state("c", "unloaded")
        pool.keep("a", 0)
        assert harness.status("a").state == "ready", "it is in use"
    harness.wait_for_state("a", "unloaded")
    pool.acquire("a", SOON).release()
    assert harness.status("a").unloads_in == 60, "as configured again"
    pool.keep("a", math.inf)
    harness.clock.advance(10_000)
    assert harness.status("a").unloads_in is None


def test_without_a_time_to_live_no_unloader_thread_runs(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    assert pool_threads() == set()
    pool.acquire("a", SOON).release()
    assert pool_threads() == {"model-loader"}


# -- on request ---------------------------------------------------------------------------------------------


def test_an_idle_model_is_unloaded_at_once(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", aliases=("x",)))
    assert pool.unload("a") == NOT_LOADED
    with pool.acquire("a", SOON) as lease:
        engine = lease.service.engine
    assert pool.unload("x") == UNLOADED
    assert not engine.is_healthy()
    assert pool.unload("a") == NOT_LOADED
    with pytest.raises(UnknownModel):
        pool.unload("nobody")


def test_a_model_in_use_is_unloaded_after_its_replies_and_reloaded_for_new_requests(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    first, second = pool.acquire("a", SOON), pool.acquire("a", SOON)
    old = first.service
    assert pool.unload("a") == DRAINING
    with pytest.raises(ModelLoading):
        pool.acquire("a", 0)
    pending = executor.submit(pool.acquire, "a", math.inf)
    first.release()
    assert old.engine.is_healthy(), "a reply is still running"
    assert not pending.done()
    second.release()
    assert pending.result(SOON).service is not old
    assert not old.engine.is_healthy()
    assert harness.loads == ["a", "a"]


def test_a_model_unloaded_during_its_load_still_serves_those_who_waited_for_it(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    gate = harness.pause_load("a")
    pending = executor.submit(pool.acquire, "a", math.inf)
    harness.wait_for_waiters("a", 1)
    assert pool.unload("a") == DRAINING
    gate.set()
    lease = pending.result(SOON)
    assert lease.service.engine.is_healthy()
    lease.release()
    harness.wait_for_state("a", "unloaded")


def test_a_model_unloaded_during_its_load_with_nobody_waiting_is_unloaded_at_its_end(
    harness: PoolHarness,
) -> None:
    pool = harness.serve(spec("a"))
    gate = harness.pause_load("a")
    with pytest.raises(ModelLoading):
        pool.acquire("a", 0)
    assert harness.started["a"].wait(SOON)
    pool.unload("a")
    gate.set()
    harness.wait_for_state("a", "unloaded")
    assert harness.loads == ["a"]


@pytest.mark.parametrize("by", ["request", "time"])
def test_a_model_is_unloaded_although_the_last_who_waited_for_it_gave_up_when_it_was_ready(
    harness: PoolHarness, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    pool = harness.serve(spec("a", ttl=60 if by == "time" else None))
    gate, unloader_sleeps = harness.pause_load("a"), threading.Event()
    preparation = Preparation()

    def acquire() -> None:
        with preparation.running():
            pool.acquire("a", math.inf)

    def wait(condition: threading.Condition, _seconds: float) -> None:
        """Sleep until there is something to see, as a thread may that gets no processor in between."""
        with harness.clock.wait_started:
            harness.clock.wait_started.notify_all()
        if condition is pool._changed:
            assert condition.wait_for(lambda: preparation.is_cancelled, SOON)
            return
        if harness.status("a").state == "ready":
            unloader_sleeps.set()
        condition.wait()

    monkeypatch.setattr(harness.clock, "wait", wait)
    pending = executor.submit(acquire)
    harness.wait_for_waiters("a", 1)
    if by == "request":
        assert pool.unload("a") == DRAINING
    gate.set()
    assert unloader_sleeps.wait(SOON)
    harness.clock.advance(60)
    preparation.cancel()
    with pytest.raises(PreparationCancelled):
        pending.result(SOON)
    harness.wait_for_state("a", "unloaded")


def test_a_pinned_model_is_not_unloaded(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", pinned=True))
    pool.preload()
    with pytest.raises(ModelPinned):
        pool.unload("a")
    assert harness.status("a").state == "ready"


# -- stopping -----------------------------------------------------------------------------------------------


def test_stopping_fails_waiting_requests_and_ends_every_thread(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a", ttl=1000), spec("b"), spec("c"))
    lease = pool.acquire("a", SOON)
    engine = lease.service.engine
    gate = harness.pause_load("b")
    pending = [executor.submit(pool.acquire, "b", math.inf)]
    assert harness.started["b"].wait(SOON)
    pending.append(executor.submit(pool.acquire, "c", math.inf))  # which waits for that
    harness.wait_for_waiters("c", 1)
    stopping = executor.submit(pool.stop)
    assert [type(error_of(future)) for future in pending] == [EngineStopped, EngineStopped]
    gate.set()
    stopping.result(SOON)
    assert not engine.is_healthy()
    assert pool_threads() == set()
    with pytest.raises(EngineStopped, match="The server is stopping"):
        pool.acquire("a", math.inf)
    lease.release()
    pool.stop()
    assert harness.loads == ["a", "b"]
    assert len(harness.services) == 1, "the load learned of the stop when it reported progress"
    harness.reports["a"](0.5)  # as an engine does that is reloading itself


def test_a_model_whose_load_finishes_after_the_stop_is_stopped(harness: PoolHarness) -> None:
    services: list[FakeService] = []
    started, gate = threading.Event(), threading.Event()

    def load(_spec: ModelSpec, _on_progress: Callable[[float], None]) -> FakeService:
        started.set()
        assert gate.wait(SOON)
        services.append(FakeService("a"))
        return services[0]

    harness.pool = ModelPool(Catalogue([spec("a")]), load, clock=harness.clock)
    with pytest.raises(ModelLoading):
        harness.pool.acquire("a", 0)
    assert started.wait(SOON)
    harness.pool.stop(timeout=0)
    gate.set()
    harness.pool.stop()
    assert not services[0].engine.is_healthy()


def test_an_engine_that_fails_to_stop_does_not_keep_the_others_from_stopping(
    harness: PoolHarness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = harness.serve(spec("a"), spec("b"))
    with pool.acquire("a", SOON) as first, pool.acquire("b", SOON) as second:
        failing, other = first.service.engine, second.service.engine
    stop = failing.stop

    def stop_and_fail() -> None:
        stop()
        raise OSError("the disk is full")

    monkeypatch.setattr(failing, "stop", stop_and_fail)
    pool.stop()
    assert not other.is_healthy()
    assert "could not be stopped cleanly" in caplog.text


def test_a_pool_that_has_loaded_nothing_can_be_stopped(harness: PoolHarness) -> None:
    harness.serve(spec("a")).stop()


def test_while_a_model_is_loaded_what_it_consists_of_is_left_out_of_garbage_collections(
    tmp_path: Path,
) -> None:
    gc.unfreeze()
    with models_of_every_type(tmp_path, Settings()) as models:
        with models.acquire("chat", SOON):
            assert gc.get_freeze_count() > 0
        models.unload("chat")
        assert gc.get_freeze_count() == 0, "what is left of it is found"
