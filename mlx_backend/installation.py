"""How this server was installed, and so which command adds to it what only some need.

The commands name nothing of ours: a name that is registered nowhere could be registered by anyone.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DISTRIBUTION = "dify-mlx-provider"
VISION = "vision"
"""The extra that models need to see images."""


def vision_command(*, package: Path | None = None, prefix: Path | None = None) -> str:
    """Return the command that adds what models need to see images, and where to run it if that matters.

    It names no folder of this machine, as clients are shown it too.
    """
    package, prefix = package or Path(__file__).resolve().parent, prefix or Path(sys.prefix)
    if (package.parent / "Makefile").is_file():
        return "`make vision` in the server's clone"
    if (prefix / "uv-receipt.toml").is_file() and _is_from_folder():
        return "`uv tool install '.[vision]'` in the clone that the server was installed from"
    wanted = " ".join(map(shlex.quote, _vision_requirements()))
    if (prefix / "pipx_metadata.json").is_file():
        return f"`pipx inject {DISTRIBUTION} {wanted}`"
    if (prefix / "uv-receipt.toml").is_file():
        python = f'"$(uv tool dir)/{DISTRIBUTION}/bin/python"'
        return f"`uv pip install --python {python} {wanted}`"
    return f"`python -m pip install {wanted}` with the server's Python"


def _is_from_folder() -> bool:
    """Say whether the installer took us from a folder, which it says in a file of its own (PEP 610)."""
    try:
        return "dir_info" in json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return False


def _vision_requirements() -> list[str]:
    """Return what the extra requires, as its package says it."""
    try:
        required = distribution(DISTRIBUTION).requires or []
    except PackageNotFoundError:
        return ["mlx-vlm", "pillow"]
    marked = re.compile(rf"\bextra\s*==\s*['\"]{VISION}['\"]")
    return [each.partition(";")[0].strip() for each in required if marked.search(each)]
