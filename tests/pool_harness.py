"""A model pool whose loads a test can pause or fail, and whose clock only the test moves.

The threads are real and the engines scripted, so nothing here waits for time to pass.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from scripted_engine import ScriptedEngine

from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.base import Lease, ModelStatus
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.model_pool import Clock, ModelMemory, ModelPool

SOON = 60  # seconds after which a test that waits for another thread gives up
GB = 1 << 30


class ManualClock(Clock):
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self._now = 100.0
        self._lock = threading.Lock()
        self._conditions: set[threading.Condition] = set()
        self._seen = threading.local()
        self.wait_started = threading.Condition()

    def now(self) -> float:
        self._seen.value = self._now
        return self._now

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        with self._lock:
            if self._seen.value != self._now:  # it has moved since the caller looked
                return
            self._conditions.add(condition)
        with self.wait_started:
            self.wait_started.notify_all()
        condition.wait(SOON)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


class FakeService:
    """What loading returns: as much of a service as the pool knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = ScriptedEngine(lambda _prompt: "yes", model_id=name)


def fixed_memory(sizes: dict[str, int], limit: int) -> ModelMemory:
    """Memory with sizes by name, which a test may change."""
    return ModelMemory(
        limit=lambda: limit,
        measure=lambda spec: sizes.get(spec.name, 0),
        too_large=lambda spec, size: f"{spec.name} of {size >> 30} GB is too large.",
    )


class PoolHarness:
    """A pool over a catalogue, and a loader whose every step a test can pause or let fail."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loads: list[str] = []
        self.started: dict[str, threading.Event] = {}
        self.gates: dict[str, threading.Event] = {}
        self.failures: dict[str, list[BaseException]] = {}
        self.fetches: list[str] = []
        self.fetch_gates: dict[str, threading.Event] = {}
        self.fetch_started: dict[str, threading.Event] = {}
        self.reports: dict[str, Callable[[float], None]] = {}
        self.shown: list[ModelStatus] = []  # what whoever shows progress is told
        self.sizes: dict[str, int] = {}
        self.concurrent_loads = self.max_concurrent_loads = 0
        self.services: list[FakeService] = []
        self.pool: ModelPool[FakeService]

    def serve(
        self,
        *specs: ModelSpec,
        memory_limit: int | None = None,
        default_name: str | None = None,
        downloads: bool = False,
    ) -> ModelPool[FakeService]:
        self.pool = ModelPool(
            Catalogue(specs),
            self.load,
            memory=fixed_memory(self.sizes, memory_limit) if memory_limit is not None else None,
            default_name=default_name,
            clock=self.clock,
            fetch=self.fetch if downloads else None,
            on_status=self.shown.append,
        )
        return self.pool

    def pause_load(self, name: str) -> threading.Event:
        """Let loads of this model start, and finish only when the returned event is set."""
        self.started[name] = threading.Event()
        self.gates[name] = threading.Event()
        return self.gates[name]

    def pause_fetch(self, name: str) -> threading.Event:
        """Let downloads of this model start, and finish only when the returned event is set."""
        self.fetch_started[name] = threading.Event()
        self.fetch_gates[name] = threading.Event()
        return self.fetch_gates[name]

    def fetch(self, spec: ModelSpec, on_progress: Callable[[int, int], None]) -> None:
        self.fetches.append(spec.name)
        if spec.name in self.fetch_gates:
            on_progress(1, 4)
            self.fetch_started[spec.name].set()
            assert self.fetch_gates[spec.name].wait(SOON)
            on_progress(4, 4)
        if self.failures.get(f"fetching {spec.name}"):
            raise self.failures[f"fetching {spec.name}"].pop(0)

    def load(self, spec: ModelSpec, on_progress: Callable[[float], None]) -> FakeService:
        self.loads.append(spec.name)
        self.concurrent_loads += 1
        self.max_concurrent_loads = max(self.max_concurrent_loads, self.concurrent_loads)
        try:
            self.reports[spec.name] = on_progress
            if spec.name in self.gates:
                self.started[spec.name].set()
                assert self.gates[spec.name].wait(SOON)
            if self.failures.get(spec.name):
                raise self.failures[spec.name].pop(0)
            on_progress(1.0)
            self.services.append(FakeService(spec.name))
            return self.services[-1]
        finally:
            self.concurrent_loads -= 1

    def status(self, name: str) -> ModelStatus:
        return next(status for status in self.pool.statuses() if status.name == name)

    def wait_for_state(self, name: str, state: str) -> None:
        changed = self.pool._changed
        with changed:
            assert changed.wait_for(lambda: self.status(name).state == state, SOON)

    def wait_for_waiters(self, name: str, count: int) -> None:
        """Wait until `count` requests wait for a load."""

        def reached() -> bool:
            entry = self.pool._entries.get(name)
            return entry is not None and entry.attempt is not None and entry.attempt.waiters == count

        with self.clock.wait_started:
            assert self.clock.wait_started.wait_for(reached, SOON)


def spec(
    name: str, *, pinned: bool = False, ttl: float | None = None, aliases: tuple[str, ...] = ()
) -> ModelSpec:
    return ModelSpec(name=name, source=f"/models/{name}", pinned=pinned, ttl=ttl, aliases=aliases)


def pool_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("model-")}


def error_of(pending: Future[Lease[FakeService]]) -> BaseException:
    error = pending.exception(SOON)
    assert error is not None
    return error
