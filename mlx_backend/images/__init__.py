"""Images on their way in: from what a request names to upright RGB pixels within limits.

    ImageSource ─fetch─▶ bytes ─decode─▶ Picture        loader.py does it; the others are its parts

Here is the data alone. Knows no API, no model and no MLX. Pillow, which the extra `vision` installs, is imported when
an image is decoded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum


class Detail(StrEnum):
    """How closely a model is to look: OpenAI's words. decode.py says how many pixels each of them is."""

    LOW = "low"
    HIGH = "high"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """An image of a request: a data URI or the address where it is.

    `where` names the part of the request, such as messages[2].content[1].
    """

    where: str
    url: str = field(repr=False)
    detail: Detail = Detail.AUTO


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels, row by row from the top, three bytes each: red, green, blue."""

    width: int
    height: int
    rgb: bytes = field(repr=False)

    @property
    def digest(self) -> bytes:
        """What tells two pictures apart: a SHA-256 of the size and the pixels, not of names or encodings."""
        return hashlib.sha256(b"%d %d " % (self.width, self.height) + self.rgb).digest()


class ImageError(ValueError):
    """An image cannot be used. The text is a sentence for people that begins with what "the image" does wrong."""

    def __init__(self, problem: str, code: str = "invalid_image") -> None:
        super().__init__(problem)
        self.code = code


def too_many_bytes(max_bytes: int) -> ImageError:
    """Make the error of a file that is too large."""
    return ImageError(
        f"The image's file is larger than {max_bytes / (1 << 20):g} MB, which is this server's limit. "
        "Send a smaller one.",
        "image_too_large",
    )
