"""The fenced blocks of a Markdown page: what a reader would type or send, and what the page says comes back.

```console    `$ …` lines are commands, what follows each is its output
```json       fields of a chat request
```python     a program; `# …` after a print is what it prints
```toml       a models file
```sh         commands that need a network, several machines, or would change the clone: not run
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_GAP = "…"  # in printed output: any text


@dataclass(frozen=True)
class Command:
    """One `$ …` line of a console block (continued lines joined), with the output printed below it."""

    line: str
    output: str


def blocks(page: Path, language: str) -> list[str]:
    """The contents of every block in this language, in the page's order; those in lists are unindented."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands(page: Path) -> list[Command]:
    """Every command of every console block."""
    found: list[Command] = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            typed = [lines.pop(0)]
            while typed[-1].endswith("\\") or "\n".join(typed).count("'") % 2:
                typed.append(lines.pop(0))
            found.append(Command("\n".join(typed), "\n".join(lines).strip()))
    return found


def differences(printed: str, actual: str) -> list[str]:
    """What a page prints otherwise than a command did. JSON may be shortened; `…` stands for any text."""
    if printed.startswith("{"):
        return list(_differences(json.loads(printed), json.loads(actual), "$"))
    lines = [line.strip() for line in actual.splitlines()]
    return [line for line in printed.splitlines() if not any(_is_like(line, one) for one in lines)]


def _differences(printed: Any, actual: Any, where: str) -> list[str]:
    match printed, actual:
        case {}, {}:
            missing = [f"{where}.{key} is missing" for key in printed.keys() - actual.keys()]
            both = printed.keys() & actual.keys()
            return missing + [
                text for key in both for text in _differences(printed[key], actual[key], f"{where}.{key}")
            ]
        case [*some], [*all_of_them] if some == [_GAP]:
            return [] if all_of_them else [f"{where} is empty"]
        case [*some], [*all_of_them] if len(some) == len(all_of_them):
            pairs = enumerate(zip(some, all_of_them, strict=True))
            return [text for at, (one, other) in pairs for text in _differences(one, other, f"{where}[{at}]")]
        case str(), str() if _is_like(printed, actual):
            return []
    return [] if printed == actual else [f"{where} is {actual!r}, not {printed!r}"]


def _is_like(printed: str, actual: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in printed.strip().split(_GAP))
    return re.fullmatch(pattern, actual.strip(), re.DOTALL) is not None
