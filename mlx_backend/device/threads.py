"""How threads that use MLX take turns, and how they end.

What MLX keeps for a thread is freed after the last of its Python, under Python's lock. If the interpreter ends in that
moment, it ends the thread while it waits for the lock, and C++ aborts the process. So `join` waits until the system's
thread has ended, too, as every thread's does from Python 3.13 on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

MAX_SECONDS = 2.0
"""A thread that takes longer is not waited for."""
_LOOK_SECONDS = 0.002


class FairLock:
    """A lock that is granted in the order it was asked for, so that models on one device alternate step by step.

    With `threading.Lock` the thread that has just released it could take it again at once.
    """

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


class NativeThread(threading.Thread):
    """A thread that may use MLX."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, on Linux also the system's, which only /proc shows; on a Mac this was not tried."""
        super().join(timeout)
        if self.is_alive():
            return
        task = Path(f"/proc/self/task/{self.native_id}")
        deadline = time.monotonic() + MAX_SECONDS
        while task.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
