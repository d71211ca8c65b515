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
from dataclasses import dataclass
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
    block = _watchdog.add(threading.get_ident(), time.monotonic() + seconds)
    is_raised = False
    try:
        yield lambda: _watchdog.expire(block)
    except TimeLimitExceeded:
        is_raised = True
        raise
    finally:
        if not _watchdog.remove(block) and not is_raised:
            _await_exception(block)


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


@dataclass(eq=False, slots=True)
class _Block:
    """One thread's run of a block."""

    thread: int
    deadline: float  # of time.monotonic
    is_interrupted: bool = False  # the exception has been raised in the thread, and may not have arrived


def _await_exception(block: _Block) -> None:
    """Take the exception that is raised when the block has just ended: it arrives a few operations later.

    It may also have arrived within the block, in code that catches everything: then nothing comes.
    """
    try:
        while not block.is_interrupted:
            time.sleep(0.001)
        for _ in range(100):
            time.sleep(0.001)
    except TimeLimitExceeded:
        pass


class _Watchdog:
    """One thread for all blocks. It sleeps until the deadline that was the next when it fell asleep.

    A thread takes no lock while the exception may arrive in it: it could arrive when the lock has been taken and before
    there is anything that gives it back. So a block is removed without one, by one operation of a dictionary.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[int, _Block] = {}  # by thread
        self._wakes_at = -math.inf  # until it runs
        self._is_started = False

    def add(self, thread: int, deadline: float) -> _Block:
        """Raise the exception in a thread at this time of time.monotonic, unless the block is removed before."""
        block = _Block(thread, deadline)
        with self._changed:
            self._blocks[thread] = block
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="time-limits", daemon=True).start()
            elif deadline < self._wakes_at:
                self._changed.notify()
        return block

    def expire(self, block: _Block) -> None:
        """Raise the exception in a block's thread now, if it is still in the block."""
        with self._changed:
            block.deadline = -math.inf
            self._changed.notify()

    def remove(self, block: _Block) -> bool:
        """Forget a block; False if the exception has been raised in its thread, or is about to be."""
        return self._blocks.get(block.thread) is block and self._blocks.pop(block.thread, None) is not None

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for block in list(self._blocks.values()):
                    if block.deadline <= now and self._blocks.pop(block.thread, None) is not None:
                        _interrupt(block.thread)
                        block.is_interrupted = True
                self._wakes_at = min(
                    (each.deadline for each in list(self._blocks.values())), default=math.inf
                )
                self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)


def _interrupt(thread: int) -> None:
    """Raise the exception in another thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded))


_watchdog = _Watchdog()
