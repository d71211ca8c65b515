"""A parser that gives calls the names of tools that the client knows, where the model has others for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_backend.chat.reply import Parser
    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.tool_names import ToolNames


class RestoredNames:
    """Implements `Parser` over another one."""

    def __init__(self, parser: Parser, names: ToolNames) -> None:
        self._parser = parser
        self._names = names

    @property
    def ended(self) -> bool:
        """Nothing after this belongs to the reply."""
        return self._parser.ended

    @property
    def is_reasoning(self) -> bool:
        """Text that came next would be reasoning."""
        return self._parser.is_reasoning

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Parse more text."""
        return self._names.restored(self._parser.feed(text, token))

    def close(self, ended_by: EndedBy = "stop") -> list[Event]:
        """Parse the end; the last event is a StreamEnd."""
        return self._names.restored(self._parser.close(ended_by))
