"""Time, and waiting for it, as an object: tests pass in a clock of their own."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can wait on a condition."""

    def now(self) -> float:
        """Return seconds since any fixed moment."""
        ...

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait on the held condition for at most `seconds` (may be infinite). May return early."""
        ...


class SystemClock:
    """The system's clock."""

    def now(self) -> float:
        """Return seconds since any fixed moment."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait on the held condition for at most `seconds`."""
        condition.wait(min(seconds, threading.TIMEOUT_MAX) if seconds < math.inf else None)
