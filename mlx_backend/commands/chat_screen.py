"""What is seen of one answer: reasoning while it comes, dim and in few lines; then the answer; then a line about it.

On a terminal the answer is Markdown. What is finished of it, up to the last block, is printed for good; the rest is
drawn anew as it grows, and what the model writes can neither move the cursor nor colour anything. Elsewhere the answer
is written as it comes, and nothing else. Knows no HTTP.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Self

from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from mlx_backend.commands.json_lines import write_text
from mlx_backend.commands.terminal import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import Console, ConsoleOptions, RenderableType

REASONING_ROWS = 8
REASONING_CHARACTERS = 4000
"""The end of the reasoning that is looked at for these rows."""
REFRESHES = 8
"""Times a second."""
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


class Screen:
    """One answer, from the request to its end."""

    def __init__(self) -> None:
        self._console = console()
        self._is_plain = not self._console.is_terminal
        self._live = Live(
            console=self._console, transient=True, refresh_per_second=REFRESHES, vertical_overflow="crop"
        )
        self._began = time.monotonic()
        self._reasoning = self._rest = ""
        self._reasoning_tokens = 0
        self._is_folded = self._has_printed = False
        self._finish_reason = ""

    def __enter__(self) -> Self:
        if not self._is_plain:
            self._live.start()
            self._draw(Spinner("dots", style="dim"))
        return self

    def __exit__(self, *_: object) -> None:
        """Print what was only drawn."""
        if self._is_plain:
            if self._has_printed:
                write_text("\n")
            return
        self._fold()
        self._live.stop()
        self._print_block(self._rest)
        self._rest = ""

    def show(self, delta: Mapping[str, Any], usage: Mapping[str, Any], finish_reason: str | None) -> None:
        """Show what has come: text of either kind, with the tokens so far."""
        self._finish_reason = finish_reason or self._finish_reason
        if reasoning := delta.get("reasoning_content"):
            self._reasoning += _harmless(reasoning)
            self._reasoning_tokens = usage.get("completion_tokens", 0)
            end = Text(self._reasoning[-REASONING_CHARACTERS:].lstrip(), style="dim italic")
            self._draw(_LastRows(end, REASONING_ROWS))
        if content := delta.get("content"):
            if self._is_plain:
                self._has_printed = True
                write_text(content)
                return
            self._fold()
            self._rest += _harmless(content)
            finished, self._rest = split_finished(self._rest)
            self._print_block(finished)
            self._draw(_LastRows(_markdown(self._rest), self._console.height - 2))

    def finish(self, event: Mapping[str, Any]) -> None:
        """Note what the last event says, for the line below the answer."""
        self._footer(_remarks(event, self._finish_reason))

    def stopped(self) -> None:
        """Say that the answer was ended."""
        self._footer(["stopped"])

    def _footer(self, remarks: list[str]) -> None:
        if not self._is_plain:
            self.__exit__()
            if remarks:
                self._console.print(" · ".join(remarks), style="dim")
            self._console.print()

    def _draw(self, what: RenderableType) -> None:
        if not self._is_plain:
            self._live.update(what)

    def _fold(self) -> None:
        """Put a line in place of the reasoning."""
        if self._is_folded or not self._reasoning.strip():
            return
        self._is_folded = True
        seconds = time.monotonic() - self._began
        self._draw("")
        self._console.print(
            Text(f"Reasoned for {seconds:.1f} s, {self._reasoning_tokens:,} tokens", style="dim italic")
        )
        self._console.print()

    def _print_block(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._has_printed = True
            self._console.print(_markdown(text))


def _remarks(event: Mapping[str, Any], finish_reason: str) -> list[str]:
    """Return what is worth knowing of an answer."""
    told, timings = event.get("reasoning") or {}, event.get("timings") or {}
    usage = event.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    speed = timings.get("predicted_per_second")
    return [
        *([f"effort {told['level']}"] if told.get("level") else []),
        *([f"{speed:.0f} tok/s"] if speed else []),
        *([f"{cached:,} cached"] if cached else []),
        *(["cut off at the most tokens it may have"] if finish_reason == "length" else []),
    ]


def split_finished(text: str) -> tuple[str, str]:
    """Split Markdown where what comes can no longer change what was before: after a blank line outside of a fence.

    A line that is indented may belong to the item of a list before the blank line.
    """
    fence, at, end = "", 0, 0
    was_blank = False
    for line in text.splitlines(keepends=True):
        if not fence and was_blank and line[:1].strip():
            end = at
        if found := _FENCE.match(line):
            fence = "" if fence and found[1].startswith(fence) else fence or found[1]
        was_blank = not line.strip() and line.endswith("\n")
        at += len(line)
    return text[:end], text[end:]


def _harmless(text: str) -> str:
    return _CONTROL_CHARACTERS.sub("", text)


def _markdown(text: str) -> Markdown:
    # What a link leads to is shown: an address that is hidden is one that nobody looks at.
    return Markdown(text, code_theme="ansi_dark", hyperlinks=False)


class _LastRows:
    """The last rows of something."""

    def __init__(self, what: RenderableType, rows: int) -> None:
        self._what = what
        self._rows = max(rows, 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        lines = console.render_lines(self._what, options.update(height=None), pad=False)
        for line in lines[-self._rows :]:
            # Without the blanks that fill it: the ^C that a terminal shows at its end would begin another row.
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()
