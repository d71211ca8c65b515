"""A lock that is granted in the order it was asked for, so that models on one device alternate step by step."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A context manager. With `threading.Lock` the thread that has just released it could take it again at once."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiters: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiters.append(ticket)
        ticket.acquire()  # until the holder before us hands the lock over

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiters:
                self._waiters.popleft().release()
            else:
                self._held = False
