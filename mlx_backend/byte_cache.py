"""A cache that is bounded by the bytes of what it holds, since clients decide how large that is.

Knows nothing of what is cached, not even how large it is: the caller says.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class ByteCache[K: Hashable, V]:
    """Key -> value; the least recently used are evicted first. Safe to use from any thread.

    A value is made once, outside of every lock but its own: who wants another one never waits for it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._guard = threading.Lock()
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._being_made: dict[K, _Making] = {}
        self._bytes = 0

    def get(self, key: K, nbytes: int, make: Callable[[], V]) -> V:
        """Return a value, made if it is not there. It is kept if its `nbytes`, with the key's, are within bounds."""
        with self._guard:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            making = self._being_made.setdefault(key, _Making())
            making.users += 1
        try:
            with making.lock:
                with self._guard:
                    if key in self._values:
                        return self._values[key][0]
                value = make()
                self._keep(key, value, nbytes)
                return value
        finally:
            with self._guard:
                making.users -= 1
                if not making.users:
                    self._being_made.pop(key, None)

    @property
    def nbytes(self) -> int:
        """The bytes of all that is held, as the callers said."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._values)

    def _keep(self, key: K, value: V, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            return
        with self._guard:
            self._values[key] = value, nbytes
            self._bytes += nbytes
            while self._bytes > self._max_bytes:
                _, (_, evicted) = self._values.popitem(last=False)
                self._bytes -= evicted


class _Making:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
