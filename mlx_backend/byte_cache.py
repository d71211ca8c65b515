"""Caches that are bounded by the bytes of what they hold, since clients decide how large that is.

All caches of one `CacheBudget` share its bytes: what was used longest ago is evicted first, whichever of them holds it.
Knows nothing of what is cached, not even how large it is: the caller says.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from functools import cached_property
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

DEFAULT_BYTES = 64 << 20
MAX_SHARE = 0.5
"""The part of a budget that one cache may hold: a client that fills one leaves the others something."""


class CacheBudget:
    """How many bytes several caches may hold together. A callable is called when the bytes are first needed.

    What was used longest ago is evicted; with `from_largest`, that of the cache that holds most. A cache that is no
    longer referred to holds nothing.
    """

    def __init__(
        self, max_bytes: int | Callable[[], int] = DEFAULT_BYTES, *, from_largest: bool = False
    ) -> None:
        self._max_bytes = max_bytes
        self._from_largest = from_largest
        self._guard = threading.Lock()
        self._caches: WeakSet[ByteCache[Any, Any]] = WeakSet()
        self._uses = count()

    @cached_property
    def max_bytes(self) -> int:
        """What all caches may hold."""
        return self._max_bytes if isinstance(self._max_bytes, int) else self._max_bytes()

    @property
    def nbytes(self) -> int:
        """What all caches hold, as their users said."""
        with self._guard:
            return sum(cache.nbytes for cache in self._caches)

    def _join(self, cache: ByteCache[Any, Any]) -> threading.Lock:
        """Take a cache in; return the lock that guards what it holds."""
        with self._guard:
            self._caches.add(cache)
        return self._guard

    def _evict(self) -> None:
        """Evict what was used longest ago until all is within bounds. Call this with the lock held."""
        caches = list(self._caches)
        while sum(cache.nbytes for cache in caches) > self.max_bytes:
            largest = max(caches, key=lambda cache: cache.nbytes)
            oldest = min(caches, key=lambda cache: cache._oldest_use())
            (largest if self._from_largest else oldest)._drop_oldest()


class ByteCache[K: Hashable, V]:
    """Key -> value; the least recently used are evicted first. Safe to use from any thread.

    It holds at most `max_entries`. `owner_of` returns the owner of a key; with it, entries of the owner with the most
    bytes are evicted first, so that no owner can push out what others have.
    """

    def __init__(
        self,
        budget: CacheBudget | None = None,
        *,
        max_entries: float = inf,
        owner_of: Callable[[K], Hashable] = lambda key: None,
    ) -> None:
        self._budget = budget = budget or CacheBudget()
        self._max_entries = max_entries
        self._owner_of = owner_of
        self._bytes_of: Counter[Hashable] = Counter()
        self._entries: OrderedDict[K, _CachedValue[V]] = OrderedDict()
        self._being_made: dict[K, _Making] = {}
        self._bytes = 0
        self._guard = budget._join(self)

    def get(self, key: K, nbytes: int, make: Callable[[], V]) -> V:
        """Return a value, made if it is not there. It is kept if its `nbytes`, with the key's, are within bounds.

        It is made once, outside of every lock but its own: who wants another one never waits for it.
        """
        with self._guard:
            if (found := self._use(key)) is not None:
                return found.value
            making = self._being_made.setdefault(key, _Making())
            making.users += 1
        try:
            with making.lock:
                with self._guard:
                    if (found := self._use(key)) is not None:
                        return found.value
                value = make()
                self.put(key, value, nbytes)
                return value
        finally:
            with self._guard:
                making.users -= 1
                if not making.users:
                    self._being_made.pop(key, None)

    def find(self, key: K) -> V | None:
        """Return a value, which counts as used; None if it is not there."""
        with self._guard:
            found = self._use(key)
            return None if found is None else found.value

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Hold a value, in place of any that there is, if its `nbytes`, with the key's, are within bounds."""
        max_bytes = int(self._budget.max_bytes * MAX_SHARE)
        with self._guard:
            self._drop(key)
            if nbytes > max_bytes:
                return
            self._entries[key] = _CachedValue(value, nbytes, next(self._budget._uses))
            self._bytes += nbytes
            self._bytes_of[self._owner_of(key)] += nbytes
            while self._bytes > max_bytes or len(self._entries) > self._max_entries:
                self._drop_oldest()
            self._budget._evict()

    def __contains__(self, key: K) -> bool:
        """Whether there is a value, which does not count as used."""
        with self._guard:
            return key in self._entries

    def drop(self, key: K) -> None:
        """Forget a value, if it is there."""
        with self._guard:
            self._drop(key)

    def values(self) -> list[V]:
        """Return what is held, the least recently used first. None of it counts as used."""
        with self._guard:
            return [entry.value for entry in self._entries.values()]

    @property
    def nbytes(self) -> int:
        """The bytes of all that is held, as the callers said."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    # With the lock held.

    def _use(self, key: K) -> _CachedValue[V] | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            entry.used = next(self._budget._uses)
        return entry

    def _drop(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._bytes -= entry.nbytes
            self._bytes_of[owner := self._owner_of(key)] -= entry.nbytes
            if not self._bytes_of[owner]:
                del self._bytes_of[owner]

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._entries))
        if len(self._bytes_of) > 1:
            most = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next((key for key in self._entries if self._owner_of(key) == most), oldest)
        self._drop(oldest)

    def _oldest_use(self) -> float:
        return next(iter(self._entries.values())).used if self._entries else float("inf")


class _CachedValue[V]:
    __slots__ = ("nbytes", "used", "value")

    def __init__(self, value: V, nbytes: int, used: int) -> None:
        self.value = value
        self.nbytes = nbytes
        self.used = used


class _Making:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
