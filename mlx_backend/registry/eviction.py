"""Which models to evict when another one needs their memory. A pure function over the pool's entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.device.memory import format_bytes
from mlx_backend.registry.errors import InsufficientMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.registry.model_entry import ModelEntry


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
        f"{entry.spec.name!r} ({format_bytes(entry.size)}, {_reason(entry)})" for entry in staying
    )
    return InsufficientMemory(
        f"{needs}. These models must stay in memory: {listed}.",
        retry_after=5 if size + pinned_size <= limit else None,
    )


def _reason[S](entry: ModelEntry[S]) -> str:
    return "pinned" if entry.spec.pinned else f"in use by {max(1, entry.leases)}"
