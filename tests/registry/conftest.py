"""Fixtures for the tests of the catalogue and the model pool."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants
from model_folders import put_model
from pool_harness import PoolHarness, pool_threads


@pytest.fixture
def harness() -> Iterator[PoolHarness]:
    harness = PoolHarness()
    yield harness
    for gate in (*harness.gates.values(), *harness.fetch_gates.values()):
        gate.set()
    harness.pool.stop()
    assert pool_threads() == set()
    assert not any(service.engine.is_healthy() for service in harness.services)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as executor:
        yield executor


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    put_model(folder / "small")
    put_model(folder / "owner" / "large", weights=1000)
    put_model(folder / "other" / "large")
    (folder / "notes").mkdir()
    put_model(folder / ".trash" / "old")
    return folder
