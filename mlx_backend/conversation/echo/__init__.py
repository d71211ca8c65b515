"""Parse what a client echoes as an assistant's text: what it was shown, or what it stored.

Clients send back raw Harmony (`harmony.py`), `<think>` or `<details>` blocks (`blocks.py`), or any of these cut in
half. Each is restored to the beginning its dialect expects and then parsed as a model's output is. An answer that
merely talks about markers or tags is left alone (`conversation/quoting.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.conversation.echo import blocks, harmony
from mlx_backend.conversation.echo.parts import Display, Echo, join_paragraphs

if TYPE_CHECKING:
    from mlx_backend.conversation.tools import ToolSet

__all__ = ["Display", "Echo", "parse_echo", "parse_reasoning"]

_MAX_WRAPPINGS = 16
_MAX_PARSED_AGAIN = 1 << 21
"""Characters, of one text and all its wrappings: what is longer than any answer is not taken apart again and again."""


def parse_echo(text: str, tools: ToolSet | None = None) -> list[Echo]:
    """Parse an assistant's text into its segments, in order (one, unless there are calls in between).

    What was echoed twice is wrapped twice: an answer is parsed again until nothing comes off it.
    """
    return _parse_wrapped(text, tools, 0)


def parse_reasoning(text: str) -> str:
    """Return the reasoning in the text of a reasoning field: servers leave the markup of the channel in it."""
    if not _may_hold_markup(text):
        return text
    for times in range(_MAX_WRAPPINGS):
        if times and not _may_parse_again(text, times):
            break
        if not (harmony.is_raw_harmony(text) or blocks.begins_with_block(text)):
            break
        bare = join_paragraphs([part for echo in parse_echo(text) for part in (echo.reasoning, echo.content)])
        if bare == text:
            break
        text = bare
    return text


def _may_hold_markup(text: str) -> bool:
    """Whether a text has what any markup begins with, or Harmony without its markers."""
    return "<" in text or "◁" in text or "[THINK]" in text or harmony.STRIPPED_SEAM in text


def _parse_wrapped(text: str, tools: ToolSet | None, depth: int) -> list[Echo]:
    if not _may_hold_markup(text):  # nearly every text of a long history
        return [Echo(content=text.lstrip("\n"))]
    segments: list[Echo] = []
    for echo in _parse_once(text, tools):
        if echo.content in ("", text) or not _may_parse_again(echo.content, depth + 1):
            segments.append(echo)
            continue
        first, *rest = _parse_wrapped(echo.content, tools, depth + 1)
        inner = [replace(first, reasoning=join_paragraphs([echo.reasoning, first.reasoning])), *rest]
        calls = (*inner[-1].tool_calls, *echo.tool_calls)
        segments += [*inner[:-1], replace(inner[-1], tool_calls=calls, display=echo.display)]
    return segments


def _may_parse_again(text: str, times: int) -> bool:
    """Whether a text that has been parsed so often is looked at once more."""
    return times <= _MAX_WRAPPINGS and times * len(text) <= _MAX_PARSED_AGAIN


def _parse_once(text: str, tools: ToolSet | None) -> list[Echo]:
    text = harmony.strip_end_markers(text)
    if harmony.is_raw_harmony(text):
        return harmony.parse_raw(text, tools)
    return blocks.parse_shown(text)
