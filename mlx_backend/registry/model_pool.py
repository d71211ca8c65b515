"""Which models are in memory: loaded on request, kept while in use, unloaded when idle or evicted.

    callers     acquire: lease a ready model, or queue a load and wait for it, or give up at the deadline
    loader      a thread for each download, and one for the loads, one after another: evict, load, notify the waiters
    unloader    one thread: unloads what is idle for too long, or drained

Knows names, services and time; how a model is loaded is passed in. The states of a model are in `model_entry`, the lock
and the rules for holding it in `pool_state`, who goes when memory is short in `eviction`.

A request that waits for a load counts as a user of the model from before it is ready until the lease is taken. One that
waits for a model to finish unloading does not, or it never would.
"""

from __future__ import annotations

import logging
import math
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.errors import EngineStopped
from mlx_backend.preparation import current
from mlx_backend.registry.base import ModelStatus
from mlx_backend.registry.clock import SystemClock
from mlx_backend.registry.errors import ModelLoading, UnknownModel
from mlx_backend.registry.lease import ModelLease
from mlx_backend.registry.loader import Loader
from mlx_backend.registry.model_entry import LoadAttempt, LoadedService, ModelEntry
from mlx_backend.registry.pool_state import PoolState
from mlx_backend.registry.unloader import Unloader

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.base import LoadProgress
    from mlx_backend.registry.catalogue import Catalogue
    from mlx_backend.registry.clock import Clock
    from mlx_backend.registry.loader import ModelMemory

log = logging.getLogger(__name__)


class UnloadResult(StrEnum):
    """What became of a request to unload a model."""

    UNLOADED = "unloaded"
    DRAINING = "unloading"  # as soon as its replies have ended, or its load has
    NOT_LOADED = "not loaded"
    PINNED = "pinned"  # it stays


class ModelPool[S: LoadedService]:
    """The models in memory. Thread-safe.

    `load(spec, progress)` runs on the loader's thread, takes as long as it likes and reports how far it is, which
    `on_status` is called with, in any thread. `fetch(spec, progress)` downloads what loading needs, beside other
    downloads and loads. Without `memory`, any number of models of any size may be loaded. `default_name` is for
    requests that name no model.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        load: Callable[[ModelSpec, LoadProgress], S],
        *,
        memory: ModelMemory | None = None,
        default_name: str | None = None,
        clock: Clock | None = None,
        fetch: Callable[[ModelSpec, LoadProgress], None] | None = None,
        on_status: Callable[[ModelStatus], object] = lambda _status: None,
    ) -> None:
        self._catalogue = catalogue
        self._default_name = default_name
        self._clock: Clock = clock or SystemClock()
        self._state: PoolState[S] = PoolState(self._clock)
        self._unloader = Unloader(self._state)
        self._loader = Loader(self._state, self._unloader, load, memory, on_status, fetch)

    # -- using models ----------------------------------------------------------------------------------------

    def find(self, name: str | None) -> ModelSpec:
        """Return the model of that name; None, "" and "default" mean the default. Raises as the catalogue does."""
        if not name and self._default_name is not None:
            name = self._default_name
        try:
            return self._catalogue.find(name or "")  # a model may really be called "default"
        except UnknownModel:
            if name != "default" or self._default_name is None:
                raise
            return self._catalogue.find(self._default_name)

    def acquire(self, name: str | None, wait: float) -> ModelLease[S]:
        """Lease a model, loading it if necessary.

        Raises UnknownModel, ModelNotAllowed, InsufficientMemory, ModelLoading after `wait` seconds, EngineStopped
        when the pool is stopping, and what loading raised: the same error until the retry delay is over.
        """
        spec = self.find(name)
        deadline = self._clock.now() + max(0.0, wait)
        lease = self._acquire(spec, deadline)
        engine = lease.service.engine
        if not engine.is_healthy() and engine.status().state == "stopped":
            # It does not restart by itself. Reload once: an engine that stops again will say so when it is used.
            self._discard(lease)
            lease = self._acquire(spec, deadline)
        return lease

    def preload(self) -> None:
        """Load the pinned models, one after another; raise the error of the first that fails."""
        for spec in self._catalogue.pinned():
            self._acquire(self.find(spec.name), math.inf, reports=True).release()

    def unload(self, name: str) -> UnloadResult:
        """Unload a model: at once if it is idle, else after its replies. Requests from now on reload it."""
        spec = self._catalogue.find(name)
        with self._state.changed:
            entry = self._state.entries.get(spec.name)
            if entry is None or entry.state in ("unloaded", "failed"):
                return UnloadResult.NOT_LOADED
            if entry.spec.pinned:
                return UnloadResult.PINNED
            if not entry.is_idle:
                if entry.state != "unloading":
                    entry.draining = True
                    self._unloader.wake()
                return UnloadResult.DRAINING
            entry.state = "unloading"
        self._state.stop_engine(entry, "as requested")
        return UnloadResult.UNLOADED

    def statuses(self) -> list[ModelStatus]:
        """Return every servable model, loaded or not, without its engine's own figures."""
        listed = self._catalogue.models()
        with self._state.changed:
            entries = self._state.entries
            names = [spec.name for spec in listed]
            names += [name for name, entry in entries.items() if entry.state != "unloaded"]
            pinned = {spec.name for spec in listed if spec.pinned}
            return [
                entries[name].status()
                if name in entries
                else ModelStatus(name=name, state="unloaded", percent=0, pinned=name in pinned)
                for name in dict.fromkeys(names)
            ]

    def services(self) -> dict[str, S]:
        """Return the ready services by name, to look at and not to use. Keep none: it would stay in memory."""
        with self._state.changed:
            return {entry.spec.name: entry.service for entry in self._state.ready() if entry.service}

    def stop(self, timeout: float | None = None) -> None:
        """Stop everything: waiting requests get an error, engines are stopped, threads joined. Idempotent.

        A load that reports no progress cannot be interrupted; it is abandoned after `timeout` seconds (None: never).
        """
        state = self._state
        with state.changed:
            state.stopping = True
            ready = state.ready()
            for entry in ready:
                entry.state = "unloading"
            state.changed.notify_all()
            state.unload_due.notify_all()
        for entry in ready:
            state.stop_engine(entry, "as the server is stopping")
        self._loader.join(timeout)
        self._unloader.join(timeout)
        with state.changed:  # models that other threads are unloading
            state.changed.wait_for(state.none_unloading, timeout)
        if self._loader.is_alive():
            log.warning("A model is still being loaded; not waiting for it any longer.")

    # -- leasing ---------------------------------------------------------------------------------------------

    def _acquire(self, spec: ModelSpec, deadline: float, *, reports: bool = False) -> ModelLease[S]:
        """Lease a model. With `reports`, what this raises is told to people by the caller, and not logged."""
        attempt: LoadAttempt | None = None  # the one that is waited for
        with self._state.changed:
            while True:
                entry = self._state.entry(spec)
                if self._state.stopping:
                    raise EngineStopped("The server is stopping.")
                # A draining model is only for those who waited for its load.
                if entry.state == "ready" and (not entry.draining or attempt is entry.attempt):
                    return self._lease(entry)
                if attempt is not None:
                    attempt.raise_if_failed()
                if entry.state in ("unloaded", "failed"):
                    attempt = self._loader.enqueue(entry, spec)
                elif entry.state == "loading":
                    attempt = entry.attempt
                if reports and attempt is not None:
                    attempt.is_reported = True
                self._wait_for(attempt, spec, deadline)

    def _lease(self, entry: ModelEntry[S]) -> ModelLease[S]:
        assert entry.service is not None  # it is ready
        entry.leases += 1
        entry.last_used = self._clock.now()
        return ModelLease(entry.spec, entry.service, partial(self._on_release, entry))

    def _on_release(self, entry: ModelEntry[S]) -> None:
        with self._state.changed:
            entry.leases -= 1
            entry.last_used = self._clock.now()
            if not entry.leases:
                self._state.unload_due.notify()

    def _discard(self, lease: ModelLease[S]) -> None:
        """Release a lease on a stopped engine, and unload it when its other leases have been released too."""
        with self._state.changed:
            entry = self._state.entries.get(lease.spec.name)
            if entry is not None and entry.service is lease.service:
                log.warning("The engine of %s has stopped; it is loaded again.", lease.spec.name)
                entry.draining = True
                self._unloader.wake()
        lease.release()

    def _wait_for(self, attempt: LoadAttempt | None, spec: ModelSpec, deadline: float) -> None:
        """Wait until something has changed.

        Raises ModelLoading if the deadline has passed, PreparationCancelled if nobody waits for the request any more.
        """
        now = self._clock.now()
        if now >= deadline:
            if attempt is None:
                raise ModelLoading(spec.name, 0, 5)
            raise ModelLoading(spec.name, attempt.percent, attempt.retry_after(now), stage=attempt.stage)
        preparation = current()
        if attempt is not None:
            attempt.waiters += 1
        try:
            with preparation.cancelled_by(self._notify):
                preparation.check_cancelled()  # with the lock held: what comes later notifies
                self._clock.wait(self._state.changed, deadline - now)
                preparation.check_cancelled()
        finally:
            if attempt is not None:
                attempt.waiters -= 1

    def _notify(self) -> None:
        with self._state.changed:
            self._state.changed.notify_all()
