"""The table of `make matrix`: what was found of every architecture, in the README beside this file."""

from __future__ import annotations

import datetime
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from architecture_checks import CHECKS
from benchmarks.peers.report import README, machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MARKS: Final = (
    "<!-- architectures, {}: written by make matrix -->\n",
    "<!-- end of the architectures, {} -->",
)


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Say in a few lines what was found."""
    counts: Counter[str] = Counter()
    for each in results:
        for cell in each["checks"].values():
            counts.update({name: cell[name] for name in ("equal", "ties", "differ") if name in cell})
    together = Counter(
        "packed" if each["batching"] == "packed" else "one by one" for each in results if "batching" in each
    )
    total = sum(counts.values())
    lines = [
        f"{len(results)} architectures and variants: {counts['equal']:,} of {total:,} replies are equal, "
        f"{counts['ties']} differ where two tokens are equally likely, {counts['differ']} differ otherwise. Several at "
        f"once run packed in {together['packed']}, one by one in {together['one by one']}."
    ]
    for what, words in (
        ("crash", "ended by a crash"),
        ("missing", "without a tiny model"),
        ("unavailable", "not run on this machine"),
    ):
        if found := [each for each in results if what in each]:
            lines.append(
                f"- {len(found)} {words}: " + "; ".join(f"{each['name']} ({each[what]})" for each in found)
            )
    return "\n".join(lines)


def write_table(results: Sequence[dict[str, Any]], weights: str) -> None:
    """Write the table for one kind of weights into the README, in the place of an earlier one."""
    versions = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    commits = Counter(each["commit"] for each in results)
    code = " and ".join(f"{commit} ({number})" for commit, number in commits.items())
    about = f"{datetime.date.today()}, {machine()}, {versions}, {weights} weights; our code at {code}."
    table = "\n".join([about, "", summary(results), "", *_rows(results), "", *_notes(results)])
    begin, end = (mark.format(weights) for mark in MARKS)
    text = README.read_text()
    if begin not in text:
        text = f"{text.rstrip()}\n\n{begin}{end}\n"
    before, _, rest = text.partition(begin)
    README.write_text(before + begin + "\n" + table.rstrip() + "\n" + end + rest.partition(end)[2])


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| | several at once | " + " | ".join(CHECKS) + " |"
    yield "|--" * (len(CHECKS) + 2) + "|"
    for each in results:
        cells = [_cell(each["checks"].get(check)) for check in CHECKS]
        yield f"| {each['name']} | {_batching(each)} | " + " | ".join(cells) + " |"


def _batching(result: dict[str, Any]) -> str:
    for what, words in (("missing", "no tiny model"), ("unavailable", "not run"), ("crash", "crash")):
        if what in result:
            return words
    return "packed" if result["batching"] == "packed" else "one by one"


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if "refused" in cell:
        return "–"
    if "error" in cell:
        return "**error**"
    total = sum(cell.values())
    ties = f" ({cell['ties']} tied)" if cell["ties"] else ""
    text = f"{cell['equal']}/{total}{ties}"
    return f"**{text}**" if cell["differ"] else text


def _notes(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say why models are not packed, what is refused, and what went wrong, each text with those it is true of."""
    found: dict[str, list[str]] = {}
    for each in results:
        if each.get("batching", "packed") != "packed":
            found.setdefault(f"One by one: {each['batching']}", []).append(each["name"])
        for check, cell in each["checks"].items():
            for what, words in (("refused", "–"), ("error", "Error")):
                if what in cell:
                    text = cell[what].partition(": ")[2] if what == "refused" else f"{check}: {cell[what]}"
                    found.setdefault(f"{words}: {text}", []).append(each["name"])
    for text, names in sorted(found.items()):
        yield f"- {text.rstrip('.')}: {', '.join(dict.fromkeys(names))}."
