"""A limit on the time of Python code that cannot be asked to stop, such as a chat template that others compiled.

Code in the block costs nothing more than it does without: an exception is raised in its thread from outside once the
time is up, between two operations of Python. One operation that takes long in C is not interrupted.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class TimeLimitExceeded(Exception):
    """The block took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitExceeded within the block once so many seconds have passed. Blocks must not be nested."""
    thread = threading.get_ident()
    lock = threading.Lock()
    is_over = has_fired = False

    def fire() -> None:
        nonlocal has_fired
        with lock:
            if not is_over:
                has_fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded)
                )

    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()
    is_raised = False
    try:
        yield
    except TimeLimitExceeded:
        is_raised = True
        raise
    finally:
        timer.cancel()
        with lock:
            is_over = True
        if has_fired and not is_raised:
            _await_exception()


def _await_exception() -> None:
    """Take the exception that was raised when the block had just ended: it arrives a few operations later."""
    try:
        while True:
            time.sleep(0.001)
    except TimeLimitExceeded:
        pass
