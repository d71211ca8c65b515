"""Fixtures for the tests of the model pool."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_harness import PoolHarness, pool_threads


@pytest.fixture
def harness() -> Iterator[PoolHarness]:
    harness = PoolHarness()
    yield harness
    for gate in harness.gates.values():
        gate.set()
    harness.pool.stop()
    assert pool_threads() == set()
    assert not any(service.engine.is_healthy() for service in harness.services)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as executor:
        yield executor
