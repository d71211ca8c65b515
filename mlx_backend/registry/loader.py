"""The thread that loads models: one load after another, each after evicting what is in its way.

What has to be downloaded first is, by a thread of its own, and keeps no other model waiting: it is queued to be loaded,
and others are evicted for it, when its files are there.

A load cannot be interrupted. It learns that the pool is stopping when it next reports progress; if it finishes anyway,
the model is stopped at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.registry.errors import InsufficientMemory, ModelError, copy_error
from mlx_backend.registry.eviction import choose_evictions
from mlx_backend.registry.model_entry import LoadAttempt, LoadedService, ModelEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.base import LoadProgress, ModelStatus
    from mlx_backend.registry.pool_state import PoolState
    from mlx_backend.registry.unloader import Unloader

log = logging.getLogger(__name__)

MAX_QUEUED = 16  # models being downloaded, or waiting to be loaded; further requests are told to retry


class ModelMemory(Protocol):
    """How much memory there is for models, and how much each needs."""

    def limit(self) -> int:
        """Return how many bytes all models together may take."""
        ...

    def measure(self, spec: ModelSpec) -> int:
        """Return how many bytes a model takes, whether or not it is on this machine; 0 if that is not known."""
        ...

    def too_large(self, spec: ModelSpec, size: int) -> str:
        """Return what to tell people of a model that never fits."""
        ...


class Loader[S: LoadedService]:
    """Loads models in the order in which they were queued, or in which their files were there.

    `fetch` downloads what is missing of a model; None: nothing is done before loading. The loader's thread starts with
    the first load.
    """

    def __init__(
        self,
        state: PoolState[S],
        unloader: Unloader[S],
        load: Callable[[ModelSpec, LoadProgress], S],
        memory: ModelMemory | None,
        on_status: Callable[[ModelStatus], object],
        fetch: Callable[[ModelSpec, LoadProgress], None] | None = None,
    ) -> None:
        self._state = state
        self._unloader = unloader
        self._load_service = load
        self._fetch_files = fetch
        self._memory = memory
        self._on_status = on_status
        self._queue: deque[ModelEntry[S]] = deque()
        self._thread: threading.Thread | None = None
        self._fetching: set[threading.Thread] = set()

    def enqueue(self, entry: ModelEntry[S], spec: ModelSpec) -> LoadAttempt | None:
        """Queue a load; None if the queue is full. Call this with the lock held.

        Before its retry delay is over, a failed model raises the error of its last load.
        """
        if entry.state == "failed" and self._state.clock.now() < entry.retry_at:
            assert entry.attempt is not None
            entry.attempt.raise_if_failed()
        if len(self._queue) + len(self._fetching) >= MAX_QUEUED:
            return None
        entry.spec, entry.state, entry.attempt = spec, "loading", LoadAttempt()
        if self._fetch_files is None:
            self._queue.append(entry)
        else:
            fetch = partial(self._fetch, entry, entry.attempt, self._fetch_files)
            thread = threading.Thread(target=fetch, name="model-download", daemon=True)
            self._fetching.add(thread)
            thread.start()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="model-loader", daemon=True)
            self._thread.start()
        self._state.changed.notify_all()
        return entry.attempt

    def join(self, timeout: float | None) -> None:
        """Wait for the threads to end, once the pool is stopping. A load that reports no progress may outlast this."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads():
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_alive(self) -> bool:
        """Whether a model may still be being loaded."""
        return any(thread.is_alive() for thread in self._threads())

    def _threads(self) -> list[threading.Thread]:
        with self._state.changed:
            return [*self._fetching, *([self._thread] if self._thread is not None else [])]

    # -- a download's thread ---------------------------------------------------------------------------------

    def _fetch(
        self,
        entry: ModelEntry[S],
        attempt: LoadAttempt,
        fetch: Callable[[ModelSpec, LoadProgress], None],
    ) -> None:
        """Download what is missing of a model, and queue it to be loaded."""
        state, spec = self._state, entry.spec
        error: Exception | None = None
        attempt.started_at = state.clock.now()
        try:
            size = self._size_of(spec)
            fetch(spec, _Progress(entry, attempt, state, size, self._on_status))
        except BaseException as raised:  # whatever it is, no request may be left waiting
            error = _public_error(raised, spec.name)
        with state.changed:
            is_there = error is None and not state.stopping
            if is_there:
                attempt.stage, attempt.started_at = "loading", None
                attempt.done = attempt.total = attempt.percent = 0
                self._queue.append(entry)
                state.changed.notify_all()
        if not is_there:
            self._fail(entry, error)
        with state.changed:
            self._fetching.discard(threading.current_thread())

    # -- the loader's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._next_queued()) is not None:
            self._load(entry)

    def _next_queued(self) -> ModelEntry[S] | None:
        state = self._state
        with state.changed:
            while not self._queue and not state.stopping:
                state.changed.wait()
            if state.stopping:
                return None
            entry = self._queue.popleft()
            assert entry.attempt is not None  # set when it was queued
            entry.attempt.started_at = state.clock.now()
            return entry

    def _load(self, entry: ModelEntry[S]) -> None:
        spec, attempt = entry.spec, entry.attempt
        assert attempt is not None
        service: S | None = None
        error: Exception | None = None
        size = 0
        try:
            size = self._make_room(spec)
            service = self._load_service(spec, _Progress(entry, attempt, self._state, size, self._on_status))
            if not size:  # it was not known before the download
                with suppress(InsufficientMemory):
                    size = self._make_room(spec)
        except BaseException as raised:  # whatever it is, no request may be left waiting
            error = _public_error(raised, spec.name)
        if error is None and service is not None and self._publish(entry, service, size):
            return
        self._fail(entry, error)
        if service is not None:
            service.engine.stop()

    def _publish(self, entry: ModelEntry[S], service: S, size: int) -> bool:
        """Mark a model as ready; False if the pool has been stopped meanwhile."""
        state, attempt = self._state, entry.attempt
        assert attempt is not None
        with state.changed:
            if state.stopping:
                return False
            now = state.clock.now()
            attempt.finished, attempt.percent = True, 100
            entry.state, entry.service, entry.size = "ready", service, size
            entry.last_used, entry.failures = now, 0
            if entry.draining or entry.spec.ttl is not None:
                self._unloader.wake()
            state.changed.notify_all()
        self._on_status(entry.status())
        log.info("Loaded %s in %.1f s.", entry.spec.name, now - (attempt.started_at or now))
        return True

    def _fail(self, entry: ModelEntry[S], error: Exception | None) -> None:
        """Mark a load as failed, or as given up because the pool is stopping."""
        state, attempt = self._state, entry.attempt
        assert attempt is not None
        with state.changed:
            attempt.finished, attempt.percent, attempt.error = True, 100, error
            entry.draining = False
            if isinstance(error, EngineError) and not state.stopping:
                entry.set_failed(state.clock.now())
            else:
                entry.state = "unloaded"
            state.changed.notify_all()
        self._on_status(entry.status())
        if error is not None and not attempt.is_reported:
            level = logging.INFO if isinstance(error, InsufficientMemory) else logging.WARNING
            log.log(level, "%s was not loaded: %s", entry.spec.name, error)

    def _make_room(self, spec: ModelSpec) -> int:
        """Evict what is in the way of a model; return its size, 0 if unknown. Raises InsufficientMemory."""
        if self._memory is None:
            return 0
        size, limit = self._size_of(spec), self._memory.limit()
        state = self._state
        with state.changed:
            state.changed.wait_for(state.none_unloading)
            evicted = choose_evictions(spec.name, size, limit, state.entries.values())
            for entry in evicted:
                entry.state = "unloading"
        for entry in evicted:
            state.stop_engine(entry, f"to make room for {spec.name}")
        return size

    def _size_of(self, spec: ModelSpec) -> int:
        """Return a model's size, 0 if unknown. Raises InsufficientMemory for one that never fits."""
        if self._memory is None:
            return 0
        size = self._memory.measure(spec)
        if size > self._memory.limit():
            raise InsufficientMemory(self._memory.too_large(spec, size))
        return size


class _Progress[S: LoadedService]:
    """Records a load's progress. An engine that reloads itself later may report here too, which is ignored."""

    def __init__(
        self,
        entry: ModelEntry[S],
        attempt: LoadAttempt,
        state: PoolState[S],
        size: int,
        on_status: Callable[[ModelStatus], object],
    ) -> None:
        self._entry = entry
        self._attempt = attempt
        self._state = state
        self._size = size
        self._on_status = on_status

    def __call__(self, share: float) -> None:
        if math.isfinite(share):
            self._record("loading", int(self._size * min(1.0, max(0.0, share))), self._size, share)

    def downloaded(self, done: int, total: int) -> None:
        self._record("downloading", done, total, done / total if total else 0.0)

    def _record(self, stage: Literal["downloading", "loading"], done: int, total: int, share: float) -> None:
        attempt = self._attempt
        if attempt.finished:
            return
        if self._state.stopping:
            raise EngineStopped("The server is stopping.")
        if stage != attempt.stage:  # the time left is estimated for each by itself
            attempt.stage, attempt.started_at = stage, self._state.clock.now()
        attempt.done, attempt.total, attempt.percent = done, total, int(100 * min(1.0, max(0.0, share)))
        self._on_status(self._entry.status())


def _public_error(error: BaseException, name: str) -> Exception:
    """Return an error with the same message but no traceback, which would keep the half-loaded model alive."""
    if isinstance(error, EngineError | ModelError):
        return copy_error(error)
    log.error("Loading %s failed unexpectedly.", name, exc_info=error)
    return EngineError(f"The model {name!r} could not be loaded; the server's log says why.")
