"""A thread whose `join` waits until the system's thread has ended, too, as every thread's does from Python 3.13 on.

What MLX keeps for a thread is freed after the last of its Python, under Python's lock. If the interpreter ends in that
moment, it ends the thread while it waits for the lock, and C++ aborts the process.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

MAX_SECONDS = 2.0
"""A thread that takes longer is not waited for."""
_LOOK_SECONDS = 0.002


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
