"""Shows people how far a download or a load is: one line that changes on a terminal, elsewhere a log line now and then.

Knows what the registry reports, and the time; nothing of what is loaded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from mlx_backend.models.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.commands.output import StatusLine
    from mlx_backend.registry.base import ModelStatus

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0  # between two lines of the log
REDRAW_SECONDS = 0.1
RATE_SECONDS = 30.0  # that the time left is estimated from
BAR_CHARACTERS = 24
_VERBS = {"downloading": "Downloading", "loading": "Loading"}


class LoadProgressDisplay:
    """Called with each status of a model that is being loaded, from any thread."""

    def __init__(self, line: StatusLine | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`line` is that of a terminal; None: there is none."""
        self._line = line
        self._clock = clock
        self._lock = threading.Lock()
        self._showing = ("", "")  # the model and what happens to it
        self._shown_at = -math.inf
        self._samples: deque[tuple[float, int]] = deque()  # times, and bytes that were there

    def __call__(self, status: ModelStatus) -> None:
        """Show what is new, if it is time to."""
        with self._lock:
            if status.state not in _VERBS:
                self._end(status.name)
                return
            now = self._clock()
            if self._showing != (status.name, status.state):
                self._showing = (status.name, status.state)
                self._samples.clear()
                # A log gets no line of what is soon over.
                self._shown_at = -math.inf if self._line is not None else now
            elif now - self._shown_at >= (REDRAW_SECONDS if self._line is not None else LINE_SECONDS):
                self._shown_at = now
            else:
                return
            self._show(status, now)

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        with self._lock:
            self._end(self._showing[0])

    def _show(self, status: ModelStatus, now: float) -> None:
        self._samples.append((now, status.done))
        while self._samples[-1][0] - self._samples[0][0] > RATE_SECONDS:
            self._samples.popleft()
        parts = [f"{status.percent} %"]
        if status.total:
            parts.append(f"{format_size(status.done)} of {format_size(status.total)}")
        if left := self._time_left(status):
            parts.append(f"{left} left")
        doing = f"{_VERBS[status.state]} {status.name}"
        if self._line is not None:
            bar = self._line.bar(status.percent / 100, BAR_CHARACTERS)
            texts = ", ".join(parts)
            self._line.show([f"{doing} {bar} {texts}", f"{doing} {texts}", f"{_VERBS[status.state]} {texts}"])
        elif len(self._samples) > 1:
            log.info("%s: %s.", doing, ", ".join(parts))

    def _time_left(self, status: ModelStatus) -> str:
        """Return how long the rest takes at the present rate; empty if that cannot be known yet."""
        (began, before), (now, done) = self._samples[0], self._samples[-1]
        if done <= before or now <= began or not status.total:
            return ""
        return format_seconds((status.total - done) * (now - began) / (done - before))

    def _end(self, name: str) -> None:
        if self._showing[0] == name:
            self._showing = ("", "")
            if self._line is not None:
                self._line.show([])


def format_seconds(seconds: float) -> str:
    """Write a time for people, in one or two units."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
