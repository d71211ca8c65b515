"""The threads that answer requests, one request each at a time. Knows nothing of what answering is."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol

log = logging.getLogger(__name__)

OTHER_THREADS = 48
"""Threads that answer no request: of engines, loads, fetches of images and libraries."""


class Task(Protocol):
    """What a thread does next."""

    def service(self) -> None:
        """Do it."""
        ...

    def give_up(self) -> None:
        """End what waits for it: `service` has raised something."""
        ...


class Workers:
    """The threads that answer requests. What comes next goes to the one that became idle last.

    So a server that answers five requests at a time uses five of its hundreds of threads: each that is used keeps its
    stack and what malloc holds for it, as much as the largest request needed that it ever answered.
    """

    def __init__(self, count: int) -> None:
        self._guard = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._idle: list[SimpleQueue[Task | None]] = []  # the one that waits longest first
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"worker-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if the system allows no more."""
        for thread in self._threads:
            thread.start()

    def add_task(self, task: Task) -> None:
        """Have it done, now or when a thread is idle."""
        with self._guard:
            if not self._idle:
                self._tasks.append(task)
                return
            worker = self._idle.pop()
        worker.put(task)

    def stop(self, seconds: float) -> None:
        """End the threads. Those that do not notice, because foreign code computes in them, are not waited for."""
        with self._guard:
            self._is_stopped = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        mine: SimpleQueue[Task | None] = SimpleQueue()
        while True:
            with self._guard:
                task = self._tasks.popleft() if self._tasks else None
                if task is None and self._is_stopped:
                    return
                if task is None:
                    self._idle.append(mine)
            task = task or mine.get()
            if task is None:
                return
            try:
                task.service()
            except (
                BaseException
            ):  # whatever it is, the thread is needed and the client does not wait for ever
                log.exception("A request could not be answered")
                task.give_up()
            del task  # it would stay until the next


def check_room_for_threads() -> None:
    """Raise RuntimeError unless `OTHER_THREADS` can be started: better now than for a request."""
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait, daemon=True) for _ in range(OTHER_THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        is_over.set()
