"""Ends an answer before the first stop word, for servers that look for them in the reasoning too, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.events import ContentDelta
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mlx_backend.conversation.events import Event


class StopWords:
    """Passes on an answer's events up to the first of some words. `reached` says that it came."""

    def __init__(self, words: Collection[str] = ()) -> None:
        self.reached = False
        self._words = MarkerSet(words)
        self._pending = ""

    def cut(self, events: Iterable[Event], *, is_end: bool = False) -> list[Event]:
        """Return what of the events stands before the word; what may become one is held back until the end."""
        kept: list[Event] = []
        for event in [*events, *([ContentDelta("")] if is_end else [])]:
            if not isinstance(event, ContentDelta):
                kept.append(event)
            elif not self.reached:
                before, word, self._pending = self._words.cut(self._pending + event.text, is_end=is_end)
                self.reached = bool(word)
                if before:
                    kept.append(ContentDelta(before))
        return kept
