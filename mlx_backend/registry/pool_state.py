"""The entries of the model pool, and the one lock that guards them.

Every wait is on one of two conditions of that lock: `changed` (requests, the loader) and `unload_due` (the unloader).
The lock is never held while something slow runs: an entry that is being loaded or unloaded is marked as such, the lock
is released, and a request for that model waits for the mark to go.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from mlx_backend.registry.model_entry import LoadedService, ModelEntry

if TYPE_CHECKING:
    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.clock import Clock

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 256  # entries of models that are no longer in memory


class PoolState[S: LoadedService]:
    """Entries by model name. Except for `stop_engine`, call every method with the lock held."""

    def __init__(self, clock: Clock) -> None:
        # Reentrant: a forgotten lease is released by a finaliser, which may run in any thread at any moment.
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.unload_due = threading.Condition(lock)
        self.entries: dict[str, ModelEntry[S]] = {}
        self.clock = clock
        self.stopping = False

    def entry(self, spec: ModelSpec) -> ModelEntry[S]:
        """Return a model's entry, a new one if it has none; forget the oldest of too many unloaded ones."""
        entry = self.entries.get(spec.name)
        if entry is None:
            gone = [name for name, each in self.entries.items() if each.state in ("unloaded", "failed")]
            for name in gone[: max(0, len(gone) - _MAX_REMEMBERED)]:
                del self.entries[name]
            entry = self.entries[spec.name] = ModelEntry(spec)
        return entry

    def ready(self) -> list[ModelEntry[S]]:
        """Return the entries of models that are in memory and served."""
        return [entry for entry in self.entries.values() if entry.state == "ready"]

    def none_unloading(self) -> bool:
        """Whether no model is being unloaded."""
        return all(entry.state != "unloading" for entry in self.entries.values())

    def stop_engine(self, entry: ModelEntry[S], reason: str) -> None:
        """Unload a model that is marked as unloading. Call this without the lock: an engine may take its time."""
        service = entry.service
        assert service is not None
        try:
            service.engine.stop()
        except Exception:
            log.exception("The engine of %s could not be stopped cleanly.", entry.spec.name)
        with self.changed:
            entry.state, entry.service, entry.size, entry.draining = "unloaded", None, 0, False
            self.changed.notify_all()
        log.info("Unloaded %s, %s.", entry.spec.name, reason)
