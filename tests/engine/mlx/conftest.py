"""Fixtures that several tests of the engine on MLX share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_stores import Stores


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path / "kept")
    yield stores
    stores.close()
