"""Reasoning as Dify shows it: a thinking block inside the text.

Dify has no field for reasoning. Its pages and workflows look for exactly `<think>\\n…\\n</think>`: lower case, no
attributes, always closed, each tag in a chunk of its own. The workflows cut the block out by its tags. The page turns
the tags into an HTML element and hands the whole text to a Markdown renderer that reads HTML, so what stands in the
block can break it:

- HTML takes effect. `</think>` and `</details>` end the block; `<!--` or `<script>` swallow the rest, answer and all;
  of `List<int>` only `List` is left. Therefore a `<` that HTML would read gets an invisible character behind it.
  In the answer only what Dify would take for a tag of the block gets one.
- A code fence or a `$$` left open swallows the end of the block. Therefore it is closed first. Which fence is open is
  a matter of the page's reading: the element's first lines, up to the first blank one, are raw HTML, and a fence
  there is none.
- A table takes the line behind it for one more row, and the end of the block with it. Therefore a line that shows
  nothing follows a table.
- The answer's first lines would belong to that raw HTML too, and their list or table would stay unformatted.
  Therefore a blank line follows the block. Workflows strip it.
"""

from __future__ import annotations

import re

from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta

OPEN, CLOSE, GAP = "<think>\n", "\n</think>", "\n\n"

_UNSEEN = "\u200b"
_GUARD = f"<{_UNSEEN}"
_AFTER_TABLE = f"\n\n{_UNSEEN}"
_HTML = re.compile(r"<(?=[a-z/!?])", re.IGNORECASE)
_TAG = re.compile(r"<(?=/?think[\s>])", re.IGNORECASE)
_BEGUN_TAG = re.compile(r"</?(?:t(?:h(?:i(?:n(?:k)?)?)?)?)?\Z", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_FENCE = re.compile(r"( {0,3})(`{3,}(?!.*`)|~{3,}|\$\$(?!.*\$))(.*)")
_TABLE = re.compile(r"^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$", re.MULTILINE)


class ThinkBlockWriter:
    """Turns events into the pieces of text Dify gets, each piece a chunk of its own.

    A block opens with the first reasoning that is not blank (no empty blocks) and closes before anything else that is
    not blank. With `hidden`, reasoning is left out. With `exact`, the answer is data: not a character of it changes.
    """

    def __init__(self, *, hidden: bool = False, exact: bool = False) -> None:
        self.has_hidden_reasoning = False
        """Whether there was reasoning that was not shown."""
        self._hidden = hidden
        self._exact = exact
        self._open = False
        # Reasoning: white space, shown only if more follows, or a `<` whose next letter is not here.
        self._held = ""
        self._blank = ""  # the answer's white space behind an open block
        self._begun = ""  # the answer's end that may still become a tag
        self._block: list[str] = []

    def feed(self, event: Event) -> list[str]:
        """Return the pieces of one event."""
        match event:
            case ReasoningDelta(text):
                if self._hidden:
                    self.has_hidden_reasoning = self.has_hidden_reasoning or bool(text.strip())
                    return []
                return self._reasoning(text)
            case ContentDelta(text):
                return self._content(text)
            case _:
                return self.close()

    def close(self) -> list[str]:
        """Close an open block; also called at the end, before tool calls, and when the answer breaks off."""
        begun, self._begun = self._begun, ""
        return ([begun] if begun else []) + self._close_block()

    def _close_block(self) -> list[str]:
        self._blank = ""
        if not self._open:
            return []
        rest = self._held.rstrip()
        self._block.append(rest)
        rest += ending("".join(self._block))
        self._open, self._held, self._block = False, "", []
        return [rest, CLOSE] if rest else [CLOSE]

    def _content(self, text: str) -> list[str]:
        pieces: list[str] = []
        if self._open:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
            pieces = self._close_block()
            text = GAP + text.lstrip("\n")
        if not self._exact:
            text = self._begun + text
            begun = _BEGUN_TAG.search(text)
            # `<think` counts with the character behind it, which may be a space or the end of the tag.
            self._begun = begun[0] if begun else ""
            text = _TAG.sub(_GUARD, text.removesuffix(self._begun))
        return [*pieces, text] if text else pieces

    def _reasoning(self, text: str) -> list[str]:
        self._blank = ""
        pieces = [self._begun] if self._begun and text.strip() else []
        self._begun = "" if pieces else self._begun
        text = self._held + text
        if not self._open:
            text = text.lstrip()
        shown = text.removesuffix("<").rstrip()
        self._held = text[len(shown) :]
        if not text:
            return pieces
        if not self._open:
            pieces.append(OPEN)
        self._open = True
        if shown:
            shown = _HTML.sub(_GUARD, shown)
            self._block.append(shown)
            pieces.append(shown)
        return pieces


def remove_guards(text: str) -> str:
    """Take out the invisible characters again, for text that goes back to the model."""
    return text.removesuffix(_AFTER_TABLE).replace(_GUARD, "<")


def ending(block: str) -> str:
    """Return what has to follow a block's text so that the page sees the end of the block, or nothing."""
    if fence := open_fence(block):
        return fence
    last = _BLANK_LINE.split(block)[-1].strip("\n")
    return _AFTER_TABLE if "\n" in last and "|" in last and _TABLE.search(last) else ""


def open_fence(block: str) -> str:
    """Return the line that closes the code fence (or `$$`) still open at the end of a block, or nothing."""
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
    # With the opening line's indentation the fence is closed also inside a list, where none would open a new one.
    return f"\n{indent}{fence}" if fence else ""
