"""Which models are in memory: loaded when they are asked for, kept while they are used, unloaded when idle.

Knows names, services and time; how a model is loaded is told to it. What a model's states are is `resident`.

The theory. One lock, and every wait is on one of its two conditions: `_changed` (requests, and the loader)
and `_keeping` (the keeper). It is never held while something takes its time: a model that is being loaded
or stopped is marked as such, the lock is let go, and whoever needs that model waits for the mark to go.

    callers    acquire ── ready? count it, go ── else ask for a load, wait for that load, or give up in time
    loader     one thread, one load after another: make room, load, tell those who waited
    keeper     one thread, born with the first model that has something to wait for: unloads what is due

Who waits for a load counts like somebody who has the model, from before it is ready until he has it. Who waits
for a model to be gone does not, or it would never go.

A load cannot be broken off. It hears of the end the next time it reports its progress; what is loaded in spite
of that is stopped at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Self

from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.registry.errors import ModelLoading, NoRoom, UnknownModel
from mlx_backend.registry.resident import Load, Resident, Served, SystemClock, again, bare, to_make_room, told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.resident import Clock, Models, ModelState

log = logging.getLogger(__name__)

MAX_QUEUED = 16  # models; whoever comes then has to come again
_MAX_REMEMBERED = 256  # models that are not in memory any more


class Unloading(StrEnum):
    """What became of an order to unload a model."""

    UNLOADED = "unloaded"
    WHEN_IDLE = "unloading"  # as soon as its replies have ended, or its load has
    NOT_LOADED = "not loaded"
    PINNED = "pinned"  # it stays


class Hold[S: Served]:
    """A model in use. Release it when the reply is over: idempotent, from any thread, and when it is forgotten."""

    def __init__(self, spec: ModelSpec, service: S, release: Callable[[], None]) -> None:
        self.spec = spec
        self._service: S | None = service
        self._release = release
        self._released = threading.Lock()

    @property
    def service(self) -> S:
        """The model's service, until it is released."""
        if self._service is None:
            raise RuntimeError(f"The model {self.spec.name!r} has been released.")
        return self._service

    def release(self) -> None:
        """Give the model back."""
        if self._released.acquire(blocking=False):
            self._service = None
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class Residency[S: Served]:
    """The models in memory. Safe to use from several threads.

    `load(spec, report)` runs on the loader's thread, takes as long as it likes and reports from 0 to 1. With
    a `memory_limit` in bytes, `measure(spec)` says how many a model needs. `default_name` is for requests that
    name none.
    """

    def __init__(
        self,
        catalogue: Models,
        load: Callable[[ModelSpec, Callable[[float], None]], S],
        *,
        memory_limit: int | None = None,
        measure: Callable[[ModelSpec], int] = lambda _spec: 0,
        default_name: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._load = load
        self._memory_limit = memory_limit
        self._measure = measure
        self._default_name = default_name
        self._clock: Clock = clock or SystemClock()
        # Reentrant: a forgotten hold is released by a finaliser, and that runs in any thread at any moment.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._keeping = threading.Condition(lock)
        self._residents: dict[str, Resident[S]] = {}
        self._queue: deque[Resident[S]] = deque()
        self._loader: threading.Thread | None = None
        self._keeper: threading.Thread | None = None
        self._stopping = False

    # -- using a model ---------------------------------------------------------------------------------------

    @contextmanager
    def use(self, name: str | None, wait: float) -> Iterator[S]:
        """Give a model's service; it stays in memory until the block is left. See `acquire`."""
        with self.acquire(name, wait) as hold:
            yield hold.service

    def acquire(self, name: str | None, wait: float) -> Hold[S]:
        """Give a model to somebody who will release it, loading it if need be.

        Raises UnknownModel, ModelNotAllowed or NoRoom, ModelLoading after `wait` seconds, EngineStopped when
        all is over, and what loading raised: again and again until it is time for another attempt.
        """
        spec = self._find(name)
        deadline = self._clock.now() + max(0.0, wait)
        hold = self._acquire(spec, deadline)
        engine = hold.service.engine
        if not engine.healthy() and engine.status().state == "stopped":
            # It will not get up by itself. Once only: what is dead on arrival says so when it is used.
            self._give_up_on(hold)
            hold = self._acquire(spec, deadline)
        return hold

    def preload(self, *names: str) -> None:
        """Load the pinned models and these, one after another; raise what the first that fails raises."""
        for name in dict.fromkeys([*(spec.name for spec in self._catalogue.pinned()), *names]):
            self.acquire(name, math.inf).release()

    def unload(self, name: str) -> Unloading:
        """Take a model out of memory: now if it is idle, else after its replies. Requests from now on reload it."""
        spec = self._catalogue.find(name)
        with self._changed:
            resident = self._residents.get(spec.name)
            if resident is None or resident.state in ("unloaded", "failed"):
                return Unloading.NOT_LOADED
            if resident.spec.pinned:
                return Unloading.PINNED
            if not resident.idle:
                if resident.state != "unloading":
                    resident.leaving = True
                    self._keep()
                return Unloading.WHEN_IDLE
            resident.state = "unloading"
        self._end(resident, "as it was told to")
        return Unloading.UNLOADED

    def states(self) -> list[ModelState]:
        """Tell how every model is doing, those that can be loaded included."""
        listed = self._catalogue.models()
        with self._changed:
            now, wall = self._clock.now(), time.time()
            asked = {
                name: resident.spec
                for name, resident in self._residents.items()
                if resident.state != "unloaded"
            }
            specs = {spec.name: spec for spec in listed} | asked
            return [told(spec, self._residents.get(name), wall - now) for name, spec in specs.items()]

    def services(self) -> dict[str, S]:
        """Return what is ready, by name: to look at, not to use. Keep none of it, or it stays in memory."""
        with self._changed:
            ready = [resident for resident in self._residents.values() if resident.state == "ready"]
            return {resident.spec.name: resident.service for resident in ready if resident.service}

    def stop(self, patience: float | None = None) -> None:
        """End everything: requests that wait are told, engines stopped, threads joined. Idempotent.

        A load that reports nothing cannot be told; it is left behind after `patience` seconds (None: never).
        """
        with self._changed:
            self._stopping = True
            ready = [resident for resident in self._residents.values() if resident.state == "ready"]
            for resident in ready:
                resident.state = "unloading"
            self._changed.notify_all()
            self._keeping.notify_all()
        for resident in ready:
            self._end(resident, "as the server stops")
        for thread in (self._loader, self._keeper):
            if thread is not None:
                thread.join(patience)
        with self._changed:  # what others are stopping just now
            self._changed.wait_for(self._nothing_ends, patience)
        if self._loader is not None and self._loader.is_alive():
            log.warning("A model is still being loaded; it is not waited for any longer.")

    def _nothing_ends(self) -> bool:
        return all(resident.state != "unloading" for resident in self._residents.values())

    # -- callers ---------------------------------------------------------------------------------------------

    def _find(self, name: str | None) -> ModelSpec:
        if name == "default":
            try:
                return self._catalogue.find(name)  # somebody may have called a model that
            except UnknownModel:
                name = None
        return self._catalogue.find(name or self._default_name or "")

    def _acquire(self, spec: ModelSpec, deadline: float) -> Hold[S]:
        load: Load | None = None  # the one that is waited for
        with self._changed:
            while True:
                resident = self._resident(spec)
                if self._stopping:
                    raise EngineStopped("The server is stopping.")
                if resident.state == "ready" and (not resident.leaving or load is resident.load):
                    return self._hold(resident)
                if load is not None and load.error is not None:
                    raise again(load.error)
                if resident.state in ("unloaded", "failed"):
                    load = self._ask(resident, spec)
                elif resident.state == "loading":
                    load = resident.load
                self._wait_for(load, spec, deadline)

    def _resident(self, spec: ModelSpec) -> Resident[S]:
        resident = self._residents.get(spec.name)
        if resident is None:
            gone = [name for name, each in self._residents.items() if each.state in ("unloaded", "failed")]
            for name in gone[: max(0, len(gone) - _MAX_REMEMBERED)]:
                del self._residents[name]
            resident = self._residents[spec.name] = Resident(spec)
        return resident

    def _hold(self, resident: Resident[S]) -> Hold[S]:
        assert resident.service is not None  # it is ready
        resident.holds += 1
        resident.used = self._clock.now()
        return Hold(resident.spec, resident.service, partial(self._released, resident))

    def _released(self, resident: Resident[S]) -> None:
        with self._changed:
            resident.holds -= 1
            resident.used = self._clock.now()
            if not resident.holds:
                self._keeping.notify()

    def _give_up_on(self, hold: Hold[S]) -> None:
        """Have a dead engine buried once all who have it have noticed."""
        with self._changed:
            resident = self._residents.get(hold.spec.name)
            if resident is not None and resident.service is hold.service:
                log.warning("The engine of %s has ended; it is loaded again.", hold.spec.name)
                resident.leaving = True
                self._keep()
        hold.release()

    def _ask(self, resident: Resident[S], spec: ModelSpec) -> Load | None:
        """Queue a load; None while the queue is full. Raises the last failure if it was a moment ago."""
        if resident.state == "failed" and self._clock.now() < resident.retry_at:
            assert resident.load is not None
            assert resident.load.error is not None
            raise again(resident.load.error)
        if len(self._queue) >= MAX_QUEUED:
            return None
        resident.spec, resident.state, resident.load = spec, "loading", Load()
        self._queue.append(resident)
        if self._loader is None:
            self._loader = threading.Thread(target=self._load_in_turn, name="model-loader", daemon=True)
            self._loader.start()
        self._changed.notify_all()
        return resident.load

    def _wait_for(self, load: Load | None, spec: ModelSpec, deadline: float) -> None:
        """Wait until something has changed, or raise ModelLoading because it is too late."""
        now = self._clock.now()
        if now >= deadline:
            percent, later = (load.percent, load.retry_after(now)) if load else (0, 5)
            raise ModelLoading(spec.name, percent, later)
        if load is None:
            self._clock.wait(self._changed, deadline - now)
            return
        load.waiters += 1
        try:
            self._clock.wait(self._changed, deadline - now)
        finally:
            load.waiters -= 1

    # -- the loader ------------------------------------------------------------------------------------------

    def _load_in_turn(self) -> None:
        while (resident := self._next_in_queue()) is not None:
            self._load_one(resident)

    def _next_in_queue(self) -> Resident[S] | None:
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            resident = self._queue.popleft()
            assert resident.load is not None  # set when it was queued
            resident.load.begun = self._clock.now()
            return resident

    def _load_one(self, resident: Resident[S]) -> None:
        spec, load = resident.spec, resident.load
        assert load is not None
        service: S | None = None
        error: Exception | None = None
        size = 0
        try:
            size = self._measure(spec)
            self._make_room(spec, size)
            log.info("Loading %s.", spec.name)
            service = self._load(spec, partial(self._report, load))
            if not size:  # it has come from afar
                size = self._measure(spec)
                with suppress(NoRoom):
                    self._make_room(spec, size)
        except BaseException as raised:  # whatever it is, nobody may be left waiting
            error = bare(raised, spec.name)
        with self._changed:
            load.over, load.percent, load.error = True, 100, error
            now = self._clock.now()
            unwanted = None
            if service is not None and error is None and not self._stopping:
                resident.state, resident.service, resident.size = "ready", service, size
                resident.used, resident.failures = now, 0
                if resident.leaving or spec.ttl is not None:
                    self._keep()
            else:
                unwanted = service
                resident.leaving = False
                if isinstance(error, EngineError) and not self._stopping:
                    resident.failed(now)
                else:
                    resident.state = "unloaded"
            self._changed.notify_all()
        if unwanted is not None:
            unwanted.engine.stop()
        elif error is not None:
            level = logging.INFO if isinstance(error, NoRoom) else logging.WARNING
            log.log(level, "%s was not loaded: %s", spec.name, error)
        else:
            log.info("Loaded %s in %.1f s.", spec.name, now - (load.begun or now))

    def _report(self, load: Load, part: float) -> None:
        """Hear how far a load has come. An engine that is loaded again by itself may report that here too."""
        if load.over:
            return
        if self._stopping:
            raise EngineStopped("The server is stopping.")
        if math.isfinite(part):
            load.percent = int(100 * min(1.0, max(0.0, part)))

    def _make_room(self, spec: ModelSpec, size: int) -> None:
        if self._memory_limit is None:
            return
        with self._changed:
            self._changed.wait_for(self._nothing_ends)
            going = to_make_room(spec.name, size, self._memory_limit, self._residents.values())
            for resident in going:
                resident.state = "unloading"
        for resident in going:
            self._end(resident, f"to make room for {spec.name}")

    # -- the keeper ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Have the keeper look at what is due; call this with the lock."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_house, name="model-keeper", daemon=True)
            self._keeper.start()
        self._keeping.notify()

    def _keep_house(self) -> None:
        while (resident := self._next_due()) is not None:
            self._end(resident, "as it was told to" if resident.leaving else "for being idle")

    def _next_due(self) -> Resident[S] | None:
        with self._keeping:
            while not self._stopping:
                first = min(self._residents.values(), key=Resident.due, default=None)
                left = math.inf if first is None else first.due() - self._clock.now()
                if first is not None and left <= 0:
                    first.state = "unloading"
                    return first
                self._clock.wait(self._keeping, left)
            return None

    def _end(self, resident: Resident[S], why: str) -> None:
        """Stop a model that is marked as unloading; call this without the lock."""
        service = resident.service
        assert service is not None
        try:
            service.engine.stop()
        except Exception:
            log.exception("The engine of %s could not be stopped cleanly.", resident.spec.name)
        with self._changed:
            resident.state, resident.service, resident.size, resident.leaving = "unloaded", None, 0, False
            self._changed.notify_all()
        log.info("Unloaded %s, %s.", resident.spec.name, why)
