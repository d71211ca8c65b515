"""A model that is downloaded keeps no other waiting, and nothing is evicted for it before its files are there."""

from __future__ import annotations

import math

import pytest
from pool_harness import GB, SOON, PoolHarness, pool_threads, spec

from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.registry.errors import InsufficientMemory, ModelLoading
from mlx_backend.registry.model_pool import MAX_QUEUED


def begin(harness: PoolHarness, name: str) -> None:
    """Ask for a model whose download is paused, and wait until it has begun."""
    with pytest.raises(ModelLoading):
        harness.pool.acquire(name, 0)
    assert harness.fetch_started[name].wait(SOON)


def test_a_download_keeps_neither_another_load_nor_another_download_waiting(harness: PoolHarness) -> None:
    pool = harness.serve(*map(spec, "abc"), downloads=True)
    a, b = harness.pause_fetch("a"), harness.pause_fetch("b")
    begin(harness, "a")
    begin(harness, "b")
    pool.acquire("c", math.inf).release()
    status = harness.status("a")
    assert (status.state, status.percent) == ("downloading", 25)
    assert harness.loads == ["c"]
    for gate, name in ((b, "b"), (a, "a")):
        gate.set()
        pool.acquire(name, math.inf).release()
    assert harness.loads == ["c", "b", "a"]
    assert harness.max_concurrent_loads == 1
    assert harness.fetches == ["a", "b", "c"]


def test_models_answer_until_the_files_of_the_one_in_their_place_are_there(harness: PoolHarness) -> None:
    harness.sizes.update(small=6 * GB, large=8 * GB)
    pool = harness.serve(spec("small"), spec("large"), memory_limit=10 * GB, downloads=True)
    pool.acquire("small", math.inf).release()
    gate = harness.pause_fetch("large")
    begin(harness, "large")
    pool.acquire("small", 0).release()
    gate.set()
    pool.acquire("large", math.inf).release()
    assert harness.status("small").state == "unloaded"


def test_what_never_fits_is_refused_before_it_is_downloaded(harness: PoolHarness) -> None:
    harness.sizes["a"] = 11 * GB
    pool = harness.serve(spec("a"), memory_limit=10 * GB, downloads=True)
    with pytest.raises(InsufficientMemory, match="too large"):
        pool.acquire("a", math.inf)
    assert (harness.fetches, harness.loads) == ([], [])


def test_a_download_that_fails_is_the_error_of_its_model_alone(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), spec("b"), downloads=True)
    harness.failures["fetching a"] = [EngineError("no such repository")]
    with pytest.raises(EngineError, match="no such repository"):
        pool.acquire("a", math.inf)
    pool.acquire("b", math.inf).release()
    assert harness.status("a").state == "failed"
    harness.clock.advance(60)
    pool.acquire("a", math.inf).release()
    assert harness.loads == ["b", "a"]


def test_a_pool_that_stops_waits_for_no_download(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a"), downloads=True)
    gate = harness.pause_fetch("a")
    begin(harness, "a")
    pool.stop(0)
    assert "model-download" in pool_threads()
    with pytest.raises(EngineStopped):
        pool.acquire("a", 0)
    gate.set()  # the next report ends it
    pool.stop()
    assert "model-download" not in pool_threads()
    assert harness.loads == []


def test_downloads_are_bounded_with_the_loads_that_are_queued(harness: PoolHarness) -> None:
    names = [f"m{number}" for number in range(MAX_QUEUED + 1)]
    pool = harness.serve(*map(spec, names), downloads=True)
    gates = [harness.pause_fetch(name) for name in names]
    for name in names[:-1]:
        begin(harness, name)
    with pytest.raises(ModelLoading):
        pool.acquire(names[-1], 0)
    assert harness.status(names[-1]).state == "unloaded"
    for gate in gates:
        gate.set()
    pool.acquire(names[-1], math.inf).release()
