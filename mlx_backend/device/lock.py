"""A lock that is given in the order it was asked for: engines that share a device take turns, step by step."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """Use it as a context. Python's own lock would let the thread that just left enter again at once."""

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._taken = False
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._door:
            if not self._taken:
                self._taken = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._line.append(ticket)
        ticket.acquire()  # until whoever is before us calls

    def __exit__(self, *_: object) -> None:
        with self._door:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False
