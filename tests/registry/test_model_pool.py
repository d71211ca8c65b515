"""The model pool as a whole: what it reports, many threads at once, and what importing it costs."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from pool_harness import GB, SOON, PoolHarness, spec

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.errors import EngineError
from mlx_backend.registry.base import ModelStatus
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import InsufficientMemory, ModelLoading
from mlx_backend.registry.model_pool import ModelPool


def test_the_statuses_list_every_servable_model(harness: PoolHarness) -> None:
    pool = harness.serve(spec("a", pinned=True), spec("b"))
    assert pool.statuses() == [
        ModelStatus(name="a", state="unloaded", percent=0, pinned=True),
        ModelStatus(name="b", state="unloaded", percent=0),
    ]
    with pool.acquire("b", SOON):
        assert harness.status("b") == ModelStatus(name="b", state="ready", percent=100, in_use=1)
    assert harness.status("a").state == "unloaded"


def test_a_model_that_only_requests_name_is_listed_while_it_is_loaded(harness: PoolHarness) -> None:
    harness.pool = ModelPool(Catalogue([], allow_download=True), harness.load, clock=harness.clock)
    assert harness.pool.statuses() == []
    harness.pool.acquire("owner/new", SOON).release()
    assert harness.status("owner/new").state == "ready"
    harness.pool.unload("owner/new")
    assert harness.pool.statuses() == []


def test_names_that_failed_to_load_are_forgotten(harness: PoolHarness) -> None:
    harness.pool = ModelPool(Catalogue([], allow_download=True), harness.load, clock=harness.clock)
    for number in range(600):
        harness.failures[f"owner/m{number}"] = [EngineError("no such repository")]
        with pytest.raises(EngineError, match="no such repository"):
            harness.pool.acquire(f"owner/m{number}", SOON)
    assert len(harness.pool.statuses()) < 300


def test_no_request_meets_a_model_that_was_unloaded_under_it(
    harness: PoolHarness, executor: ThreadPoolExecutor
) -> None:
    names = "abcdef"
    harness.sizes = dict.fromkeys(names, 4 * GB)
    pool = harness.serve(*(spec(name, ttl=1) for name in names), memory_limit=12 * GB)

    def client(seed: int) -> int:
        rng, replies = random.Random(seed), 0
        for _ in range(30):
            name = rng.choice(names)
            match rng.randrange(10):
                case 0:
                    pool.unload(name)
                case 1:
                    harness.clock.advance(0.5)
                case _:
                    with (
                        suppress(InsufficientMemory, ModelLoading),
                        pool.acquire(name, rng.choice([0, 5])) as lease,
                    ):
                        assert lease.service.name == name
                        items = lease.service.engine.generate(GenerationRequest(prompt=[1], max_tokens=9))
                        text = "".join(item.text for item in items if isinstance(item, TokenDelta))
                        replies += text == "yes"
        return replies

    pending = [executor.submit(client, seed) for seed in range(8)]
    while not all(future.done() for future in pending):  # the last to wait has nobody else to move the clock
        harness.clock.advance(0.1)
        with suppress(TimeoutError):
            pending[-1].result(0.01)
    assert sum(future.result(SOON) for future in pending) > 0
    assert all(status.in_use == 0 for status in pool.statuses())


def test_importing_the_registry_is_free() -> None:
    modules = ["catalogue", "model_pool"]
    heavy = [
        "huggingface_hub",
        "mlx",
        "mlx_lm",
        "numpy",
        "transformers",
        "pydantic",
        "werkzeug",
        "mlx_backend.server",
    ]
    imports = ", ".join(f"mlx_backend.registry.{module}" for module in modules)
    code = f"import sys, {imports}; print(*(sys.modules.keys() & {heavy!r}))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
