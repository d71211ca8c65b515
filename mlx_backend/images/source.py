"""An image as a request gives it, and as a model can be shown it. Holds data alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum


class Detail(StrEnum):
    """How closely a model is to look: OpenAI's words. detail.py says how many pixels each of them is."""

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
