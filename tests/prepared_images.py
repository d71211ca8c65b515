"""Images as an engine gets them, without a processor that has prepared them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_backend.engine.images import PreparedImage, WrittenImage

if TYPE_CHECKING:
    from collections.abc import Mapping


def prepared(
    places: int = 1,
    *,
    digest: bytes = b"a",
    pad: int = 0,
    text: str = "",
    inputs: Mapping[str, Any] | None = None,
) -> PreparedImage:
    """An image of so many places."""
    return PreparedImage(digest, WrittenImage(text, 0, (pad,) * places), inputs or {})


def with_grid(rows: int, columns: int, *, digest: bytes = b"a", pad: int = 0) -> PreparedImage:
    """An image whose places have rows and columns."""
    places = np.arange(rows * columns)
    positions = np.stack([0 * places, places // columns, places % columns])
    shift = max(rows, columns) - rows * columns
    return PreparedImage(digest, WrittenImage("", 0, (pad,) * places.size, 0, positions, shift))
