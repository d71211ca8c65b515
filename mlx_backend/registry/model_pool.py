"""Which models are in memory: loaded on request, kept while in use, unloaded when idle or evicted.

    unloaded ──requested──▶ loading ──▶ ready ──idle, evicted, on request──▶ unloading ──▶ unloaded
                              └───▶ failed ──requested after the retry delay──▶ loading

    callers     acquire: lease a ready model, or queue a load and wait for it, or give up at the deadline
    downloads   a thread each: fetch what a model lacks, and only then queue its load, so that no other model waits
    loader      one thread: evict, load, notify the waiters, one model after another
    unloader    one thread: unloads what has been idle for too long, or is drained

One lock guards the entries; every wait is on one of its two conditions: `_changed` (requests, the loader) and
`_unload_due` (the unloader). The lock is never held while something slow runs: an entry that is being loaded or
unloaded is marked as such, the lock is released, and a request for that model waits for the mark to go.

A request that waits for a load counts as a user of the model from before it is ready until the lease is taken. One that
waits for a model to finish unloading does not, or it never would. A load cannot be interrupted. It learns that the pool
is stopping when it next reports progress; if it finishes anyway, the model is stopped at once.

Knows names, services and time; how a model is loaded is passed in.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.device.host_memory import collect_all_again
from mlx_backend.device.memory import format_bytes
from mlx_backend.device.threads import NativeThread
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped
from mlx_backend.preparation import current
from mlx_backend.registry.base import Lease, ModelStatus
from mlx_backend.registry.errors import (
    InsufficientMemory,
    ModelError,
    ModelLoading,
    ModelPinned,
    UnknownModel,
    copy_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx_backend.embedding.worker import Worker
    from mlx_backend.engine.threaded import Engine
    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.base import ModelState
    from mlx_backend.registry.catalogue import Catalogue

log = logging.getLogger(__name__)

type Fetch = Callable[[ModelSpec, Callable[[int, int], None]], None]

MAX_QUEUED = 16
"""Models being downloaded, or waiting to be loaded; further requests are told to retry."""
MIN_RETRY_DELAY = 1.0
"""Seconds between a failed load and the next; doubled for each further failure."""
MAX_RETRY_DELAY = 60.0
_MAX_REMEMBERED = 256
"""Entries of models that are no longer in memory."""


class Clock:
    """A monotonic clock that can wait on a condition. Tests pass in one of their own."""

    def now(self) -> float:
        """Return seconds since any fixed moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait on the held condition for at most `seconds` (may be infinite). May return early."""
        condition.wait(min(seconds, threading.TIMEOUT_MAX) if seconds < math.inf else None)


class LoadedService(Protocol):
    """What loading returns: a service, or anything else around an engine."""

    @property
    def engine(self) -> Engine | Worker:
        """The engine that it uses."""
        ...


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """How many bytes all models together may take, and how many each takes, on this machine or not; 0 if not known.

    `too_large` returns what to tell people of a model of so many bytes, which never fits.
    """

    limit: Callable[[], int]
    measure: Callable[[ModelSpec], int]
    too_large: Callable[[ModelSpec, int], str]


UNLOADED = "It has been unloaded."
DRAINING = "It will be unloaded as soon as its replies have ended."
NOT_LOADED = "It was not loaded."
"""What becomes of a request to unload a model, in sentences."""


@dataclass(slots=True, eq=False)
class LoadAttempt:
    """One attempt to load a model. Its waiters are counted, so that the model is not unloaded before they have it.

    `started_at` is of the download or of the load, None while it is queued; `done` of `total` bytes are downloaded (0:
    not known, or it is loaded). With `is_reported`, somebody who waits says what went wrong, and it need not be logged.
    """

    started_at: float | None = None
    stage: Literal["downloading", "loading"] = "loading"
    done: int = 0
    total: int = 0
    percent: int = 0
    waiters: int = 0
    finished: bool = False
    error: Exception | None = None
    is_reported: bool = False

    def retry_after(self, now: float) -> int:
        """Estimate the seconds left, from 1 to 60."""
        if self.started_at is None or self.percent < 1:
            return 5
        left = (now - self.started_at) / self.percent * (100 - self.percent)
        return min(60, max(1, math.ceil(left)))

    def raise_if_failed(self) -> None:
        """Raise a copy of the error, if there is one: threads must not share a traceback."""
        if self.error is not None:
            raise copy_error(self.error)


@dataclass(slots=True, eq=False)
class ModelEntry[S]:
    """A model that has been requested at least once.

    It has a `service`, and a `size` in bytes, while it is ready or unloading. `attempt` is the latest, `last_used` when
    it was last loaded, leased or released, `failures` how many loads have failed in a row. A `draining` model is
    unloaded when its last reply has ended. `kept` is the time to live that a request has given it.
    """

    spec: ModelSpec
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"] = "unloaded"
    service: S | None = None
    attempt: LoadAttempt | None = None
    size: int = 0
    leases: int = 0
    last_used: float | None = None
    draining: bool = False
    kept: float | None = None
    failures: int = 0
    retry_at: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Ready, and neither leased nor about to be."""
        return self.state == "ready" and not self.leases and not (self.attempt and self.attempt.waiters)

    def unload_at(self) -> float:
        """Return when it is to be unloaded; infinity: not by itself."""
        if not self.is_idle:
            return math.inf
        if self.draining:
            return -math.inf
        return math.inf if self.last_used is None else self.last_used + self.ttl

    @property
    def ttl(self) -> float:
        """The seconds without a request until it is unloaded; infinity: never."""
        if self.spec.pinned:
            return math.inf
        ttl = self.spec.ttl if self.kept is None else self.kept
        return math.inf if ttl is None else ttl

    def status(self, now: float) -> ModelStatus:
        """Return its status as the pool knows it; what its engine does is not included."""
        attempt = self.attempt or LoadAttempt()
        left = self.unload_at() - now if self.is_idle else self.ttl
        is_loading = self.state == "loading"
        state: ModelState = attempt.stage if self.state == "loading" else self.state
        return ModelStatus(
            name=self.spec.name,
            state=state,
            percent=100 if state == "ready" else attempt.percent if is_loading else 0,
            done=attempt.done if is_loading else 0,
            total=attempt.total if is_loading else 0,
            in_use=self.leases,
            pinned=self.spec.pinned,
            detail=str(attempt.error) if state == "failed" and attempt.error is not None else "",
            unloads_in=max(0.0, left) if math.isfinite(left) else None,
        )


class ModelPool[S: LoadedService]:
    """The models in memory. Thread-safe.

    `load(spec, progress)` runs on the loader's thread, takes as long as it likes and reports the fraction of the
    weights that is in memory. `fetch(spec, progress)` downloads what loading needs, while others are downloaded and
    loaded, and reports how many bytes there are, and of how many. Both report from any thread; what they report goes to
    `on_status`, and raises EngineStopped when the model is no longer wanted. Without `memory`, any number of models of
    any size may be loaded. `default_name` is for requests that name no model.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        load: Callable[[ModelSpec, Callable[[float], None]], S],
        *,
        memory: ModelMemory | None = None,
        default_name: str | None = None,
        clock: Clock | None = None,
        fetch: Fetch | None = None,
        on_status: Callable[[ModelStatus], object] = lambda _status: None,
    ) -> None:
        self._catalogue = catalogue
        self._default_name = default_name
        self._load_service = load
        self._fetch_files = fetch
        self._memory = memory
        self._on_status = on_status
        self._clock = clock or Clock()
        # Reentrant: a forgotten lease is released by a finaliser, which may run in any thread at any moment.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._unload_due = threading.Condition(lock)
        self._entries: dict[str, ModelEntry[S]] = {}
        self._queue: deque[tuple[ModelEntry[S], LoadAttempt]] = deque()
        self._downloads: set[threading.Thread] = set()
        self._loader: threading.Thread | None = None
        self._unloader: threading.Thread | None = None
        self._stopping = False

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

    def acquire(self, name: str | None, wait: float, *, is_reported: bool = False) -> Lease[S]:
        """Lease a model, loading it if necessary. With `is_reported` a failure is not logged, as the caller says it.

        Raises UnknownModel, ModelNotAllowed, InsufficientMemory, ModelLoading after `wait` seconds, EngineStopped
        when the pool is stopping, EngineBusy if no thread can be started for it, and what loading raised: the same
        error until the retry delay is over.
        """
        called = self.find(name)
        spec = self._catalogue.loaded(called)
        deadline = self._clock.now() + max(0.0, wait)
        lease = self._acquire(spec, deadline, called.name, is_reported=is_reported)
        engine = lease.service.engine
        if not engine.is_healthy() and engine.status().state == "stopped":
            # It does not restart by itself. Reload once: an engine that stops again will say so when it is used.
            self._discard(lease)
            lease = self._acquire(spec, deadline, called.name, is_reported=is_reported)
        return lease

    def preload(self) -> None:
        """Load the pinned models, one after another; raise the error of the first that fails."""
        for spec in self._catalogue.pinned():
            loaded = self._catalogue.loaded(self.find(spec.name))
            self._acquire(loaded, math.inf, spec.name, is_reported=True).release()

    def unload(self, name: str) -> str:
        """Unload a model, and with it those that share its weights: at once if it is idle, else after its replies.

        Requests from now on reload it. Returns a sentence on what happens. Raises ModelPinned, and EngineBusy if no
        thread can be started that would wait for the replies.
        """
        spec = self._catalogue.loaded(self._catalogue.find(name))
        with self._changed:
            entry = self._entries.get(spec.name)
            if entry is None or entry.state in ("unloaded", "failed"):
                return NOT_LOADED
            if entry.spec.pinned:
                raise ModelPinned(
                    f"The model {name!r} stays in memory: the server was started with it, or its settings say "
                    "`pinned`."
                )
            if not entry.is_idle:
                if entry.state != "unloading":
                    self._drain(entry)
                return DRAINING
            entry.state = "unloading"
        self._stop_engine(entry, "as requested")
        return UNLOADED

    def keep(self, name: str | None, seconds: float) -> bool:
        """Have a model stay for so many seconds after each use, until it is unloaded; False if it is pinned.

        Raises EngineBusy if no thread can be started that would unload it.
        """
        spec = self._catalogue.loaded(self.find(name))
        with self._changed:
            entry = self._entries.get(spec.name)
            if entry is None or entry.state not in ("loading", "ready"):
                return not spec.pinned
            if entry.spec.pinned:
                return False
            self._start_unloader()
            entry.kept = seconds
            self._unload_due.notify()
            return True

    def statuses(self) -> list[ModelStatus]:
        """Return every servable model, loaded or not, without its engine's own figures."""
        listed = {spec.name: self._catalogue.loaded(spec) for spec in self._catalogue.models()}
        with self._changed:
            entries, now = self._entries, self._clock.now()
            more = {
                name: entry.spec
                for name, entry in entries.items()
                if entry.state != "unloaded" and name not in listed
            }
            return [
                replace(
                    (entries.get(spec.name) or ModelEntry(spec)).status(now),
                    name=name,
                    shares=spec.name if spec.name != name else "",
                )
                for name, spec in {**listed, **more}.items()
            ]

    def services(self) -> dict[str, S]:
        """Return the ready services by the name they were loaded under.

        For reading only; a reference that is kept would hold the model in memory.
        """
        with self._changed:
            return {entry.spec.name: entry.service for entry in self._ready() if entry.service}

    def stop(self, timeout: float = 60.0) -> None:
        """Stop everything: waiting requests get an error, engines are stopped, threads joined. Idempotent.

        A load that reports no progress cannot be interrupted; it is abandoned after `timeout` seconds.
        """
        with self._changed:
            self._stopping = True
            ready = self._ready()
            for entry in ready:
                entry.state = "unloading"
            self._changed.notify_all()
            self._unload_due.notify_all()
            loading = [*self._downloads, *filter(None, [self._loader])]
        for entry in ready:
            self._stop_engine(entry, "as the server is stopping")
        deadline = time.monotonic() + timeout
        for thread in (*loading, *filter(None, [self._unloader])):
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:  # models that other threads are unloading
            self._changed.wait_for(self._none_unloading, timeout)
        if any(thread.is_alive() for thread in loading):
            log.warning("A model is still being loaded; not waiting for it any longer.")

    def _ready(self) -> list[ModelEntry[S]]:
        return [entry for entry in self._entries.values() if entry.state == "ready"]

    def _none_unloading(self) -> bool:
        return all(entry.state != "unloading" for entry in self._entries.values())

    # -- leasing ---------------------------------------------------------------------------------------------

    def _acquire(
        self, spec: ModelSpec, deadline: float, called: str, *, is_reported: bool = False
    ) -> Lease[S]:
        attempt: LoadAttempt | None = None  # the one that is waited for
        with self._changed:
            while True:
                entry = self._entry(spec)
                if self._stopping:
                    raise EngineStopped("The server is stopping.")
                # A draining model is only for those who waited for its load.
                if entry.state == "ready" and (not entry.draining or attempt is entry.attempt):
                    return self._lease(entry)
                if attempt is not None:
                    attempt.raise_if_failed()
                if entry.state in ("unloaded", "failed"):
                    attempt = self._enqueue(entry, spec)
                elif entry.state == "loading":
                    attempt = entry.attempt
                if is_reported and attempt is not None:
                    attempt.is_reported = True
                self._wait_for(attempt, called, deadline)

    def _entry(self, spec: ModelSpec) -> ModelEntry[S]:
        """Return a model's entry, a new one if it has none; forget the oldest of too many unloaded ones."""
        entry = self._entries.get(spec.name)
        if entry is None:
            gone = [name for name, each in self._entries.items() if each.state in ("unloaded", "failed")]
            for name in gone[: max(0, len(gone) - _MAX_REMEMBERED)]:
                del self._entries[name]
            entry = self._entries[spec.name] = ModelEntry(spec)
        return entry

    def _lease(self, entry: ModelEntry[S]) -> Lease[S]:
        assert entry.service is not None  # it is ready
        entry.leases += 1
        entry.last_used = self._clock.now()
        return Lease(entry.spec.name, entry.service, partial(self._on_release, entry))

    def _on_release(self, entry: ModelEntry[S]) -> None:
        with self._changed:
            entry.leases -= 1
            entry.last_used = self._clock.now()
            if not entry.leases:
                self._unload_due.notify()

    def _discard(self, lease: Lease[S]) -> None:
        """Release a lease on a stopped engine, and unload it when its other leases have been released too."""
        with lease, self._changed:
            entry = self._entries.get(lease.name)
            if entry is not None and entry.service is lease.service:
                log.warning("The engine of %s has stopped; it is loaded again.", lease.name)
                self._drain(entry)

    def _wait_for(self, attempt: LoadAttempt | None, name: str, deadline: float) -> None:
        """Wait until something has changed.

        Raises ModelLoading if the deadline has passed, PreparationCancelled if the request's client has gone.
        """
        now = self._clock.now()
        if now >= deadline:
            if attempt is None:
                raise ModelLoading(name, 0, 5)
            raise ModelLoading(name, attempt.percent, attempt.retry_after(now), stage=attempt.stage)
        preparation = current()
        if attempt is not None:
            attempt.waiters += 1
        try:
            with preparation.cancelled_by(self._notify):
                preparation.check_cancelled()  # with the lock held: what comes later notifies
                self._clock.wait(self._changed, deadline - now)
                preparation.check_cancelled()
        finally:
            if attempt is not None:
                attempt.waiters -= 1
                if not attempt.waiters:  # a loaded model that no request takes may be due
                    self._unload_due.notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- loading ---------------------------------------------------------------------------------------------

    def _enqueue(self, entry: ModelEntry[S], spec: ModelSpec) -> LoadAttempt | None:
        """Queue a load, after a download if need be; None if the queue is full. Call this with the lock held.

        Before its retry delay is over, a failed model raises the error of its last load. Raises EngineBusy, and leaves
        all as it was, if a thread cannot be started; one that is started waits for the lock.
        """
        if entry.state == "failed" and entry.attempt is not None and self._clock.now() < entry.retry_at:
            entry.attempt.raise_if_failed()
        if len(self._queue) + len(self._downloads) >= MAX_QUEUED:
            return None
        attempt = LoadAttempt()
        if self._loader is None:
            self._loader = _start_thread("model-loader", self._load_queued)
        if spec.ttl is not None:
            self._start_unloader()
        if self._fetch_files is None:
            self._queue.append((entry, attempt))
        else:
            download = partial(self._download, entry, attempt, self._fetch_files)
            self._downloads.add(_start_thread("model-download", download))
        entry.spec, entry.state, entry.attempt = spec, "loading", attempt
        self._changed.notify_all()
        return attempt

    def _download(
        self,
        entry: ModelEntry[S],
        attempt: LoadAttempt,
        fetch: Fetch,
    ) -> None:
        """Download what is missing of a model, and queue it to be loaded. A download's thread."""
        with self._changed:
            spec, attempt.started_at = entry.spec, self._clock.now()
        error: Exception | None = None
        try:
            self._size_of(spec)  # before it is fetched in vain
            fetch(spec, partial(self._report_download, entry, attempt))
        except BaseException as raised:  # whatever it is, no request may be left waiting
            error = _public_error(raised, spec.name)
        with self._changed:
            is_there = error is None and not self._stopping
            if is_there:
                attempt.stage, attempt.started_at = "loading", None
                attempt.done = attempt.total = attempt.percent = 0
                self._queue.append((entry, attempt))
                self._changed.notify_all()
        if not is_there:
            self._fail(entry, attempt, error)
        with self._changed:
            self._downloads.discard(threading.current_thread())

    def _load_queued(self) -> None:
        """Load one model after another until the pool stops. The loader's thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                entry, attempt = self._queue.popleft()
                attempt.started_at = self._clock.now()
            self._load(entry, attempt)

    def _load(self, entry: ModelEntry[S], attempt: LoadAttempt) -> None:
        spec = entry.spec
        service: S | None = None
        error: Exception | None = None
        size = 0
        try:
            size = self._make_room(spec)
            service = self._load_service(spec, partial(self._report, entry, attempt, 0, 0))
            if not size:  # it was not known before the download
                with suppress(InsufficientMemory):
                    size = self._make_room(spec)
        except BaseException as raised:  # whatever it is, no request may be left waiting
            error = _public_error(raised, spec.name)
        if error is None and service is not None and self._publish(entry, attempt, service, size):
            return
        self._fail(entry, attempt, error)
        if service is not None:
            service.engine.stop()

    def _report_download(self, entry: ModelEntry[S], attempt: LoadAttempt, done: int, total: int) -> None:
        if attempt.stage == "loading":  # the time left is estimated for each by itself
            attempt.stage, attempt.started_at = "downloading", self._clock.now()
        self._report(entry, attempt, done, total, done / total if total else 0.0)

    def _report(
        self, entry: ModelEntry[S], attempt: LoadAttempt, done: int, total: int, fraction: float
    ) -> None:
        """Record how far a load is. An engine that reloads itself later may report here too, which is ignored."""
        if attempt.finished:
            return
        if self._stopping:
            raise EngineStopped("The server is stopping.")
        attempt.done, attempt.total, attempt.percent = done, total, int(100 * min(1.0, max(0.0, fraction)))
        self._on_status(entry.status(self._clock.now()))

    def _publish(self, entry: ModelEntry[S], attempt: LoadAttempt, service: S, size: int) -> bool:
        """Mark a model as ready; False if the pool has been stopped meanwhile."""
        with self._changed:
            if self._stopping:
                return False
            now = self._clock.now()
            attempt.finished, attempt.percent = True, 100
            entry.state, entry.service, entry.size = "ready", service, size
            entry.last_used, entry.failures = now, 0
            self._unload_due.notify()
            self._changed.notify_all()
        self._on_status(entry.status(self._clock.now()))
        log.info("Loaded %s in %.1f s.", entry.spec.name, now - (attempt.started_at or now))
        return True

    def _fail(self, entry: ModelEntry[S], attempt: LoadAttempt, error: Exception | None) -> None:
        """Mark a load as failed, or as given up because the pool is stopping."""
        with self._changed:
            attempt.finished, attempt.percent, attempt.error = True, 100, error
            entry.draining = False
            if isinstance(error, EngineError) and not self._stopping:
                entry.state = "failed"
                entry.retry_at = self._clock.now() + min(MAX_RETRY_DELAY, MIN_RETRY_DELAY * 2**entry.failures)
                entry.failures = min(entry.failures + 1, 16)
            else:
                entry.state = "unloaded"
            self._changed.notify_all()
        self._on_status(entry.status(self._clock.now()))
        if error is not None and not attempt.is_reported:
            level = logging.INFO if isinstance(error, InsufficientMemory) else logging.WARNING
            log.log(level, "%s was not loaded: %s", entry.spec.name, error)

    def _make_room(self, spec: ModelSpec) -> int:
        """Evict what is in the way of a model; return its size, 0 if unknown. Raises InsufficientMemory."""
        if self._memory is None:
            return 0
        size, limit = self._size_of(spec), self._memory.limit()
        with self._changed:
            self._changed.wait_for(self._none_unloading)
            evicted = choose_evictions(spec.name, size, limit, self._entries.values())
            for entry in evicted:
                entry.state = "unloading"
        for entry in evicted:
            self._stop_engine(entry, f"to make room for {spec.name}")
        return size

    def _size_of(self, spec: ModelSpec) -> int:
        """Return a model's size, 0 if unknown. Raises InsufficientMemory for one that never fits."""
        if self._memory is None:
            return 0
        size = self._memory.measure(spec)
        if size > self._memory.limit():
            raise InsufficientMemory(self._memory.too_large(spec, size))
        return size

    # -- unloading -------------------------------------------------------------------------------------------

    def _drain(self, entry: ModelEntry[S]) -> None:
        """Have a model unloaded once it is idle; call this with the lock held. Raises EngineBusy."""
        self._start_unloader()
        entry.draining = True
        self._unload_due.notify()

    def _start_unloader(self) -> None:
        if self._unloader is None:
            self._unloader = _start_thread("model-unloader", self._unload_due_models)

    def _unload_due_models(self) -> None:
        """Unload each model when it is due, until the pool stops. The unloader's thread."""
        while (entry := self._next_due()) is not None:
            self._stop_engine(entry, "as requested" if entry.draining else "after being idle")

    def _next_due(self) -> ModelEntry[S] | None:
        """Wait for a model to be due and mark it as unloading; None when the pool stops."""
        with self._unload_due:
            while not self._stopping:
                first = min(self._entries.values(), key=ModelEntry.unload_at, default=None)
                left = math.inf if first is None else first.unload_at() - self._clock.now()
                if first is not None and left <= 0:
                    first.state = "unloading"
                    return first
                self._clock.wait(self._unload_due, left)
            return None

    def _stop_engine(self, entry: ModelEntry[S], reason: str) -> None:
        """Unload a model that is marked as unloading. Call this without the lock: an engine may take its time."""
        assert entry.service is not None
        try:
            entry.service.engine.stop()
        except Exception:
            log.exception("The engine of %s could not be stopped cleanly.", entry.spec.name)
        collect_all_again()
        with self._changed:
            entry.state, entry.service, entry.size, entry.draining = "unloaded", None, 0, False
            entry.kept = None
            self._changed.notify_all()
        log.info("Unloaded %s, %s.", entry.spec.name, reason)


def _start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = NativeThread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        text = "No thread could be started to load or unload the model; try again in 5 s."
        raise EngineBusy(text, retry_after=5) from error
    return thread


def choose_evictions[S](
    name: str, size: int, limit: int, entries: Iterable[ModelEntry[S]]
) -> list[ModelEntry[S]]:
    """Choose which models to unload so that model `name` of `size` bytes, no more than `limit`, fits within it.

    Only idle, unpinned models are chosen, the least recently used first. Raises InsufficientMemory if that is
    not enough; nothing is evicted in vain.
    """
    in_memory = [entry for entry in entries if entry.state in ("ready", "unloading")]
    missing = sum(entry.size for entry in in_memory) + size - limit
    evicted: list[ModelEntry[S]] = []
    for entry in sorted(in_memory, key=lambda entry: entry.last_used or 0.0):
        if missing <= 0:
            break
        if entry.is_idle and not entry.spec.pinned:
            evicted.append(entry)
            missing -= entry.size
    if missing > 0:
        raise _insufficient(name, size, limit, [entry for entry in in_memory if entry not in evicted])
    for entry in reversed(evicted.copy()):  # a large model may have made evicting a small one unnecessary
        if missing + entry.size <= 0:
            evicted.remove(entry)
            missing += entry.size
    return evicted


def _insufficient[S](name: str, size: int, limit: int, staying: list[ModelEntry[S]]) -> InsufficientMemory:
    needs = f"The model {name!r} needs {format_bytes(size)}, and {format_bytes(limit)} is the limit for all models"
    pinned_size = sum(entry.size for entry in staying if entry.spec.pinned)
    listed = ", ".join(
        f"{entry.spec.name!r} ({format_bytes(entry.size)}, "
        f"{'pinned' if entry.spec.pinned else f'in use by {max(1, entry.leases)}'})"
        for entry in staying
    )
    return InsufficientMemory(
        f"{needs}.",
        retry_after=5 if size + pinned_size <= limit else None,
        staying=f"These models must stay in memory: {listed}.",
    )


def _public_error(error: BaseException, name: str) -> Exception:
    """Return an error with the same message but no traceback, which would keep the half-loaded model alive."""
    if isinstance(error, EngineError | ModelError):
        return copy_error(error)
    log.error("Loading %s failed unexpectedly.", name, exc_info=error)
    return EngineError(f"The model {name!r} could not be loaded; the server's log says why.")
