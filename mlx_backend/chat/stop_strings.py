"""Stop strings: cut an answer at the first of several strings, wherever the deltas happen to be cut.

A delta may end in the middle of a stop string, so the longest suffix that may still become one is held back
and nothing more. Knows no channels and no tokens: the caller decides which text a stop string applies to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStrings:
    """`feed` text, get the text that is safe to show; `stopped` says that a stop string was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Return what may be shown now. After a stop string nothing is shown any more."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def close(self) -> str:
        """Return what was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
