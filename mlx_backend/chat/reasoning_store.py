"""The reasoning behind tool calls, kept for clients that lose it between two rounds.

A model that calls a tool has reasoned first, and needs that reasoning with the tool's result. Many clients return
only the call. What all of them return is the call's id, so that is the key. An entry is needed for one round trip to
the tool, or as long as the conversation lasts where the model sees the reasoning of answered turns again; a lost entry
costs quality, not correctness.
"""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING

from mlx_backend.byte_cache import ByteCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.byte_cache import CacheBudget

_ENTRY_BYTES = 200  # of an entry, beside its texts


class ReasoningStore:
    """Tool-call id -> reasoning; the least recently used entries are evicted first. Safe to use from any thread."""

    def __init__(self, caches: CacheBudget | None = None) -> None:
        self._texts: ByteCache[str, str] = ByteCache(caches)

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Store the reasoning that preceded these calls; the calls of one message share it."""
        for call_id in call_ids:
            self._texts.put(call_id, reasoning, getsizeof(reasoning) + getsizeof(call_id) + _ENTRY_BYTES)

    def get(self, call_id: str) -> str | None:
        """Return a call's reasoning; None if it is unknown or was evicted."""
        return self._texts.find(call_id)

    def drop(self, call_ids: Iterable[str]) -> None:
        """Remove these calls: their turn has ended in an answer."""
        for call_id in call_ids:
            self._texts.drop(call_id)

    def __len__(self) -> int:
        return len(self._texts)
