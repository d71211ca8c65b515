"""Where the reasoning goes in a chat reply: a field of its own, a block in the content, or nowhere.

Each format turns reasoning text into deltas. Knows settings.ReasoningFormat and nothing of events or chunks.
"""

from __future__ import annotations

import html
from typing import Any, Protocol

from mlx_backend.settings import ReasoningField, ReasoningFormat

type Delta = dict[str, Any]


class ReasoningDeltas(Protocol):
    """Writes the reasoning of one reply."""

    def feed(self, text: str) -> list[Delta]:
        """Write more reasoning."""
        ...

    def close(self) -> list[Delta]:
        """Write what ends it, if it was begun: an answer, a call or the end follows."""
        ...


def reasoning_deltas(fmt: ReasoningFormat, field: ReasoningField) -> ReasoningDeltas:
    """Return the writer for a format; `field` is the name of the field of its own."""
    match fmt:
        case ReasoningFormat.SEPARATE:
            return _Separate(field)
        case ReasoningFormat.THINK:
            return _Think()
        case ReasoningFormat.DETAILS:
            return _Details()
        case ReasoningFormat.HIDDEN | ReasoningFormat.RAW:  # raw has no reasoning events: all is content
            return _Hidden()


class _Separate:
    """A field of its own, or two, for clients that look for the other name."""

    def __init__(self, field: ReasoningField) -> None:
        both = (ReasoningField.REASONING_CONTENT, ReasoningField.REASONING)
        self._names = [str(name) for name in (both if field is ReasoningField.BOTH else (field,))]

    def feed(self, text: str) -> list[Delta]:
        return [dict.fromkeys(self._names, text)]

    def close(self) -> list[Delta]:
        return []


class _Hidden:
    def feed(self, _text: str) -> list[Delta]:
        return []

    def close(self) -> list[Delta]:
        return []


class _Block:
    """A block in the content. Each tag is a delta of its own; an open block is always closed."""

    opening: str
    closing: str

    def __init__(self) -> None:
        self._open = False

    def feed(self, text: str) -> list[Delta]:
        deltas = []
        if not self._open:
            self._open = True
            deltas.append({"content": self.opening})
        body = self.body(text)
        return [*deltas, {"content": body}] if body else deltas

    def close(self) -> list[Delta]:
        if not self._open:
            return []
        self._open = False
        return [{"content": rest} for rest in (self.rest(), self.closing) if rest]

    def body(self, text: str) -> str:
        raise NotImplementedError

    def rest(self) -> str:
        return ""


class _Think(_Block):
    """`<think>`. A tag spelt inside the reasoning would end the block early, so its `<` becomes `‹`."""

    opening = "<think>\n"
    closing = "\n</think>\n\n"
    _TAGS = ("<think", "</think")

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # the end of the text, if it may become a tag

    def body(self, text: str) -> str:
        text = self._held + text
        for tag in self._TAGS:
            text = text.replace(tag, "‹" + tag[1:])
        at = text.rfind("<")
        undecided = at >= 0 and any(tag.startswith(text[at:]) for tag in self._TAGS)
        self._held = text[at:] if undecided else ""
        return text[: len(text) - len(self._held)]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class _Details(_Block):
    """What Open WebUI writes itself: escaped, and every line quoted."""

    opening = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> '
    closing = "\n</details>\n\n"

    def body(self, text: str) -> str:
        return html.escape(text).replace("\n", "\n> ")
