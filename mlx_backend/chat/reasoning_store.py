"""The reasoning behind tool calls, kept for clients that lose it between two rounds.

A model that calls a tool has reasoned first, and needs that reasoning with the tool's result. Many clients return
only the call. What all of them return is the call's id, so that is the key. The store is small: an entry is needed for
one round trip to the tool, and a lost entry costs quality, not correctness.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ENTRIES = 512
MAX_CHARACTERS = 8_000_000


class ReasoningStore:
    """Tool-call id -> reasoning; the least recently used entries are evicted first. Safe to use from any thread."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_characters: int = MAX_CHARACTERS) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._max_entries = max_entries
        self._max_characters = max_characters
        self._characters = 0

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Store the reasoning that preceded these calls; the calls of one message share it."""
        with self._lock:
            for call_id in call_ids:
                self._pop(call_id)
                self._texts[call_id] = reasoning
                self._characters += len(reasoning)
            while len(self._texts) > self._max_entries or self._characters > self._max_characters:
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
        self._characters -= len(self._texts.pop(call_id, ""))
