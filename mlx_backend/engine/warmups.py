"""Prompts that are likely to come, prefilled while an engine has nothing else to do. Belongs to the engine thread."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from mlx_backend.engine.batch import Ended
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from mlx_backend.engine.batch import Batch, Outcome
    from mlx_backend.engine.jobs import Warmup

log = logging.getLogger(__name__)

MAX_WARMUPS = 16


class Warmups:
    """The warm-ups that wait, and the one that runs. No caller waits for any, so none fails anybody."""

    def __init__(self, batch: Batch) -> None:
        self.running: Warmup | None = None
        self._batch = batch
        self._waiting: deque[Warmup] = deque(maxlen=MAX_WARMUPS)

    @property
    def is_busy(self) -> bool:
        """Whether one runs or waits."""
        return self.running is not None or bool(self._waiting)

    def add(self, warmup: Warmup) -> None:
        """Queue one; the oldest of too many is dropped."""
        self._waiting.append(warmup)

    def start_next(self) -> None:
        """Start the next that has room, unless one runs."""
        while self._waiting and self.running is None:
            warmup = self._waiting.popleft()
            try:
                request = warmup.make_request()
                if self._batch.admits(request):
                    self._batch.insert(warmup.key, request)
                    self.running = warmup
            except Exception as error:
                log.debug("A warm-up was given up: %s", error)

    def preempt(self) -> None:
        """Take the one that runs out of the batch, to be started again."""
        warmup, self.running = self.running, None
        if warmup is not None:
            self._batch.remove(warmup.key)
            if len(self._waiting) < MAX_WARMUPS:
                self._waiting.appendleft(warmup)

    def is_outcome(self, key: int, outcome: Outcome) -> bool:
        """Whether an outcome belongs to the one that runs, which it may end."""
        if self.running is None or key != self.running.key:
            return False
        if isinstance(outcome, Ended | EngineError):
            self.running = None
        return True

    def clear(self) -> None:
        """Forget all of them; the batch is unloaded."""
        self._waiting.clear()
        self.running = None
