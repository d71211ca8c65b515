"""Reasoning as Dify shows it: a thinking block inside the text.

Dify has no field for reasoning. Its pages and workflows look for exactly `<think>\\n…\\n</think>`: lower case, no
attributes, always closed, each tag in a chunk of its own. The workflows cut the block out by its tags. The page turns
the tags into an HTML element and hands the whole text to a Markdown renderer that reads HTML, so what stands in the
block can break it:

- HTML takes effect. `</think>` and `</details>` end the block; `<!--` or `<script>` swallow the rest, answer and all;
  of `List<int>` only `List` is left. Therefore a `<` that HTML would read gets an invisible character behind it.
- A code fence left open swallows the end of the block. Therefore it is closed first. Which fence is open is a matter
  of the page's reading: the element's first lines, up to the first blank one, are raw HTML, and a fence there is none.
- The answer's first lines would belong to that raw HTML too, and their list or table would stay unformatted.
  Therefore a blank line follows the block. Workflows strip it.
"""

from __future__ import annotations

import re

from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta

OPEN, CLOSE, GAP = "<think>\n", "\n</think>", "\n\n"

_GUARD = "<\u200b"
_HTML = re.compile(r"<(?=[a-z/!?])", re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_FENCE = re.compile(r"( {0,3})(`{3,}(?!.*`)|~{3,})(.*)")


class ThinkingText:
    """Turns events into the pieces of text Dify gets, each piece a chunk of its own.

    A block opens with the first reasoning that is not blank (no empty blocks) and closes before anything else. With
    `hidden`, reasoning is left out.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        self._hidden = hidden
        self._open = False
        self._held = (
            ""  # white space that is shown only if reasoning follows, or a `<` whose next letter is not here
        )
        self._block: list[str] = []

    def feed(self, event: Event) -> list[str]:
        """Return the pieces of one event."""
        match event:
            case ReasoningDelta(text):
                return [] if self._hidden else self._reasoning(text)
            case ContentDelta(text) if self._open:
                return [*self.close(), GAP + text.lstrip("\n")]
            case ContentDelta(text):
                return [text]
            case _:
                return self.close()

    def close(self) -> list[str]:
        """Close an open block; also called at the end, before tool calls, and when the answer breaks off."""
        if not self._open:
            return []
        rest = self._held.rstrip()
        self._block.append(rest)
        rest += open_fence("".join(self._block))
        self._open, self._held, self._block = False, "", []
        return [rest, CLOSE] if rest else [CLOSE]

    def _reasoning(self, text: str) -> list[str]:
        text = self._held + text
        if not self._open:
            text = text.lstrip()
        shown = text.removesuffix("<").rstrip()
        self._held = text[len(shown) :]
        if not text:
            return []
        pieces = [] if self._open else [OPEN]
        self._open = True
        if shown:
            shown = _HTML.sub(_GUARD, shown)
            self._block.append(shown)
            pieces.append(shown)
        return pieces


def unguarded(reasoning: str) -> str:
    """Take out the invisible characters again, for reasoning that goes back to the model."""
    return reasoning.replace(_GUARD, "<")


def open_fence(block: str) -> str:
    """Return the line that closes the code fence still open at the end of a block, or nothing."""
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
