"""The queue between the thread that receives requests and the worker threads that answer them.

What comes next goes to the worker that became idle last. So a server that answers five requests at a time uses five of
its hundreds of threads, and not one after the other: each that is used keeps memory, its stack and what malloc holds
for it, as much as the largest request needed that it ever answered. Knows nothing of requests.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class WorkerQueue:
    """Has what cheroot uses of `queue.Queue`, without a limit of its own. Safe to use from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._items: deque[Any] = deque()
        self._idle: list[_IdleWorker] = []  # the one that waits longest first

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Hand an item to the worker that became idle last, or queue it for the next that asks. Never blocks."""
        with self._guard:
            if not self._idle:
                self._items.append(item)
                return
            worker = self._idle.pop()
        worker.item = item
        worker.has_item.release()

    def get(self) -> Any:
        """Return the next item; wait until there is one for this worker."""
        with self._guard:
            if self._items:
                return self._items.popleft()
            worker = _IdleWorker()
            self._idle.append(worker)
        worker.has_item.acquire()
        return worker.item

    def qsize(self) -> int:
        """Return how many items no worker has taken."""
        return len(self._items)


class _IdleWorker:
    __slots__ = ("has_item", "item")

    def __init__(self) -> None:
        self.item: Any = None
        self.has_item = threading.Lock()
        self.has_item.acquire()
