"""Stop strings: end an answer at the first of several strings, however the text is split into deltas.

A delta may end in the middle of a stop string, so the longest suffix that may still become one is held back,
and nothing more. `StopStrings` knows text alone; `StopFilter` knows which events a stop string applies to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_backend.conversation.events import Event


class StopStrings:
    """`feed` text and get the text that is safe to show; `stopped` says that a stop string was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Return what can be shown now: nothing, once a stop string was found."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def close(self) -> str:
        """Return what was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


class StopFilter:
    """Applies stop strings to the answer of one reply and to nothing else.

    After a stop string there is no more content and no new tool call. Reasoning and the end still pass.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._text = StopStrings(stops)
        self._open_calls: set[int] = set()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._text.stopped

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """Return the events to be shown. The end of a tool call that was cut off is not."""
        shown: list[Event] = []
        for event in events:
            match event:
                case ContentDelta(text, Channel.FINAL):
                    if safe := self._text.feed(text):
                        shown.append(event if safe == text else ContentDelta(safe))
                case ContentDelta():
                    if not self.stopped:
                        shown.append(event)
                case ReasoningDelta():
                    shown.append(event)
                case ToolCallStart(index):
                    if not self.stopped:
                        self._open_calls.add(index)
                        shown.append(event)
                case ToolCallDelta(index):
                    if index in self._open_calls:
                        shown.append(event)
                case ToolCallEnd(index, complete):
                    if complete and index in self._open_calls:
                        shown.append(event)
                case StreamEnd():
                    if held := self._text.close():
                        shown.append(ContentDelta(held))
                    shown.append(event)
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
