"""Two bounded caches, safe to share between threads. They know nothing of what they hold.

`TtlCache`    values that are fetched: kept for a while, and fetched by one caller at a time
`BoundedMap`  values that are stored: kept until newer ones take their place
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_TTL = 30.0
"""Seconds a value, or a failure to get one, is kept."""

type Ttl[T] = Callable[[T | None], float]
"""Seconds to keep what a fetch returned; None is a failure."""

DEFAULT_MAX_ENTRIES = 64


class TtlCache[T]:
    """Values by key, each fetched again `ttl` seconds after it came. `clock` returns seconds.

    `ttl` may depend on the value: what a failure brought can be fetched again sooner.
    """

    def __init__(
        self,
        ttl: float | Ttl[T] = DEFAULT_TTL,
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl: Ttl[T] = ttl if callable(ttl) else lambda _: ttl
        self._max_entries, self._clock = max_entries, clock
        self._lock = threading.Lock()
        self._fetch_locks: dict[str, threading.Lock] = {}
        self._entries: dict[str, tuple[float, T | None]] = {}

    def get(self, key: str, fetch: Callable[[], T | None]) -> T | None:
        """Return the cached value, or fetch it. A fetch that returns None keeps the value known before."""
        value, is_fresh = self._lookup(key)
        if is_fresh:
            return value
        with self._lock:
            fetch_lock = self._fetch_locks.setdefault(key, threading.Lock())
        with fetch_lock:
            value, is_fresh = self._lookup(key)
            if is_fresh:
                return value
            fetched = fetch()
            ttl = self._ttl(fetched)
            value = value if fetched is None else fetched
            with self._lock:
                if self._fetch_locks.get(key) is not fetch_lock:
                    return value  # cleared meanwhile: later callers must get something newer
                self._entries.pop(key, None)
                self._entries[key] = (self._clock() + ttl, value)
                while len(self._entries) > self._max_entries:
                    self._fetch_locks.pop(next(iter(self._entries)), None)
                    del self._entries[next(iter(self._entries))]
            return value

    def clear(self) -> None:
        """Forget everything, also what is being fetched now."""
        with self._lock:
            self._entries.clear()
            self._fetch_locks.clear()

    def _lookup(self, key: str) -> tuple[T | None, bool]:
        with self._lock:
            expires, value = self._entries.get(key, (0.0, None))
            return value, key in self._entries and self._clock() < expires


class BoundedMap[K, V]:
    """The latest value of each key; the ones written longest ago are dropped first."""

    def __init__(self, *, max_entries: int = 256) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: dict[K, V] = {}

    def get(self, key: K, default: V) -> V:
        """Return the key's value."""
        with self._lock:
            return self._entries.get(key, default)

    def set(self, key: K, value: V) -> None:
        """Write the key's value."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            while len(self._entries) > self._max_entries:
                del self._entries[next(iter(self._entries))]
