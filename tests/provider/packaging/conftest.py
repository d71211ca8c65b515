"""What the package is made from."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from dify_mlx_provider.packaging.package import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of everything the package is made from, for tests to change."""
    root = tmp_path / "sources"
    for folder in ("dify_mlx_provider", "mlx_backend/conversation", "provider_assets", "readme"):
        shutil.copytree(ROOT / folder, root / folder)
    for name in ("mlx_backend/__init__.py", "manifest.yaml", "pyproject.toml", "LICENSE", "PRIVACY.md"):
        shutil.copy(ROOT / name, root / name)
    return root
