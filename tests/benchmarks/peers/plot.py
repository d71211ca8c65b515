"""Plots of the tables: each peer's figure as a multiple of ours. One has some rows, for the project's README; and each
table has one of its own, beside it.

Reads the tables in tests/benchmarks/README.md and nothing else, so that the plots always match them.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.peers.report import MORE_IS_BETTER, slug

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TABLES: Final = Path(__file__).resolve().parents[1] / "README.md"
PLOT: Final = Path(__file__).resolve().parents[3] / "docs" / "pictures" / "bench.svg"
TABLE_PLOTS: Final = TABLES.parent / "pictures"
OURS: Final = "mlx-backend"
COLOURS: Final = {"mlx_lm.server": "#d9822b", "mlx-vlm": "#2f9e8f", "Rapid-MLX": "#8a63d2"}
_SLOW: Final = "model slowed to 10 ms per step"
# The table a row is in (the beginning of its heading), the row (the beginning of its first cell), its label and a note.
ROWS: Final = (
    ("First token of B", "10 ms a step, alone", "first token, nothing else running", _SLOW),
    ("First token of B", "10 ms a step, A decodes", "first token, 1 reply running", _SLOW),
    ("First token of B", "10 ms a step, 8 decode", "first token, 8 replies running", _SLOW),
    ("A long prompt", "A's longest wait", "longest pause when 3,000 tokens arrive", _SLOW),
    ("What a server adds", "1 stream, JSON: time", "time per token, 1 reply, not streamed", ""),
    ("What a server adds", "8 streams, SSE: time", "time per token, 8 streams", ""),
    ("Many clients", "256 clients at once, SSE: seconds", "time until 256 clients are answered", ""),
    ("Prompt tokens", "turns 1, 2, 3 of a chat", "prompt tokens computed in 3 turns of a chat", ""),
    ("Memory", "seconds for those 500", "500 short requests, 4 at a time", ""),
    ("Memory", "resident memory", "memory after 20 requests", ""),
)
WIDTH: Final = 800
BACKGROUND: Final = "#fbfbfc"
LEFT, RIGHT, TOP, ROW_HEIGHT = 326, 24, 96, 40
LABEL_WIDTH: Final = 36  # of "2.06×"
MIN_RATIO, MAX_RATIO = 0.5, 16.0
LABEL_LENGTH: Final = 44  # characters of a line beside the plot
HEADINGS: Final = re.compile(r"^### (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One row of the plot: how it was measured, and each peer's multiple of our figure."""

    label: str
    date: str
    machine: str
    runs: str
    ratios: dict[str, float]


def rows(text: str) -> list[Row]:
    """Find the plot's rows in the tables; raise LookupError for one that is not there."""
    return [_row(text, *row) for row in ROWS]


def table_rows(text: str, heading: str) -> list[Row]:
    """Return the rows of a table that say how a peer compares with ours, where less is better."""
    about, header, table = _table(text, heading)
    if OURS not in header:
        return []
    runs = about[3] if len(about) > 3 else ""
    found = [
        Row(cells[0], about[0], ", ".join(about[1:3]), runs, _ratios(header, cells))
        for cells in table
        if len(cells) == len(header) and MORE_IS_BETTER not in cells[0]
    ]
    return [row for row in found if row.ratios]


def table_plots(text: str) -> dict[Path, str]:
    """Draw every table of the servers that has something to draw, by the files they belong into."""
    figures = text.partition("## All rows")[2]
    drawn = {heading: table_rows(figures, heading) for heading in HEADINGS.findall(figures)}
    return {plot_of(heading): draw(rows, heading) for heading, rows in drawn.items() if rows}


def plot_of(heading: str) -> Path:
    """Return the file of a table's plot."""
    return TABLE_PLOTS / f"{slug(heading)}.svg"


def _row(text: str, heading: str, what: str, label: str, note: str) -> Row:
    about, header, table = _table(text, heading)
    found = [cells for cells in table if cells[0].startswith(what)]
    if not found:
        raise LookupError(f"there is no row {what!r} in {heading!r}")
    runs = f"{note}, {about[3]}" if note else about[3]
    return Row(label, about[0], ", ".join(about[1:3]), runs, _ratios(header, found[0]))


def _table(text: str, heading: str) -> tuple[list[str], list[str], list[list[str]]]:
    """Return what is said above a table, its header and its rows."""
    section = re.search(rf"^### {re.escape(heading)}.*?\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise LookupError(f"there is no table {heading!r}")
    lines = section[1].splitlines()
    about = next(line for line in lines if line.endswith(".")).rstrip(".").split(", ")
    header, *table = [_cells(line) for line in lines if line.startswith("| ")]
    return about, header, table


def _ratios(header: Sequence[str], cells: Sequence[str]) -> dict[str, float]:
    figures = dict(zip(header[1:], cells[1:], strict=False))
    ratios = {name: _ratio(figures[name], figures[OURS]) for name in COLOURS if name in figures}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _ratio(theirs: str, ours: str) -> float | None:
    """Return the ratio that a cell gives; where it gives times of something else, the ratio of those."""
    if written := re.search(r"· ([\d.]+)×", theirs):
        return float(written[1])
    each = [re.match(r"\*{0,2}([\d.]+)×", cell) for cell in (theirs, ours)]
    if each[0] and each[1]:
        return round(float(each[0][1]) / float(each[1][1]), 2)
    return None


def draw(found: Sequence[Row], heading: str = "Other MLX servers") -> str:
    """Draw the rows under a heading."""
    height = TOP + ROW_HEIGHT * len(found) + 44
    dates = sorted({row.date for row in found})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    measured = f"{when}, {found[0].machine}, small demo model (make bench); not measured on a Mac yet"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        # A background of its own keeps it readable on light and dark pages alike.
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
        _text(20, 28, f"{heading}, as multiples of mlx-backend: lower is better", 16, bold=True),
        _text(20, 48, f"Measured {measured}", 12, colour="#5b6470"),
        *_legend(),
        *_axis(height),
    ]
    for at, row in enumerate(found):
        parts += _drawn_row(row, TOP + ROW_HEIGHT * at + ROW_HEIGHT / 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterable[str]:
    at = 20.0
    for name, colour in COLOURS.items():
        yield f'<circle cx="{at + 5:g}" cy="68" r="5" fill="{colour}"/>'
        yield _text(at + 15, 72, name, 12)
        at += 32 + 7.2 * len(name)


def _axis(height: int) -> Iterable[str]:
    bottom = height - 34
    ratio = MIN_RATIO
    while ratio <= MAX_RATIO:
        x, ours = _x(ratio), ratio == 1
        stroke = 'stroke="#2b3440" stroke-width="1.5"' if ours else 'stroke="#dfe3e8"'
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" {stroke}/>'
        label = f"1× = {OURS}" if ours else f"{ratio:g}×"
        yield _text(x, bottom + 18, label, 11, anchor="middle", bold=ours)
        ratio *= 2


def _drawn_row(row: Row, y: float) -> Iterable[str]:
    below = y + ROW_HEIGHT / 2
    yield f'<line x1="20" y1="{below:g}" x2="{WIDTH - RIGHT}" y2="{below:g}" stroke="#eef0f3"/>'
    first, *more = textwrap.wrap(row.label, LABEL_LENGTH, max_lines=2, placeholder=" …")
    yield _text(20, y - 8 if more else y - 1, first, 13)
    for line in more:
        yield _text(20, y + 5, line, 13)
    without = [name for name in COLOURS if name not in row.ratios]
    note = f"; {' and '.join(without)} did not answer all" if without else ""
    yield _text(20, y + 17 if more else y + 13, row.runs + note, 11, colour="#5b6470")
    last_above = last_below = -math.inf
    for name, ratio in sorted(row.ratios.items(), key=lambda pair: pair[1]):
        x, colour, label = _x(ratio), COLOURS[name], f"{ratio:.2f}×"
        yield f'<circle cx="{x:.1f}" cy="{y:g}" r="5" fill="{colour}"><title>{name}: {ratio:g}×</title></circle>'
        if x - last_above > LABEL_WIDTH:
            last_above = x
            yield _text(x, y - 8, label, 11, anchor="middle", colour=colour)
        elif x - last_below > LABEL_WIDTH:
            last_below = x
            yield _text(x, y + 16, label, 11, anchor="middle", colour=colour)
        else:
            yield _text(x + 9, y + 4, label, 11, colour=colour)


def _x(ratio: float) -> float:
    ratio = min(
        max(ratio, MIN_RATIO), MAX_RATIO
    )  # beyond the axis a circle stands at its end; its label says where
    share = math.log(ratio / MIN_RATIO) / math.log(MAX_RATIO / MIN_RATIO)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    *,
    anchor: str = "start",
    colour: str = "#1c2430",
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    halo = f' stroke="{BACKGROUND}" stroke-width="3" paint-order="stroke"'  # so that lines do not cross it
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}{halo}>'
        f"{html.escape(text, quote=False)}</text>"
    )


def write() -> None:
    """Draw what the tables say now."""
    text = TABLES.read_text(encoding="utf-8")
    for path, drawn in {PLOT: draw(rows(text)), **table_plots(text)}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
