"""Every family of mlx-vlm that sees, and how it is served here: writes the table of docs/images.md.

    python tests/vlm_matrix.py [FAMILY …] --write

Each family's tiny model (vlm_families.py) answers in a process of its own, next to mlx-vlm's own generation.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import resource
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vision_models import MIXTURES, WRITERS
from vlm_families import OWN, write
from vlm_reference import NotShownError, compare

from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.tasks import is_of_mlx_vlm

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent.parent / "docs/images.md"
TABLE = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- end of families -->)", re.DOTALL)
BATCH, ONE, UNTRIED, NOT = "in the batch", "one at a time", "not compared", "not"
SECONDS, MEMORY, AT_ONCE = 900, 14 << 30, 2
NO_PLACE = {
    "deepseek_vl_v2": (UNTRIED, "mlx-vlm 0.7.10's own embeddings of a picture differ from run to run"),
    "florence2": (NOT, "it answers no conversation"),
    "moondream2": (UNTRIED, "its processor fetches another model's tokenizer, which is not at hand here"),
    "plamo2vl": (UNTRIED, "its tokenizer is a program of its own, which is not made here"),
}
"""Families that are not tried here, and why."""


def families() -> list[str]:
    """The families of mlx-vlm that see, by their folders' names."""
    root = Path(importlib.import_module("mlx_vlm.models").__path__[0])
    return sorted(
        each.name for each in root.iterdir() if each.name in WRITERS | MIXTURES | NO_PLACE or _sees(each)
    )


def _sees(folder: Path) -> bool:
    if not is_of_mlx_vlm({"model_type": folder.name}):
        return False
    sources = [each.read_text(encoding="utf-8") for each in folder.glob("*.py")]
    return (folder / "vision.py").is_file() or any("VisionModel" in each for each in sources)


def tried(names: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield how each family is served, and a remark. Each is tried in a process of its own, a few at a time."""
    waiting = [name for name in names if name not in WRITERS | MIXTURES | NO_PLACE]
    for name in set(names) - set(waiting):
        yield name, NO_PLACE.get(name, (BATCH, ""))
    folder, running = Path(tempfile.mkdtemp()), dict[int, str]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            if (child := os.fork()) == 0:
                signal.alarm(SECONDS)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                (folder / name).write_text(_one(name), encoding="utf-8")
                os._exit(0)
            running[child] = name
        child, status = os.wait()
        name = running.pop(child)
        said = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else ""
        kind, _, remark = said.partition(": ")
        if not kind:
            kind, remark = UNTRIED, _remark(name, f"its tiny model ended with {status}")
        yield name, (kind, remark)


def _one(family: str) -> str:
    try:
        importlib.import_module(f"mlx_vlm.models.{family}")
    except ImportError as error:
        return f"{NOT}: mlx-vlm's network needs {error.name}, which is not among what `make vision` installs"
    folder = Path(tempfile.mkdtemp())
    said = _Said()
    logging.getLogger("mlx_backend").addHandler(said)
    try:
        write(folder, family)
        has_refused, is_batched = compare(folder, family)
    except ImportError as error:
        return f"{NOT}: mlx-vlm's network needs {error.name}, which is not among what `make vision` installs"
    except (NotShownError, EngineError) as error:
        met = said.reason or first_line(error).replace(f"The model {folder.name!r}", "it")
        return f"{NOT}: {_remark(family, met)}"
    except Exception as error:
        return f"{UNTRIED}: {_remark(family, f'{type(error).__name__}: {first_line(error)}')}"
    return (
        f"{BATCH if is_batched else ONE}: "
        f"{_remark(family) or ('several pictures only of one size' if has_refused else '')}"
    )


def _remark(family: str, met: str = "") -> str:
    """What the table says of what was met. A remark of `OWN` that explains something else is left out."""
    own = OWN.get(family, {})
    explains = own.get("met", "")
    is_meant = explains in met if explains else not met
    return own.get("remark", "") if is_meant else met.replace("|", "")


class _Said(logging.Handler):
    """Keeps why a model answers text only, as the log says it."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        _, found, reason = record.getMessage().partition("answers text only: ")
        if found:
            self.reason = reason.removeprefix("its processor reads no picture: ")


def table(results: dict[str, tuple[str, str]]) -> str:
    """The rows of the page."""
    rows = [f"| `{name}` | {kind} | {remark} |" for name, (kind, remark) in results.items()]
    return "\n".join(["", "| family | answers with pictures | |", "|---|---|---|", *rows, "", ""])


def listed() -> dict[str, tuple[str, str]]:
    """What the page says."""
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    lines = found[0].splitlines() if found is not None else []
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return {name.strip("`"): (kind, remark) for name, kind, remark in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    results = listed() if given.families else {}
    for family, found in tried(given.families or families()):
        results[family] = found
        print(f"{family}: {': '.join(found)}", flush=True)
        if given.write:
            text = PAGE.read_text(encoding="utf-8")
            new = table(dict(sorted(results.items())))
            PAGE.write_text(TABLE.sub(new.replace("\\", ""), text), encoding="utf-8")


if __name__ == "__main__":
    main()
