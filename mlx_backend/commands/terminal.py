"""What a command shows: in colour on a terminal, plain where the output goes elsewhere, JSON where that is asked for.

rich decides about colour (NO_COLOR, FORCE_COLOR, TERM), and is loaded with the first thing that is drawn. What a
server, a model or a file says moves no cursor and colours nothing: control characters are written as escapes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_PIPE_COLUMNS = 4096
"""Where the output is no terminal, no line is folded."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with escapes, as JSON has them, for control characters and halves of surrogate pairs."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@functools.cache
def console(*, stderr: bool = False, folds: bool = True) -> Console:
    """Return where a command draws: standard output, or standard error. Strings are made printable; no markup.

    Without `folds` lines may be longer than the terminal is wide, which wraps them by itself.
    """
    from rich.console import Console

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    stream = sys.stderr if stderr else sys.stdout
    width = None if folds and stream.isatty() else _PIPE_COLUMNS
    return PrintableConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(printable(json.dumps(value, ensure_ascii=False, indent=2)))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their headings, in columns; numbers look best if the caller has written them with units.

    A terminal that is too narrow wraps its lines: a name is never cut, and can be copied.
    """
    _print_trimmed(table(head, rows), folds=False)


def table(head: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Return rows under their headings, in columns."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in head:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, value)
    _print_trimmed(table)


def _print_trimmed(table: Table, *, folds: bool = True) -> None:
    drawing = console(folds=folds)
    with drawing.capture() as captured:
        drawing.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def discard_output() -> None:
    """Discard what goes to standard output from now on, and what has not been written: nobody can read it.

    Python would write it at exit, and end with an error.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_interactive() -> bool:
    """Whether somebody sits there: both standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirmed(question: str) -> bool:
    """Ask a question that is answered by y or n; anything else, and the end of the input, is no."""
    try:
        return input(f"{printable(question)} [y/N] ").strip().casefold() in ("y", "yes")
    except EOFError:
        return False
