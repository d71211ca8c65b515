"""Image files made for tests: of one colour, or with a corner that tells which way up they are.

What imports this is skipped where the extra `vision` is not installed.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = pytest.importorskip("PIL.Image")

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def with_red_corner(width: int = 8, height: int = 4, mode: str = "RGB") -> Image.Image:
    """A blue picture, red at its top left."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width // 4, height // 2))
    return image.convert(mode)


def encoded(image: Image.Image, format_name: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, format_name, **options)
    return file.getvalue()


def png(width: int = 8, height: int = 4) -> bytes:
    """A PNG with a red corner."""
    return encoded(with_red_corner(width, height))


def data_uri(file: bytes) -> str:
    """The file as a client sends it."""
    return "data:image/png;base64," + base64.b64encode(file).decode()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it has this many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(*each) for each in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
