"""The thread that unloads models: idle ones when their time to live is over, drained ones after their last reply."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from mlx_backend.registry.model_entry import LoadedService, ModelEntry

if TYPE_CHECKING:
    from mlx_backend.registry.pool_state import PoolState


class Unloader[S: LoadedService]:
    """Unloads each model when it is due. The thread starts with the first model that can become due."""

    def __init__(self, state: PoolState[S]) -> None:
        self._state = state
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look again for what is due; call this with the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="model-unloader", daemon=True)
            self._thread.start()
        self._state.unload_due.notify()

    def join(self, timeout: float | None) -> None:
        """Wait for the thread to end, once the pool is stopping."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._next_due()) is not None:
            self._state.stop_engine(entry, "as requested" if entry.draining else "after being idle")

    def _next_due(self) -> ModelEntry[S] | None:
        """Wait for a model to be due and mark it as unloading; None when the pool stops."""
        state = self._state
        with state.unload_due:
            while not state.stopping:
                first = min(state.entries.values(), key=ModelEntry.unload_at, default=None)
                left = math.inf if first is None else first.unload_at() - state.clock.now()
                if first is not None and left <= 0:
                    first.state = "unloading"
                    return first
                state.clock.wait(state.unload_due, left)
            return None
