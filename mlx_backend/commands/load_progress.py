"""Shows people how far a download or a load is: one line that changes on a terminal, elsewhere a log line now and then.

Knows what the registry reports, and the time; nothing of what is loaded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_backend.models.folders import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.commands.output import StatusLine
    from mlx_backend.registry.base import ModelStatus

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
"""Seconds between two lines of the log."""
REDRAW_SECONDS = 0.1
RATE_SECONDS = 30.0
"""Seconds of the past from which the time left is estimated."""
BAR_CHARACTERS = 24
_VERBS = {"downloading": "Downloading", "loading": "Loading"}


class LoadProgressDisplay:
    """Called with each status of a model that is being loaded, from any thread."""

    def __init__(self, line: StatusLine | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`line` is that of a terminal; None: there is none."""
        self._line = line
        self._clock = clock
        self._lock = threading.Lock()
        self._models: dict[str, _Shown] = {}  # in the order in which they began

    def __call__(self, status: ModelStatus) -> None:
        """Show what is new, if it is time to. On a terminal, of several models the one that began first."""
        with self._lock:
            if status.state not in _VERBS:
                self._end(status.name)
                return
            now = self._clock()
            shown = self._models.get(status.name)
            if shown is None or shown.state != status.state:
                # A log gets no line of what is soon over.
                shown = self._models[status.name] = _Shown(
                    status.state, -math.inf if self._line is not None else now
                )
            elif now - shown.at >= (REDRAW_SECONDS if self._line is not None else LINE_SECONDS):
                shown.at = now
            else:
                return
            self._show(status, shown, now)

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        with self._lock:
            self._models.clear()
            if self._line is not None:
                self._line.show([])

    def _show(self, status: ModelStatus, shown: _Shown, now: float) -> None:
        shown.samples.append((now, status.done if status.total else status.percent))
        while shown.samples[-1][0] - shown.samples[0][0] > RATE_SECONDS:
            shown.samples.popleft()
        parts = [f"{status.percent} %"]
        if status.total:
            parts.append(f"{format_size(status.done)} of {format_size(status.total)}")
        if left := _time_left(status.total or 100, shown.samples):
            parts.append(f"{left} left")
        doing = f"{_VERBS[status.state]} {status.name}"
        if self._line is not None:
            if status.name != next(iter(self._models)):
                return
            bar = self._line.bar(status.percent / 100, BAR_CHARACTERS)
            texts = ", ".join(parts)
            self._line.show([f"{doing} {bar} {texts}", f"{doing} {texts}", f"{_VERBS[status.state]} {texts}"])
        elif len(shown.samples) > 1:
            log.info("%s: %s.", doing, ", ".join(parts))

    def _end(self, name: str) -> None:
        was_first = name == next(iter(self._models), None)
        self._models.pop(name, None)
        if was_first and self._line is not None:
            self._line.show([])


@dataclass(slots=True)
class _Shown:
    """What is shown of a model: what happens to it, and when that was last shown.

    `samples` are times, and the bytes, or the per cent, that were done then.
    """

    state: str
    at: float
    samples: deque[tuple[float, int]] = field(default_factory=deque)


def _time_left(total: int, samples: deque[tuple[float, int]]) -> str:
    """Return how long the rest takes at the present rate; empty if that cannot be known yet."""
    (began, before), (now, done) = samples[0], samples[-1]
    if done <= before or now <= began:
        return ""
    return format_seconds((total - done) * (now - began) / (done - before))


def format_seconds(seconds: float) -> str:
    """Write a time for people, in one or two units."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
