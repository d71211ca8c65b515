"""What an echoed text is parsed into."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.conversation.events import ToolCall


@dataclass(frozen=True, slots=True)
class Display:
    """A finished call as Open WebUI displays it inside an answer."""

    call: ToolCall
    result: str | None  # None: it never ended
    id: str = ""


@dataclass(frozen=True, slots=True)
class Echo:
    """One segment of an assistant's text. `display` is a displayed call that follows it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = field(default=())
    display: Display | None = None


def join_paragraphs(texts: Iterable[str]) -> str:
    """Join texts with an empty line between them, leaving out empty ones."""
    return "\n\n".join(text for text in texts if text)
