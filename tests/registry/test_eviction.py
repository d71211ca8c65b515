"""Eviction: which models go when another one needs their memory, and which stay."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_harness import GB, SOON, FakeService, PoolHarness, spec

from mlx_backend.registry.errors import InsufficientMemory, ModelLoading
from mlx_backend.registry.model_pool import UNLOADED, LoadAttempt, ModelEntry, choose_evictions


def test_the_least_recently_used_model_is_evicted_first(harness: PoolHarness) -> None:
    harness.sizes = dict.fromkeys("abcd", 4 * GB)
    pool = harness.serve(*map(spec, "abcd"), memory_limit=12 * GB)
    for name in "abca":
        harness.clock.advance(1)
        pool.acquire(name, SOON).release()
    pool.acquire("d", SOON).release()
    assert [harness.status(name).state for name in "abcd"] == ["ready", "unloaded", "ready", "ready"]


def test_as_many_models_are_evicted_as_necessary(harness: PoolHarness) -> None:
    harness.sizes = {"a": 4 * GB, "b": 4 * GB, "c": 4 * GB, "big": 8 * GB}
    pool = harness.serve(*map(spec, ["a", "b", "c", "big"]), memory_limit=12 * GB)
    for name in ("a", "b", "c", "big"):
        harness.clock.advance(1)
        pool.acquire(name, SOON).release()
    assert set(pool.services()) == {"c", "big"}


def test_used_and_pinned_models_stay_and_the_error_lists_them(harness: PoolHarness) -> None:
    harness.sizes = {"a": 4 * GB, "b": 2 * GB, "c": 1 * GB, "big": 5 * GB}
    pool = harness.serve(spec("a", pinned=True), *map(spec, ["b", "c", "big"]), memory_limit=10 * GB)
    pool.preload()
    pool.acquire("c", SOON).release()
    lease = pool.acquire("b", SOON)
    with pytest.raises(InsufficientMemory) as caught:
        pool.acquire("big", SOON)
    assert str(caught.value) == (
        "The model 'big' needs 5 GB, and 10 GB is the limit for all models. "
        "These models must stay in memory: 'a' (4 GB, pinned), 'b' (2 GB, in use by 1)."
    )
    assert caught.value.retry_after == 5
    assert set(pool.services()) == {"a", "b", "c"}, "nothing is evicted in vain"
    assert harness.status("big").state == "unloaded"
    lease.release()
    pool.acquire("big", SOON).release()
    assert set(pool.services()) == {"a", "big", "c"}
    assert harness.loads == ["a", "c", "b", "big"]


def test_a_model_that_can_never_fit_has_no_retry_time(harness: PoolHarness) -> None:
    harness.sizes = {"a": 4 * GB, "b": 11 * GB, "c": 7 * GB}
    pool = harness.serve(spec("a", pinned=True), spec("b"), spec("c"), memory_limit=10 * GB)
    pool.preload()
    for name in "bc":
        with pytest.raises(InsufficientMemory) as caught:
            pool.acquire(name, SOON)
        assert caught.value.retry_after is None


def test_a_downloaded_model_is_measured_after_its_load(harness: PoolHarness) -> None:
    harness.sizes = {"a": 6 * GB, "c": 5 * GB}
    pool = harness.serve(*map(spec, "abc"), memory_limit=10 * GB)
    pool.acquire("a", SOON).release()
    gate = harness.pause_load("b")
    with pytest.raises(ModelLoading):
        pool.acquire("b", 0)
    assert harness.started["b"].wait(SOON)
    harness.sizes["b"] = 6 * GB
    gate.set()
    harness.wait_for_state("b", "ready")
    assert set(pool.services()) == {"b"}, "both do not fit"
    pool.acquire("c", SOON).release()
    assert set(pool.services()) == {"c"}


def test_a_load_waits_for_a_model_that_is_being_unloaded(
    harness: PoolHarness, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.sizes = {"a": 6 * GB, "b": 6 * GB}
    pool = harness.serve(spec("a"), spec("b"), memory_limit=10 * GB)
    with pool.acquire("a", SOON) as lease:
        engine = lease.service.engine
    stop = engine.stop
    started, gate = threading.Event(), threading.Event()

    def stop_slowly() -> None:
        started.set()
        assert gate.wait(SOON)
        stop()

    monkeypatch.setattr(engine, "stop", stop_slowly)
    unloading = executor.submit(pool.unload, "a")
    assert started.wait(SOON)
    pending = executor.submit(pool.acquire, "b", math.inf)
    harness.wait_for_waiters("b", 1)
    assert harness.status("a").state == "unloading"
    gate.set()
    assert unloading.result(SOON) == UNLOADED
    assert pending.result(SOON).name == "b"


def test_a_model_that_a_request_waits_for_is_not_evicted() -> None:
    one = ModelEntry[FakeService](spec("one"), state="ready", size=5, last_used=1)
    other = ModelEntry[FakeService](spec("other"), state="ready", size=5, last_used=2)
    one.attempt = LoadAttempt(waiters=1, finished=True)
    assert choose_evictions("new", 5, 10, [one, other]) == [other]
    assert choose_evictions("new", 0, 10, [one, other]) == []
    with pytest.raises(InsufficientMemory, match=r"'one' \(0.00488 KB, in use by 1\)"):
        choose_evictions("new", 6, 10, [one, other])
