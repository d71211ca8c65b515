"""What a built package has and a clone has not: the commit it was made from, and links in README that lead somewhere.

Hatchling runs this for wheel and sdist. The address that links lead to is `Source` of `[project.urls]`; without one
they stay as they are.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent
LINK = re.compile(r'(?P<before>\]\(|(?:src|href)=")(?!\w+:|#|//)(?P<path>[^)"#\s]+)')
PICTURES = (".png", ".svg", ".gif", ".jpg", ".webp")


def with_absolute_links(text: str, source: str, version: str) -> str:
    """Return a page whose links to files of the clone lead to those of this version."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["path"].endswith(PICTURES) else "blob"
        return f"{found['before']}{source.rstrip('/')}/{kind}/v{version}/{found['path']}"

    return LINK.sub(absolute, text)


class LongDescription(MetadataHookInterface):
    """README, as an index of packages shows it."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        if source := metadata.get("urls", {}).get("Source"):
            version = runpy.run_path(str(ROOT / "mlx_backend/__init__.py"))["__version__"]
            text = with_absolute_links(text, source, version)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class CommitFile(BuildHookInterface):  # type: ignore[type-arg]
    """`mlx_backend/COMMIT`, which `mlx_backend.commit()` reads."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless this is an editable install or nobody knows the commit."""
        commit = runpy.run_path(str(ROOT / "mlx_backend/__init__.py"))["commit"]()
        if version == "editable" or not commit or (ROOT / "mlx_backend/COMMIT").exists():
            return
        file = ROOT / "build/COMMIT"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{commit}\n", encoding="ascii")
        build_data["force_include"][str(file)] = "mlx_backend/COMMIT"
