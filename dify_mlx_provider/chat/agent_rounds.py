"""What an agent's rounds show one behind the other, and what comes back of it.

Dify shows the texts of an agent's rounds as one text, with nothing between: `text.<think>`, `</think><think>`. So a
round that follows a tool's result begins with a blank line (`ThinkBlockWriter`), and that line is taken out again when
the round comes back in the history, because the model did not write it. Knows no SDK: a message is its role and text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PARAGRAPH_BREAK = "\n\n"


def missing_break(shown: str) -> str:
    """Return what a shown text lacks of a blank line at its end; nothing if nothing was shown."""
    newlines = len(shown) - len(shown.rstrip("\n"))
    return PARAGRAPH_BREAK[newlines:] if shown else ""


def shown_before(messages: Sequence[tuple[str, str]]) -> str:
    """Return the text of the round before the one that answers these messages (role, text); "" if it is the first."""
    if not messages or messages[-1][0] != "tool":
        return ""
    for role, text in reversed(messages):
        if role == "user":
            break
        if role == "assistant" and text.strip():
            return text
    return ""


def without_breaks(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a history without the blank lines that were put between rounds."""
    cleaned: list[dict[str, Any]] = []
    shown, follows_result = "", False
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "assistant" and isinstance(text, str) and text.strip():
            if follows_result:
                message = {**message, "content": text.removeprefix(missing_break(shown))}
            shown = text
        elif role == "user":
            shown = ""
        follows_result = role == "tool"
        cleaned.append(message)
    return cleaned
