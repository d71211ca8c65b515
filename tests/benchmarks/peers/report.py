"""Figures: printed as lines, saved in a file from run to run, and written into the README as tables."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.peer_environments import HOME

if TYPE_CHECKING:
    from collections.abc import Sequence

FIGURES_FILE: Final = HOME / "figures.json"
README: Final = Path(__file__).resolve().parents[1] / "README.md"
MORE_IS_BETTER: Final = "more is better"
BEGIN, END = "<!-- figures: written by bench_peers.py --write -->\n", "<!-- end of the figures -->"


@dataclass(frozen=True)
class Figure:
    """One system's result: as people read it, and as the number that is compared."""

    text: str
    value: float | None = None


@dataclass
class Line:
    """One thing measured on every system."""

    row: str
    what: str
    better: Literal["less", "more"] = "less"
    figures: dict[str, Figure] = field(default_factory=dict)
    note: str = ""
    compared: bool = True

    def add(self, name: str, figure: Figure) -> None:
        """Add a system's figure."""
        self.figures[name] = figure

    def ratio(self, name: str, ours: str) -> float | None:
        """Return this system's figure as a multiple of ours."""
        mine, theirs = self.figures.get(ours), self.figures[name]
        if (
            not self.compared
            or mine is None
            or not mine.value
            or mine.value < 0
            or theirs.value is None
            or theirs.value <= 0
        ):
            return None
        return theirs.value / mine.value

    def leaders(self) -> set[str]:
        """Name the systems with the best figure; none, if all are equal."""
        values = {name: figure.value for name, figure in self.figures.items() if figure.value is not None}
        if len(set(values.values())) < 2:
            return set()
        best = (min if self.better == "less" else max)(values.values())
        return {name for name, value in values.items() if value == best}


def spread(values: Sequence[float], unit: str = "ms", scale: float = 1000) -> Figure:
    """Return the median, with the smallest and the largest."""
    median, smallest, largest = (f(values) * scale for f in (statistics.median, min, max))
    digits = 0 if median >= 10 else 2
    return Figure(f"{median:.{digits}f} {unit} ({smallest:.{digits}f}-{largest:.{digits}f})", median)


def print_line(line: Line, ours: str) -> None:
    """Print a line for each system."""
    print(f"\n[{line.row}] {line.what}" + (f"  ({line.note})" if line.note else ""))
    for name, figure in line.figures.items():
        ratio = line.ratio(name, ours)
        print(f"    {name:28} {figure.text:32} {'' if ratio is None else f'{ratio:6.2f} x ours'}", flush=True)


def save_row(row: str, lines: list[Line], about: str) -> None:
    """Save a row's lines, replacing those of an earlier run."""
    saved = json.loads(FIGURES_FILE.read_text()) if FIGURES_FILE.exists() else {}
    saved[row] = {"about": about, "lines": [asdict(line) for line in lines]}
    FIGURES_FILE.parent.mkdir(exist_ok=True)
    FIGURES_FILE.write_text(json.dumps(saved, indent=1))


def write_tables(titles: dict[str, str], ours: str, columns: Sequence[str]) -> None:
    """Write everything saved into the README, as tables."""
    saved = json.loads(FIGURES_FILE.read_text()) if FIGURES_FILE.exists() else {}
    text = []
    for row, title in titles.items():
        if row not in saved:
            continue
        lines = [
            Line(**{**line, "figures": {name: Figure(**figure) for name, figure in line["figures"].items()}})
            for line in saved[row]["lines"]
        ]
        names = [name for name in columns if any(name in line.figures for line in lines)]
        text += [f"### {title}", "", f"{saved[row]['about']}.", ""]
        if any(line.ratio(name, ours) is not None for line in lines for name in names if name != ours):
            text += [f"![{title}, as multiples of {ours}](pictures/{slug(title)}.svg)", ""]
        text += ["| | " + " | ".join(names) + " |", "|--" * (len(names) + 1) + "|"]
        for line in lines:
            leaders = line.leaders()
            cells = []
            for name in names:
                figure = line.figures.get(name)
                if figure is None:
                    cells.append("")
                    continue
                ratio = line.ratio(name, ours) if name != ours else None
                cell = f"**{figure.text}**" if name in leaders else figure.text
                cells.append(cell + ("" if ratio is None else f" · {ratio:.2f}×"))
            what = line.what + (f" ({line.note})" if line.note else "")
            what += f" ({MORE_IS_BETTER})" if line.better == "more" and line.compared else ""
            text.append(f"| {what} | " + " | ".join(cells) + " |")
        text.append("")
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(text) + END + rest.partition(END)[2])


def slug(title: str) -> str:
    """Return a title as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def machine() -> str:
    """Describe this machine."""
    return f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}"
