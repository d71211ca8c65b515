"""The console blocks of a Markdown page: what a reader would type, and what the page says comes back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Command:
    """One `$ …` line of a console block (continued lines joined), with the output printed below it."""

    line: str
    output: str


def commands(page: Path) -> list[Command]:
    """Every command of every ```console block, in the page's order."""
    found: list[Command] = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = part.splitlines()
            typed = [lines.pop(0)]
            while typed[-1].endswith("\\") or "\n".join(typed).count("'") % 2:
                typed.append(lines.pop(0))
            found.append(Command("\n".join(typed), "\n".join(lines).strip()))
    return found
