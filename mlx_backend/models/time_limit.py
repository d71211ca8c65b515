"""A limit on the time of Python code that cannot be asked to stop, such as a chat template that others compiled.

Code in the block runs as fast as it does without: once the time is up, another thread raises an exception in the
block's, between two operations of Python. One operation that takes long in C is not interrupted.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TimeLimitExceeded(Exception):
    """The block took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[], None]]:
    """Raise TimeLimitExceeded within the block once so many seconds have passed. Blocks must not be nested.

    The block is given a function with which another thread ends it at once.
    """
    thread = threading.get_ident()
    block = _watchdog.add(thread, time.monotonic() + seconds)
    is_raised = False
    try:
        yield lambda: _watchdog.expire(thread, block)
    except TimeLimitExceeded:
        is_raised = True
        raise
    finally:
        if not _watchdog.remove(thread) and not is_raised:
            _await_exception()


@contextmanager
def interruptible(max_seconds: float = math.inf) -> Iterator[None]:
    """Within the block, raise what the current preparation's `check` raises, as soon as it would.

    TimeLimitExceeded if so many seconds have passed before. For code that holds no lock and leaves nothing half done.
    """
    preparation = current()
    preparation.check()
    try:
        with (
            time_limit(min(preparation.seconds_left, max_seconds)) as stop,
            preparation.cancelled_by(stop),
        ):
            yield
    except TimeLimitExceeded:
        preparation.check()
        raise


def _await_exception() -> None:
    """Take the exception that was raised when the block had just ended: it arrives a few operations later.

    It may also have arrived within the block, in code that catches everything: then nothing comes.
    """
    try:
        for _ in range(100):
            time.sleep(0.001)
    except TimeLimitExceeded:
        pass


class _Watchdog:
    """One thread for all blocks. It sleeps until the deadline that was the next when it fell asleep."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, float] = {}
        self._blocks: dict[int, object] = {}
        self._wakes_at = -math.inf  # until it runs
        self._is_started = False

    def add(self, thread: int, deadline: float) -> object:
        """Raise the exception in a thread at this time of time.monotonic, unless it is removed before.

        Returns what tells this block of the thread from its later ones.
        """
        block = object()
        with self._changed:
            self._deadlines[thread], self._blocks[thread] = deadline, block
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="time-limits", daemon=True).start()
            elif deadline < self._wakes_at:
                self._changed.notify()
        return block

    def expire(self, thread: int, block: object) -> None:
        """Raise the exception in a thread now, if it is still in this block."""
        with self._changed:
            if thread in self._deadlines and self._blocks[thread] is block:
                self._deadlines[thread] = -math.inf
                self._changed.notify()

    def remove(self, thread: int) -> bool:
        """Forget a thread; False if the exception has been raised in it."""
        with self._changed:
            self._blocks.pop(thread, None)
            return self._deadlines.pop(thread, None) is not None

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for thread in [each for each, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded)
                    )
                self._wakes_at = min(self._deadlines.values(), default=math.inf)
                self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)


_watchdog = _Watchdog()
