"""The reasoning behind tool calls, kept for the clients that lose it between two rounds.

A model that calls a tool reasons first, and wants that reasoning back with the tool's result. Many clients
return only the call. The one thing all of them return is the call's id, so that is the key. The store is
small: an entry is needed for the one round trip to the tool, and a lost entry costs quality, not correctness.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ReasoningStore:
    """Tool-call id -> reasoning; the least recently used entries go first. Safe from any thread."""

    def __init__(self, entries: int = 512, characters: int = 8_000_000) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._entries = entries
        self._characters = characters
        self._held = 0

    def put(self, call_ids: Iterable[str], reasoning: str) -> None:
        """Remember what was thought before these calls (the calls of one message share it)."""
        with self._lock:
            for call_id in call_ids:
                self._pop(call_id)
                self._texts[call_id] = reasoning
                self._held += len(reasoning)
            while len(self._texts) > self._entries or self._held > self._characters:
                self._pop(next(iter(self._texts)))

    def get(self, call_id: str) -> str | None:
        """Look up one call; None if it is unknown or already forgotten."""
        with self._lock:
            if call_id in self._texts:
                self._texts.move_to_end(call_id)
            return self._texts.get(call_id)

    def drop(self, call_ids: Iterable[str]) -> None:
        """Forget these calls: their turn has ended in an answer."""
        with self._lock:
            for call_id in call_ids:
                self._pop(call_id)

    def __len__(self) -> int:
        return len(self._texts)

    def _pop(self, call_id: str) -> None:
        self._held -= len(self._texts.pop(call_id, ""))
