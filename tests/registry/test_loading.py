"""Loading: on request, once for all who wait, one model after another; and what happens when a load fails."""

import gc
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_harness import GB, SOON, FakeService, PoolHarness, error_of, spec

from mlx_backend.engine.base import GenerationRequest
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import ModelLoading, UnknownModel
from mlx_backend.registry.model_pool import MAX_QUEUED, ModelPool


def test_a_model_is_loaded_on_its_first_request_and_then_kept(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", aliases=("first",)), spec("b"))
    assert harness.loads == []
    with pool.acquire("a", SOON) as lease:
        service = lease.service
        assert service.name == "a"
        with pool.acquire("first", 0) as second:
            assert second.service is service
    with pool.acquire("a", 0) as later:
        assert later.service is service
    assert harness.loads == ["a"]


def test_requests_that_arrive_during_a_load_share_it(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    gate = harness.pause_load("a")
    pending = [executor.submit(pool.acquire, "a", math.inf) for _ in range(10)]
    harness.wait_for_waiters("a", 10)
    gate.set()
    leases = [future.result(SOON) for future in pending]
    assert len({id(lease.service) for lease in leases}) == 1
    assert harness.status("a").in_use == 10
    assert harness.loads == ["a"]


@pytest.mark.parametrize("name", ["model-loader", "model-unloader", "model-download"])
def test_a_request_for_which_no_thread_can_be_started_changes_nothing(
    harness: PoolHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pool = harness.serve(spec("a", ttl=60), downloads=True)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(MAX_QUEUED + 1):
            with pytest.raises(EngineBusy, match="No thread could be started"):
                pool.acquire("a", math.inf)
        assert harness.status("a").state == "unloaded"
    pool.acquire("a", math.inf).release()
    harness.clock.advance(60)
    harness.wait_for_state("a", "unloaded")
    assert harness.loads == ["a"]


def test_a_model_that_no_thread_can_unload_when_it_is_asked_for_serves_on(
    harness: PoolHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = harness.serve(spec("a"))
    lease = pool.acquire("a", SOON)

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(EngineBusy):
            pool.unload("a")
    pool.acquire("a", 0).release()
    pool.unload("a")
    lease.release()
    harness.wait_for_state("a", "unloaded")


def test_models_are_loaded_one_after_another_in_the_order_requested(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(*map(spec, "abc"))
    gate = harness.pause_load("a")
    pending = []
    for name in "abc":
        pending.append(executor.submit(pool.acquire, name, math.inf))
        harness.wait_for_waiters(name, 1)
    assert harness.started["a"].wait(SOON)
    assert [harness.status(name).state for name in "abc"] == ["loading"] * 3
    assert harness.loads == ["a"]
    gate.set()
    for future in pending:
        future.result(SOON).release()
    assert (harness.loads, harness.max_concurrent_loads) == (["a", "b", "c"], 1)


def test_a_ready_model_answers_while_another_is_loaded(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b"))
    pool.acquire("a", SOON).release()
    harness.pause_load("b")
    with pytest.raises(ModelLoading):
        pool.acquire("b", 0)
    assert harness.started["b"].wait(SOON)
    with pool.acquire("a", 0) as lease:
        assert lease.service.engine.is_healthy()


def test_a_request_that_cannot_wait_learns_the_progress_and_when_to_retry(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    gate = harness.pause_load("a")
    with pytest.raises(ModelLoading) as at_once:
        pool.acquire("a", 0)
    assert (at_once.value.name, at_once.value.percent) == ("a", 0)
    assert harness.started["a"].wait(SOON)
    pending = executor.submit(pool.acquire, "a", 30)
    harness.wait_for_waiters("a", 1)
    harness.clock.advance(10)
    for fraction in (math.nan, -1, 0.25):
        harness.reports["a"](fraction)
    assert harness.status("a").percent == 25
    harness.clock.advance(20)
    timed_out = error_of(pending)
    assert isinstance(timed_out, ModelLoading)
    assert (timed_out.percent, timed_out.retry_after) == (25, 60)
    assert str(timed_out) == "The model 'a' is being loaded (25 %); try again in 60 s."
    gate.set()
    pool.acquire("a", math.inf).release()
    assert harness.loads == ["a"], "the load went on with nobody waiting for it"


def test_a_download_is_told_apart_from_the_load_behind_it_with_its_bytes(harness: PoolHarness) -> None:
    harness.sizes["a"] = 8 * GB
    pool = harness.serve(spec("a"), memory_limit=100 * GB, downloads=True)
    fetched, loaded = harness.pause_fetch("a"), harness.pause_load("a")
    with pytest.raises(ModelLoading):
        pool.acquire("a", 0)
    assert harness.fetch_started["a"].wait(SOON)
    status = harness.status("a")
    assert (status.state, status.percent, status.done, status.total) == ("downloading", 25, 1, 4)
    with pytest.raises(ModelLoading, match=r"'a' is being downloaded \(25 %\); try again in"):
        pool.acquire("a", 0)
    harness.clock.advance(100)
    fetched.set()
    assert harness.started["a"].wait(SOON)
    harness.clock.advance(20)
    harness.reports["a"](0.5)
    status = harness.status("a")
    assert (status.state, status.percent, status.done, status.total) == ("loading", 50, 0, 0)
    with pytest.raises(ModelLoading) as caught:
        pool.acquire("a", 0)
    assert caught.value.retry_after == 20, "the time left is the load's, whatever the download took"
    loaded.set()
    pool.acquire("a", math.inf).release()
    assert [(each.state, each.percent) for each in harness.shown] == [
        ("downloading", 25),
        ("downloading", 100),
        ("loading", 50),
        ("loading", 100),
        ("ready", 100),
    ]


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_failure_that_is_told_to_whoever_starts_the_server_is_not_logged_as_well(
    harness: PoolHarness, is_pinned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = harness.serve(spec("a", pinned=is_pinned))
    harness.failures["a"] = [EngineError("no such file")]
    with pytest.raises(EngineError, match="no such file"):
        pool.preload() if is_pinned else pool.acquire("a", math.inf)
    pool.stop()  # the thread that logs has ended
    assert ("a was not loaded: no such file" in caplog.text) is not is_pinned
    assert harness.shown[-1].state == "failed"


def test_a_queued_load_reports_no_progress(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b"))
    harness.pause_load("a")
    for name in "ab":
        with pytest.raises(ModelLoading) as caught:
            pool.acquire(name, 0)
        assert (caught.value.percent, caught.value.retry_after) == (0, 5)


def test_the_queue_of_loads_is_bounded(harness: PoolHarness) -> None:
    names = [f"m{i}" for i in range(MAX_QUEUED + 5)]
    pool = harness.serve(*map(spec, names))
    gate = harness.pause_load("m0")
    for name in names:
        with pytest.raises(ModelLoading):
            pool.acquire(name, 0)
        assert harness.started["m0"].wait(SOON)
    states = [harness.status(name).state for name in names]
    assert states == ["loading"] * (MAX_QUEUED + 1) + ["unloaded"] * 4
    gate.set()
    pool.acquire(names[-1], math.inf).release()


def test_pinned_models_are_loaded_at_the_start(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b", pinned=True), spec("c", pinned=True, aliases=("see",)))
    pool.preload()
    assert harness.loads == ["b", "c"]
    assert [harness.status(name).state for name in "abc"] == ["unloaded", "ready", "ready"]


def test_preloading_raises_the_error_of_a_pinned_model(harness: PoolHarness) -> None:
    absent = ModelSpec(name="x", source="owner/not-here", pinned=True)
    with pytest.raises(UnknownModel, match="has not been downloaded"):
        harness.serve(absent).preload()
    harness.failures["b"] = [EngineError("no weights")]
    with pytest.raises(EngineError, match="no weights"):
        harness.serve(spec("b", pinned=True)).preload()


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "", "default"])
def test_a_request_that_names_no_model_gets_the_default(name: str | None, harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b"), default_name="b")
    with pool.acquire(name, SOON) as lease:
        assert lease.service.name == "b"


def test_a_model_may_be_called_default(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b", aliases=("default",)), default_name="a")
    assert pool.acquire("default", SOON).name == "b"


def test_without_a_default_a_request_must_name_a_model(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    for name in (None, "default", "z"):
        with pytest.raises(UnknownModel, match="There is 'a'"):
            pool.acquire(name, SOON)
    assert harness.loads == []


# -- failures -----------------------------------------------------------------------------------------------


def test_a_failed_load_raises_for_all_who_waited_and_is_retried_after_a_delay(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    harness.failures["a"] = [EngineError("no such folder")]
    gate = harness.pause_load("a")
    pending = [executor.submit(pool.acquire, "a", math.inf) for _ in range(3)]
    harness.wait_for_waiters("a", 3)
    gate.set()
    errors = [error_of(future) for future in pending]
    assert [(type(error), str(error)) for error in errors] == [(EngineError, "no such folder")] * 3
    assert len(set(map(id, errors))) == 3, "threads do not share an error's traceback"
    status = harness.status("a")
    assert (status.state, status.detail, status.percent) == ("failed", "no such folder", 0)
    with pytest.raises(EngineError, match="no such folder"):
        pool.acquire("a", SOON)
    assert harness.loads == ["a"]
    harness.clock.advance(1)
    pool.acquire("a", SOON).release()
    assert (harness.status("a").state, harness.status("a").detail) == ("ready", "")


def test_the_retry_delay_doubles_up_to_a_minute_and_a_success_resets_it(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    harness.failures["a"] = [EngineError(str(number)) for number in range(9)]
    for delay in (1, 2, 4, 8, 16, 32, 60, 60, 60):
        for _ in range(2):  # the second is answered from memory
            with pytest.raises(EngineError):
                pool.acquire("a", SOON)
        harness.clock.advance(delay)
    pool.acquire("a", SOON).release()
    pool.unload("a")
    harness.failures["a"] = [EngineError("again")]
    with pytest.raises(EngineError):
        pool.acquire("a", SOON)
    harness.clock.advance(1)
    pool.acquire("a", SOON).release()
    assert len(harness.loads) == 12


@pytest.mark.parametrize("error", [ValueError("secret"), SystemExit(1), MemoryError()])
def test_whatever_loading_raises_no_request_is_left_waiting(
    error: BaseException, harness: PoolHarness, caplog: pytest.LogCaptureFixture
) -> None:
    pool = harness.serve(spec("a"))
    harness.failures["a"] = [error]
    with pytest.raises(EngineError) as caught:
        pool.acquire("a", SOON)
    assert str(caught.value) == "The model 'a' could not be loaded; the server's log says why."
    assert "Loading a failed unexpectedly" in caplog.text
    harness.clock.advance(1)
    pool.acquire("a", SOON).release()


def test_a_failed_load_keeps_no_reference_to_the_half_loaded_model(harness: PoolHarness) -> None:
    references: list[weakref.ref[PoolHarness]] = []

    def load(_spec: ModelSpec, _on_progress: Callable[[float], None]) -> FakeService:
        half_loaded = PoolHarness()
        references.append(weakref.ref(half_loaded))
        try:
            raise KeyError("a tensor")
        except KeyError as error:
            raise EngineError("half of it is missing") from error

    harness.pool = ModelPool(Catalogue([spec("a")]), load, clock=harness.clock)
    with pytest.raises(EngineError, match="half of it"):
        harness.pool.acquire("a", SOON)
    gc.collect()
    assert references[0]() is None


def test_a_model_whose_engine_has_stopped_is_reloaded(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"))
    with pool.acquire("a", SOON) as lease:
        stopped = lease.service
        stopped.engine.stop()
    with pool.acquire("a", math.inf) as lease:
        assert lease.service is not stopped
        assert lease.service.engine.is_healthy()
    assert harness.loads == ["a", "a"]


def test_a_stopped_engine_that_others_lease_is_unloaded_after_their_release(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    pool = harness.serve(spec("a"))
    first = pool.acquire("a", SOON)
    first.service.engine.stop()
    pending = executor.submit(pool.acquire, "a", math.inf)
    first.release()
    assert pending.result(SOON).service.engine.is_healthy()


def test_an_engine_that_is_stopped_when_loaded_is_reloaded_only_once(harness: PoolHarness) -> None:
    def load(_spec: ModelSpec, _on_progress: Callable[[float], None]) -> FakeService:
        service = FakeService("a")
        service.engine.stop()
        harness.loads.append("a")
        return service

    harness.pool = ModelPool(Catalogue([spec("a")]), load, clock=harness.clock)
    with harness.pool.acquire("a", math.inf) as lease, pytest.raises(EngineStopped):
        lease.service.engine.generate(GenerationRequest(prompt=[1], max_tokens=1))
    assert harness.loads == ["a", "a"]
