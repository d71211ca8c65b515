"""One model's entry in the pool: its state, its leases, its load attempts, and when it is due to be unloaded.

    unloaded ──requested──▶ loading ──▶ ready ──idle, evicted, on request──▶ unloading ──▶ unloaded
                              └───▶ failed ──requested after the retry delay──▶ loading

Plain data. The lock that guards it belongs to `pool_state`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.registry.base import ModelStatus
from mlx_backend.registry.errors import copy_error

if TYPE_CHECKING:
    from mlx_backend.engine.base import EngineStatus
    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.base import ModelState

MIN_RETRY_DELAY = 1.0  # seconds between a failed load and the next; doubled for each further failure
MAX_RETRY_DELAY = 60.0


class ManagedEngine(Protocol):
    """The part of an engine that the pool needs."""

    def status(self) -> EngineStatus:
        """Return what it is doing."""
        ...

    def is_healthy(self) -> bool:
        """Whether requests are being served."""
        ...

    def stop(self) -> None:
        """Stop it and free its memory."""
        ...


class LoadedService(Protocol):
    """What loading returns: a service, or anything else around an engine."""

    @property
    def engine(self) -> ManagedEngine:
        """The engine behind it."""
        ...


@dataclass(slots=True, eq=False)
class LoadAttempt:
    """One attempt to load a model. Its waiters are counted, so that the model is not unloaded before they have it."""

    started_at: float | None = None  # of the download, or of the load; None: still queued behind another load
    stage: Literal["downloading", "loading"] = "loading"
    done: int = 0  # bytes that are downloaded, or loaded
    total: int = 0  # 0: not known
    percent: int = 0
    waiters: int = 0
    finished: bool = False
    error: Exception | None = None
    is_reported: bool = False  # by somebody who waits for it: what went wrong need not be logged

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
    """A model that has been requested at least once."""

    spec: ModelSpec
    state: Literal["unloaded", "loading", "ready", "unloading", "failed"] = "unloaded"
    service: S | None = None  # while ready or unloading
    attempt: LoadAttempt | None = None  # the latest
    size: int = 0  # bytes, while in memory
    leases: int = 0
    last_used: float | None = None  # when it was last loaded, leased or released
    draining: bool = False  # to be unloaded when its last reply has ended
    failures: int = 0  # in a row
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
        if self.spec.pinned or self.spec.ttl is None or self.last_used is None:
            return math.inf
        return self.last_used + self.spec.ttl

    def set_failed(self, now: float) -> None:
        """Record a failed load and set the earliest time for the next."""
        self.state = "failed"
        self.retry_at = now + min(MAX_RETRY_DELAY, MIN_RETRY_DELAY * 2**self.failures)
        self.failures = min(self.failures + 1, 16)

    def status(self) -> ModelStatus:
        """Return its status as the pool knows it; what its engine does is not included."""
        attempt = self.attempt
        state: ModelState = self.state
        percent = 100 if self.state == "ready" else 0
        done = total = 0
        if self.state == "loading" and attempt is not None:
            state, percent, done, total = attempt.stage, attempt.percent, attempt.done, attempt.total
        failed = attempt is not None and attempt.error is not None and self.state == "failed"
        return ModelStatus(
            name=self.spec.name,
            state=state,
            percent=percent,
            done=done,
            total=total,
            in_use=self.leases,
            pinned=self.spec.pinned,
            detail=str(attempt.error) if attempt is not None and failed else "",
        )
