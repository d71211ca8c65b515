"""Answers that are asked for seldom: kept for a while by their key, each asked for by one caller at a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOLDS = 30.0
"""Seconds an answer, or none, is taken for the truth."""

MOST_KEPT = 64


class Kept[T]:
    """The answers of one kind of question. Safe between threads. `clock` says the time in seconds."""

    def __init__(
        self, holds: float = HOLDS, *, most: int = MOST_KEPT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._holds, self._most, self._clock = holds, most, clock
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Lock] = {}
        self._answers: dict[str, tuple[float, T | None]] = {}

    def get(self, key: str, ask: Callable[[], T | None]) -> T | None:
        """Return what is kept, or ask; an answer of None leaves what was known before."""
        known, fresh = self._known(key)
        if fresh:
            return known
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking:
            known, fresh = self._known(key)
            if fresh:
                return known
            answer = ask()
            answer = known if answer is None else answer
            with self._lock:
                self._answers.pop(key, None)
                self._answers[key] = (self._clock() + self._holds, answer)
                while len(self._answers) > self._most:
                    self._asking.pop(next(iter(self._answers)), None)
                    del self._answers[next(iter(self._answers))]
            return answer

    def forget(self) -> None:
        """Ask again at the next occasion."""
        with self._lock:
            self._answers.clear()

    def _known(self, key: str) -> tuple[T | None, bool]:
        with self._lock:
            until, known = self._answers.get(key, (0.0, None))
            return known, key in self._answers and self._clock() < until
