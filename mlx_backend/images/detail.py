"""How many pixels a model is shown: OpenAI's `detail`, as the area a picture is shrunk to before a model's own rules.

A model's tokens for an image, and the time to read them, grow with its area: Qwen's default limit of 12.8 megapixels is
16,384 tokens. So `auto` stays at what its makers recommend for a balance, 1,280 tokens, and `high` leaves the limit to
the model. `low` is OpenAI's own square of 512. A picture is never enlarged here, and keeps its proportions.
"""

from __future__ import annotations

import math

from mlx_backend.images.source import Detail

MAX_PIXELS: dict[Detail, int | None] = {
    Detail.LOW: 512 * 512,
    Detail.AUTO: 1280 * 28 * 28,
    Detail.HIGH: None,
}
"""Pixels by detail; None: as many as the model takes."""


def shown_size(width: int, height: int, detail: Detail) -> tuple[int, int]:
    """Return the width and height that a picture of this size is shown with."""
    limit = MAX_PIXELS[detail]
    if limit is None or width * height <= limit:
        return width, height
    scale = math.sqrt(limit / (width * height))
    return max(1, int(width * scale)), max(1, int(height * scale))
