"""The parser that parses nothing, for plain completions and raw replies: all text is content, markers included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.events import ContentDelta, StreamEnd

if TYPE_CHECKING:
    from collections.abc import Container

    from mlx_backend.conversation.events import EndedBy, Event


class RawText:
    """Implements reply.py's `Parser`.

    With `special_tokens` the end token is left out, as a plain completion expects: a control token is shown
    only once something follows it. Without them everything is shown.
    """

    def __init__(self, special_tokens: Container[int] = ()) -> None:
        self.ended = self.is_reasoning = False
        self._special_tokens = special_tokens
        self._held = ""

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Return the text as content, but for a control token at its end."""
        shown = self._held + text
        self._held = ""
        if token in self._special_tokens:
            self._held = text
            shown = shown.removesuffix(text)
        return [ContentDelta(shown)] if shown else []

    def close(self, ended_by: EndedBy = "stop") -> list[Event]:
        """End the text. A control token at the token limit was not the end token, so it is shown."""
        shown: list[Event] = [ContentDelta(self._held)] if self._held and ended_by == "length" else []
        return [*shown, StreamEnd(ended_by)]
