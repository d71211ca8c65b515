"""Ends an answer before the first of some texts: `stop` of a request. A text may begin in one piece and end in another.

What may still become one is held back until more of the answer comes, or anything else, which it stands before.
Reasoning and preambles are not looked at.
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
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mlx_backend.conversation.events import Event


class StopFilter:
    """Applies stop strings to the answer of one reply; `found` is the one that ended it.

    After a stop string there is no more content and no new tool call. Reasoning and the end still pass.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self.found = ""
        self._stops = MarkerSet(stops)
        self._held = ""
        self._open_calls: set[int] = set()

    def feed(self, events: Iterable[Event]) -> list[Event]:
        """Return the events to be shown. The end of a tool call that was cut off is not."""
        shown: list[Event] = []
        for event in events:
            if not isinstance(event, ContentDelta) and (rest := self._until_stop("", is_end=True)):
                shown.append(ContentDelta(rest))
            match event:
                case ContentDelta(text, Channel.FINAL):
                    if safe := self._until_stop(text):
                        shown.append(event if safe == text else ContentDelta(safe))
                case ContentDelta():
                    if not self.found:
                        shown.append(event)
                case ReasoningDelta() | StreamEnd():
                    shown.append(event)
                case ToolCallStart(index):
                    if not self.found:
                        self._open_calls.add(index)
                        shown.append(event)
                case ToolCallDelta(index):
                    if index in self._open_calls:
                        shown.append(event)
                case ToolCallEnd(index, complete):
                    if complete and index in self._open_calls:
                        shown.append(event)
        return shown

    def _until_stop(self, text: str, *, is_end: bool = False) -> str:
        if self.found:
            return ""
        before, self.found, self._held = self._stops.cut(self._held + text, is_end=is_end)
        return before
