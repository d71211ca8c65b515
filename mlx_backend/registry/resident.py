"""One model's place in memory: its states, who is counted, and which models go first when room is needed.

    unloaded ──asked for──▶ loading ──▶ ready ──idle, evicted, told to──▶ unloading ──▶ unloaded
                              └───▶ failed ──asked for, after a pause──▶ loading

Data and pure functions; `residency` holds the lock under which all of it is read and written.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.errors import EngineError
from mlx_backend.registry.errors import ModelError, NoRoom

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_backend.engine.base import EngineStatus
    from mlx_backend.models.spec import ModelSpec

log = logging.getLogger(__name__)

type State = Literal["unloaded", "loading", "ready", "unloading", "failed"]

FIRST_PAUSE = 1.0  # seconds after a failed load before the next; doubled for each one after it
LONGEST_PAUSE = 60.0
_GIGABYTE = 1e9


class RunningEngine(Protocol):
    """As much of an engine as is needed to keep it."""

    def status(self) -> EngineStatus:
        """What it is doing."""
        ...

    def healthy(self) -> bool:
        """Whether requests are being served."""
        ...

    def stop(self) -> None:
        """End it and give its memory back."""
        ...


class Served(Protocol):
    """What loading gives: a service, or anything else around an engine."""

    @property
    def engine(self) -> RunningEngine:
        """The engine behind it."""
        ...


class Models(Protocol):
    """What can be served (a `Catalogue`)."""

    def find(self, name: str) -> ModelSpec:
        """Return the model of that name, or raise a ModelError."""
        ...

    def models(self) -> Sequence[ModelSpec]:
        """List them."""
        ...

    def pinned(self) -> Sequence[ModelSpec]:
        """List those that are to be in memory always."""
        ...


class Clock(Protocol):
    """Time, and waiting for it: tests bring one of their own."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        ...

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait to be notified, `seconds` at most (infinity: for ever); waking up early does no harm."""
        ...


class SystemClock:
    """The time there is."""

    def now(self) -> float:
        """Seconds since any fixed moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait to be notified, `seconds` at most."""
        condition.wait(min(seconds, threading.TIMEOUT_MAX) if seconds < math.inf else None)


@dataclass(slots=True, eq=False)
class Load:
    """One attempt. Those who wait for it are counted, so that nobody takes the model away before they have it."""

    begun: float | None = None  # None: another model is being loaded first
    percent: int = 0
    waiters: int = 0
    over: bool = False
    error: Exception | None = None

    def retry_after(self, now: float) -> int:
        """Guess how many seconds are left."""
        if self.begun is None or self.percent < 1:
            return 5
        left = (now - self.begun) / self.percent * (100 - self.percent)
        return min(60, max(1, math.ceil(left)))


@dataclass(slots=True, eq=False)
class Resident[S]:
    """A model that has been asked for."""

    spec: ModelSpec
    state: State = "unloaded"
    service: S | None = None
    load: Load | None = None  # the last one
    size: int = 0  # bytes, while it is in memory
    holds: int = 0
    used: float | None = None  # when it was last taken or given back
    leaving: bool = False  # to be unloaded as soon as its replies have ended
    failures: int = 0  # in a row
    retry_at: float = 0.0

    @property
    def idle(self) -> bool:
        """Ready, and nobody has it or is about to."""
        return self.state == "ready" and not self.holds and not (self.load and self.load.waiters)

    def due(self) -> float:
        """When it is to be unloaded for being idle; infinity: not by itself."""
        if not self.idle:
            return math.inf
        if self.leaving:
            return -math.inf
        if self.spec.pinned or self.spec.ttl is None or self.used is None:
            return math.inf
        return self.used + self.spec.ttl

    def failed(self, now: float) -> None:
        """Note that a load has failed: the next one has to wait for a while."""
        self.state = "failed"
        self.retry_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.failures)
        self.failures = min(self.failures + 1, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """How a model is doing, for people and for /health. `last_used` is in seconds since 1970."""

    name: str
    state: State
    percent: int = 0
    in_use: int = 0
    pinned: bool = False
    last_used: float | None = None
    error: str | None = None


def to_make_room[S](name: str, size: int, limit: int, residents: Iterable[Resident[S]]) -> list[Resident[S]]:
    """Choose who goes so that `size` bytes fit: idle, unpinned, least recently used first. Raises NoRoom.

    Nobody goes if that would not be enough.
    """
    there = [resident for resident in residents if resident.state in ("ready", "unloading")]
    missing = sum(resident.size for resident in there) + size - limit
    going: list[Resident[S]] = []
    for resident in sorted(there, key=lambda resident: resident.used or 0.0):
        if missing <= 0:
            break
        if resident.idle and not resident.spec.pinned:
            going.append(resident)
            missing -= resident.size
    if missing <= 0:
        for resident in reversed(going.copy()):  # a large one may have made a small one's going needless
            if missing + resident.size <= 0:
                going.remove(resident)
                missing += resident.size
        return going
    staying = [resident for resident in there if resident not in going]
    what = f"The model {name!r} needs {_shown(size)}, and {_shown(limit)} is the limit for all models"
    if not staying or size > limit:
        raise NoRoom(f"{what} (--memory-gb).")
    holding = ", ".join(_why_it_stays(resident) for resident in staying)
    for_now = size + sum(resident.size for resident in staying if resident.spec.pinned) <= limit
    raise NoRoom(f"{what}. In memory and staying there: {holding}.", retry_after=5 if for_now else None)


def _why_it_stays[S](resident: Resident[S]) -> str:
    why = "pinned" if resident.spec.pinned else f"in use by {max(1, resident.holds)}"
    return f"{resident.spec.name!r} ({_shown(resident.size)}, {why})"


def _shown(size: int) -> str:
    return f"{size / _GIGABYTE:.1f} GB" if size >= _GIGABYTE / 10 else f"{size / 1e6:.3g} MB"


def told[S](spec: ModelSpec, resident: Resident[S] | None, epoch: float) -> ModelState:
    """Describe a model; `epoch` is what the clock has to be added to for seconds since 1970."""
    if resident is None:
        return ModelState(name=spec.name, state="unloaded", pinned=spec.pinned)
    load, used = resident.load, resident.used
    percents = {"ready": 100, "loading": load.percent if load else 0}
    return ModelState(
        name=spec.name,
        state=resident.state,
        percent=percents.get(resident.state, 0),
        in_use=resident.holds,
        pinned=spec.pinned,
        last_used=None if used is None else epoch + used,
        error=str(load.error) if load and load.error and resident.state == "failed" else None,
    )


def bare(error: BaseException, name: str) -> Exception:
    """Keep what an error says, and not the half-loaded model that its traceback leads to."""
    if isinstance(error, EngineError | ModelError):
        return again(error)
    log.error("Loading %s failed in a way that nobody foresaw.", name, exc_info=error)
    return EngineError(f"The model {name!r} could not be loaded; the server's log says why.")


def again(error: Exception) -> Exception:
    """Return an error like this one for another thread to raise."""
    try:
        return copy.copy(error)
    except Exception:  # one that cannot be made from its own arguments
        return EngineError(str(error))
