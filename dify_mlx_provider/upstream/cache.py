"""What the plugin remembers between calls, none of it for ever. Knows nothing of what it is.

`Kept`   answers that are asked for seldom: for a while, each asked for by one caller at a time
`Noted`  what was learnt on the way: until there is too much of it
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOLDS = 30.0
"""Seconds an answer, or none, is taken for the truth."""

MAX_KEPT = 64


class Kept[T]:
    """The answers of one kind of question. Safe between threads. `clock` says the time in seconds."""

    def __init__(
        self, holds: float = HOLDS, *, most: int = MAX_KEPT, clock: Callable[[], float] = time.monotonic
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
                if self._asking.get(key) is not asking:
                    return answer  # forgotten meanwhile: whoever asks from now on is to hear something newer
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
            self._asking.clear()

    def _known(self, key: str) -> tuple[T | None, bool]:
        with self._lock:
            until, known = self._answers.get(key, (0.0, None))
            return known, key in self._answers and self._clock() < until


class Noted[K, V]:
    """The latest note on each thing; the oldest notes go first. Safe between threads."""

    def __init__(self, *, most: int = 256) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._notes: dict[K, V] = {}

    def get(self, key: K, default: V) -> V:
        """Return what was noted."""
        with self._lock:
            return self._notes.get(key, default)

    def note(self, key: K, value: V) -> None:
        """Put it in the place of what was noted before."""
        with self._lock:
            self._notes.pop(key, None)
            self._notes[key] = value
            while len(self._notes) > self._most:
                del self._notes[next(iter(self._notes))]
