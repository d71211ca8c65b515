"""Reasoning as Dify shows it: a thinking block inside the text.

Dify has no field for reasoning. Its page and its workflows look for exactly `<think>\\n…\\n</think>`: lower case, no
attributes, always closed, each tag in a chunk of its own. Workflows cut the block out by its tags. The page turns the
tags into an HTML element and hands the whole text to a Markdown renderer that accepts HTML, so the text in the block
can break it:

- HTML takes effect. `</think>` and `</details>` end the block; `<!--` or `<script>` swallow the rest, answer and all;
  of `List<int>` only `List` is left. So a `<` that HTML would parse gets an invisible character after it. In the
  answer only what Dify would take for a tag of the block gets one.
- An open code fence or `$$` swallows the end of the block, so it is closed first. The element's first lines, up to the
  first blank one, are raw HTML to the page: a fence there does not count.
- A table takes the line after it for one more row, and the end of the block with it. So an invisible line follows it.
- The answer's first lines would belong to that raw HTML too, and a list or table there would stay unformatted. So a
  blank line follows the block. Workflows strip it.
- A block that begins in the middle of a line is no block to the page. So a blank line goes before it, unless it is the
  first thing that is shown. Dify shows the texts of an agent's rounds as one text, with nothing between them: `follows`
  is what the rounds before have shown, and the blank line then goes before an answer as well. It is taken out again
  when the round comes back in the history (`without_breaks`), because the model did not write it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

OPEN, CLOSE = "<think>\n", "\n</think>"

_PARAGRAPH_BREAK = "\n\n"
_UNSEEN = "\u200b"
_GUARD = f"<{_UNSEEN}"
_AFTER_TABLE = f"\n\n{_UNSEEN}"
_HTML = re.compile(r"<(?=[a-z/!?])", re.IGNORECASE)
_TAG = re.compile(r"<(?=/?think[\s>])", re.IGNORECASE)
_PARTIAL_TAG = re.compile(r"</?(?:t(?:h(?:i(?:n(?:k)?)?)?)?)?\Z", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_FENCE = re.compile(r"( {0,3})(`{3,}(?!.*`)|~{3,}|\$\$(?!.*\$))(.*)")
_TABLE = re.compile(r"^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$", re.MULTILINE)


class ThinkBlockWriter:
    """Turns events into pieces of text for Dify, each piece a chunk of its own.

    A block opens with the first reasoning that is not blank (no empty blocks) and closes before anything else that is
    not blank. With `hide_reasoning` there is no block. With `verbatim` the answer is data: not a character changes.
    """

    def __init__(self, *, hide_reasoning: bool = False, verbatim: bool = False, follows: str = "") -> None:
        self.has_reasoning = False
        """Whether there was reasoning, shown or not."""
        self.has_answer = False
        """Whether there was an answer that is not blank."""
        self.data: list[str] = []
        """The pieces of an answer that is data."""
        self._hides_reasoning = hide_reasoning
        self._is_verbatim = verbatim
        # The last characters that were shown, and whether a blank line goes before the next text.
        self._shown = "" if verbatim else follows[-2:]
        self._break_due = bool(self._shown)
        self._open = False
        # Of the reasoning: white space, shown only if more follows, or a `<` whose next letter is still to come.
        self._pending = ""
        # Of the answer: white space before its next text, and its end, which may still become a tag.
        self._pending_blanks = ""
        self._partial_tag = ""
        self._block: list[str] = []

    def feed(self, event: Event) -> list[str]:
        """Return the pieces for one event."""
        match event:
            case ReasoningDelta(text):
                self.has_reasoning = self.has_reasoning or bool(text.strip())
                return [] if self._hides_reasoning else self._note(self._reasoning(text))
            case ContentDelta(text):
                self.has_answer = self.has_answer or bool(text.strip())
                if self._is_verbatim:
                    self.data.append(text)
                return self._note(self._content(text))
            case _:
                return self.close()

    def close(self) -> list[str]:
        """Return what is pending and close the block: at the end, before tool calls, and if the answer breaks off."""
        partial, self._partial_tag = self._partial_tag, ""
        return self._note(([partial] if partial else []) + self._close_block())

    def _note(self, pieces: list[str]) -> list[str]:
        self._shown = (self._shown + "".join(pieces)[-2:])[-2:]
        return pieces

    def _close_block(self) -> list[str]:
        self._pending_blanks = ""
        if not self._open:
            return []
        rest = self._pending.rstrip()
        self._block.append(rest)
        rest += closing_lines("".join(self._block))
        self._open, self._pending, self._block = False, "", []
        self._break_due = True
        return [rest, CLOSE] if rest else [CLOSE]

    def _content(self, text: str) -> list[str]:
        pieces: list[str] = []
        if self._open or self._break_due:
            text = self._pending_blanks + text
            if not text.strip():
                self._pending_blanks = text
                return []
            pieces = self._close_block()
            text = missing_break(pieces[-1] if pieces else self._shown) + text.lstrip("\n")
            self._pending_blanks, self._break_due = "", False
        if not self._is_verbatim:
            text = self._partial_tag + text
            partial = _PARTIAL_TAG.search(text)
            # `<think` is a tag only with the character after it: a space or the end of the tag.
            self._partial_tag = partial[0] if partial else ""
            text = _TAG.sub(_GUARD, text.removesuffix(self._partial_tag))
        return [*pieces, text] if text else pieces

    def _reasoning(self, text: str) -> list[str]:
        self._pending_blanks = ""
        pieces = [self._partial_tag] if self._partial_tag and text.strip() else []
        self._partial_tag = "" if pieces else self._partial_tag
        text = self._pending + text
        if not self._open:
            text = text.lstrip()
        visible = text.removesuffix("<").rstrip()
        self._pending = text[len(visible) :]
        if not text:
            return pieces
        if not self._open:
            if line_break := missing_break(self._shown + "".join(pieces)):
                pieces.append(line_break)
            pieces.append(OPEN)
        self._open = True
        if visible:
            visible = _HTML.sub(_GUARD, visible)
            self._block.append(visible)
            pieces.append(visible)
        return pieces


def remove_guards(text: str) -> str:
    """Remove the invisible characters from text that goes back to the model."""
    return text.removesuffix(_AFTER_TABLE).replace(_GUARD, "<")


def closing_lines(block: str) -> str:
    """Return what must follow a block's text so that the page sees its end; usually nothing."""
    if fence := open_fence(block):
        return fence
    last = _BLANK_LINE.split(block)[-1].strip("\n")
    return _AFTER_TABLE if "\n" in last and "|" in last and _TABLE.search(last) else ""


def open_fence(block: str) -> str:
    """Return the line that closes a code fence (or `$$`) still open at the end of a block; "" if none is."""
    first_lines, *rest = _BLANK_LINE.split(block, maxsplit=1)
    fence = indent = ""
    for line in (rest[0] if rest else first_lines).split("\n"):
        mark = _FENCE.match(line)
        if mark is None:
            continue
        if not fence:
            indent, fence = mark[1], mark[2]
        elif mark[2].startswith(fence) and not mark[3].strip():
            fence = ""
    # With the opening line's indentation: inside a list, a fence without it would open a new one.
    return f"\n{indent}{fence}" if fence else ""


# -- an agent's rounds -----------------------------------------------------------------------------------------


def missing_break(shown: str) -> str:
    """Return what a shown text lacks of a blank line at its end; nothing if nothing was shown."""
    newlines = len(shown) - len(shown.rstrip("\n"))
    return _PARAGRAPH_BREAK[newlines:] if shown else ""


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
