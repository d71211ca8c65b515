"""A limit on the time of Python code that cannot be asked to stop, such as a chat template that others compiled.

Code in the block runs as fast as it does without: once the time is up, another thread raises an exception in the
block's, between two operations of Python. One operation that takes long in C is not interrupted.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TimeLimitExceeded(Exception):
    """The block took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[], None]]:
    """Raise TimeLimitExceeded within the block once so many seconds have passed.

    The block is given a function with which another thread ends it at once. Of blocks within each other, each has its
    own limit; the exception of an outer one passes through those within it, and is raised once.
    """
    block = _Block(threading.get_ident(), time.monotonic() + seconds)
    is_raised = False
    try:
        _watchdog.add(block)
        yield lambda: _watchdog.expire(block)
    except TimeLimitExceeded as error:
        is_raised = type(error) is block.exception
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
    exception: type[TimeLimitExceeded] | None = None  # a class of its own, once it is raised in the thread,
    is_interrupted: bool = False  # and has been raised, though it may not have arrived


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

    A thread takes no lock while an exception may arrive in it: it could arrive when the lock has been taken and before
    there is anything that gives it back. So blocks are added and removed by one operation of a dictionary, and the
    watchdog is woken by one of a queue.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by their ids
        self._changes: SimpleQueue[None] = SimpleQueue()
        self._wakes_at = math.inf  # also while it is not known: then it is woken for every block
        self._starting = (
            threading.Lock()
        )  # never taken again once it has started, before which nothing can arrive
        self._is_started = False

    def add(self, block: _Block) -> None:
        """Interrupt a block when its time is up, unless it is removed before."""
        if not self._is_started:
            with self._starting:
                if not self._is_started:
                    threading.Thread(target=self._run, name="time-limits", daemon=True).start()
                    self._is_started = True
        self._blocks[id(block)] = block
        if block.deadline < self._wakes_at:
            self._changes.put(None)

    def expire(self, block: _Block) -> None:
        """Interrupt a block now, if its thread is still in it."""
        block.deadline = -math.inf
        self._changes.put(None)

    def remove(self, block: _Block) -> bool:
        """Forget a block; False if the exception has been raised in its thread, or is about to be."""
        return self._blocks.pop(id(block), None) is not None

    def _run(self) -> None:
        while True:
            self._wakes_at = math.inf
            now = time.monotonic()
            for block in list(self._blocks.values()):
                if block.deadline <= now and self._blocks.pop(id(block), None) is not None:
                    block.exception = type("TimeLimitExceeded", (TimeLimitExceeded,), {})
                    _interrupt(block.thread, block.exception)
                    block.is_interrupted = True
            self._wakes_at = min((each.deadline for each in list(self._blocks.values())), default=math.inf)
            seconds = None if self._wakes_at == math.inf else max(0.0, self._wakes_at - time.monotonic())
            with suppress(Empty):
                self._changes.get(timeout=seconds)


def _interrupt(thread: int, exception: type[TimeLimitExceeded]) -> None:
    """Raise an exception in another thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


_watchdog = _Watchdog()
