"""The reasoning behind tool calls, kept for clients that lose it between two rounds.

A model that calls a tool has reasoned first, and needs that reasoning with the tool's result. Many clients return
only the call. What all of them return is the call's id, so that is the key. An entry is needed for one round trip to
the tool, or as long as the conversation lasts where the model sees the reasoning of answered turns again; a lost entry
costs quality, not correctness.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from sys import getsizeof
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ENTRIES = 4096
MAX_BYTES = 32 << 20


class ReasoningStore:
    """Tool-call id -> reasoning; the least recently used entries are evicted first. Safe to use from any thread."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Store the reasoning that preceded these calls; the calls of one message share it."""
        with self._lock:
            for call_id in call_ids:
                self._pop(call_id)
                self._texts[call_id] = reasoning
                self._bytes += getsizeof(reasoning)
            while len(self._texts) > self._max_entries or self._bytes > self._max_bytes:
                self._pop(next(iter(self._texts)))

    def get(self, call_id: str) -> str | None:
        """Return a call's reasoning; None if it is unknown or was evicted."""
        with self._lock:
            if call_id in self._texts:
                self._texts.move_to_end(call_id)
            return self._texts.get(call_id)

    def drop(self, call_ids: Iterable[str]) -> None:
        """Remove these calls: their turn has ended in an answer."""
        with self._lock:
            for call_id in call_ids:
                self._pop(call_id)

    def __len__(self) -> int:
        return len(self._texts)

    def _pop(self, call_id: str) -> None:
        text = self._texts.pop(call_id, None)
        if text is not None:
            self._bytes -= getsizeof(text)
