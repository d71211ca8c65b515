"""From the bytes of an image's file to RGB pixels: PNG, JPEG, WebP, and the first frame of a GIF.

The format is recognised by the first bytes, never by a name or a media type. What a file claims to be is checked before
anything is decoded: its size in pixels, its proportions, how often a JPEG goes over all of them. What is transparent
becomes white, as on a page; a photo is turned as its camera says, and shrunk as the request's `detail` does. Nothing is
written to disk.

Only four decoders of Pillow's are used. A file made to harm is taken to be damaged, whatever it makes them raise.
"""

from __future__ import annotations

import io
import math
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from mlx_backend.images import Detail, ImageError, Picture
from mlx_backend.installation import vision_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from PIL.Image import Image

    # Waits until that many bytes may be used, and has them for the block.
    type Reserve = Callable[[int], AbstractContextManager[None]]

MAX_PIXELS: dict[Detail, int | None] = {
    Detail.LOW: 512 * 512,
    Detail.AUTO: 1280 * 28 * 28,
    Detail.HIGH: None,
}
"""The area in pixels that a picture is shrunk to, by detail; None: as many as the model takes.

A model's tokens for an image, and the time to read them, grow with its area: Qwen's default limit of 12.8 megapixels is
16,384 tokens. So `auto` stays at what its makers recommend for a balance, 1,280 tokens, and `high` leaves the limit to
the model. `low` is OpenAI's own square of 512.
"""
FORMATS: dict[str, str] = {"PNG": "PNG", "JPEG": "JPEG", "WEBP": "WebP", "GIF": "GIF"}
"""What is decoded: Pillow's names, and people's."""
MAX_PROPORTION = 200
"""Longer side over shorter. Processors of models refuse more, and no model sees anything in it."""
MAX_JPEG_SCANS = 100
"""A progressive JPEG has about ten. Each may be a few bytes in the file, and is a pass over all pixels to decode."""
MAX_READS = 100_000
"""How often Pillow's parsers may ask for bytes of a file, some four times for each of its parts.

They do so in Python, for a chunk of 12 bytes as for one of megabytes. A PNG of 20 MB has 2,500.
"""
BYTES_PER_PIXEL, BYTES_PER_WEBP_PIXEL = 14, 24
"""While a picture is decoded, as measured: Pillow has four for each pixel, also of RGB, for the picture as it is in the
file, in RGB and on white, or turned; the rest is its copy as bytes. WebP's decoder has two more pictures of its own."""

_ACCEPTED = "Send it as PNG, JPEG, WebP or GIF."
_HEIC = "a HEIC photo"
_CONVERTING = {
    _HEIC: " A Mac converts it with `sips -s format jpeg photo.heic --out photo.jpg`; an iPhone takes JPEG photos with "
    "Settings, Camera, Formats, Most Compatible."
}
"""How people get one of those, by what a file is."""
_SCAN = b"\xff\xda"
"""The marker of a JPEG's scan. In its data, 0xff is followed by 0."""
_HEIF_BRANDS = frozenset([b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"])
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"%PDF", "a PDF"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"BM", "a BMP"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"8BPS", "a Photoshop document"),
    (b"PK\x03\x04", "a ZIP archive or an office document"),
)
_MARKUP = ((b"<svg", "an SVG drawing"), (b"<html", "a web page"), (b"<!doctype html", "a web page"))
_HEAD = 1024
"""Bytes in which a drawing's first tag is looked for."""


def decode(
    data: bytes, detail: Detail, *, max_pixels: int, reserve: Reserve
) -> tuple[Picture, str, tuple[int, int]]:
    """Return the picture, its format's name for people, and the width and height that the file has.

    `reserve` is entered with the bytes that decoding takes, before it begins. Raises ImageError.
    """
    format_name = _format(data)
    image = _open(data, format_name)
    width, height = image.size
    name = FORMATS[format_name]
    if width < 1 or height < 1:
        raise ImageError(f"The image has {width} x {height} pixels: there is nothing to see.")
    if width * height > max_pixels:
        raise ImageError(
            f"The image has {width} x {height} pixels, {width * height / 1e6:.0f} million; this server's limit is "
            f"{max_pixels / 1e6:g} million. Send a smaller one.",
            "image_too_large",
        )
    if max(width, height) > MAX_PROPORTION * min(width, height):
        raise ImageError(
            f"The image has {width} x {height} pixels: one side is more than {MAX_PROPORTION} times as long as the "
            "other. Send a part of it."
        )
    if format_name == "JPEG" and data.count(_SCAN) > MAX_JPEG_SCANS:
        raise ImageError(f"The JPEG image is stored in more than {MAX_JPEG_SCANS} passes. Save it again.")
    with reserve(width * height * (BYTES_PER_WEBP_PIXEL if format_name == "WEBP" else BYTES_PER_PIXEL)):
        return _decoded(image, detail, name), name, (width, height)


def _format(data: bytes) -> str:
    """Return Pillow's name for the format. Raises ImageError for any other, by its name if it has one."""
    found = next((name for start, name in _SIGNATURES if data.startswith(start)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = "WEBP"
    elif data[4:8] == b"ftyp":
        brand = data[8:12]
        found = _HEIC if brand in _HEIF_BRANDS else "an AVIF picture" if brand == b"avif" else "a video"
    elif found is None:
        head = data[:_HEAD].lower()
        found = next((name for tag, name in _MARKUP if tag in head), None)
    if found in FORMATS:
        return found
    what = (
        f"The image's file is {found}, which cannot be shown to a model."
        if found
        else ("The file is no image, or of a format that is not known here.")
    )
    raise ImageError(f"{what} {_ACCEPTED}{_CONVERTING.get(found or '', '')}", "unsupported_image_format")


class _File(io.BytesIO):
    """A file that may be read only so often."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > MAX_READS:
            raise ImageError("The image's file is cut into more parts than any picture has. Save it again.")
        return super().read(size)


def _open(data: bytes, format_name: str) -> Image:
    """Read a file's header. Raises ImageError, also where Pillow is missing."""
    try:
        pillow = _pillow()
    except ImportError:
        raise ImageError(
            f"This server was installed without what reads images. Its operator can add it: {vision_command()}.",
            "vision_not_installed",
        ) from None
    try:
        opened: Image = pillow.open(_File(data), formats=[format_name])
    except ImageError:
        raise
    except Exception as error:  # whatever a decoder raises for bytes that are made up
        raise _damaged(FORMATS[format_name]) from error
    return opened


@cache
def _pillow() -> Any:
    from PIL import Image

    # Its limit for bombs is the process's, and a warning up to twice that. Ours is checked for each file, before it is
    # decoded, and an operator may set it higher.
    Image.MAX_IMAGE_PIXELS = None
    # Its warnings are of clients' files, such as notes of a camera that are damaged.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _decoded(image: Image, detail: Detail, name: str) -> Picture:
    try:
        with image:
            if name == "JPEG":
                # Decodes at a half, a quarter or an eighth, where that is still no smaller than what is shown.
                image.draft(None, shown_size(image.width, image.height, detail))
            image.load()
            orientation = _orientation(image)
            rgb = _on_white(image)
        size = shown_size(rgb.width, rgb.height, detail)
        if size != rgb.size:
            from PIL.Image import Resampling

            rgb = rgb.resize(size, Resampling.BICUBIC, reducing_gap=3.0)
        if orientation is not None:
            rgb = rgb.transpose(orientation)
        return Picture(rgb.width, rgb.height, rgb.tobytes())
    except ImageError:
        raise
    except Exception as error:  # as above
        raise _damaged(name) from error


def _orientation(image: Image) -> Any:
    """Return how the pixels have to be turned to be upright, by what the camera has noted; None: not at all."""
    from PIL.Image import Transpose

    try:
        noted = image.getexif().get(0x0112)
    except Exception:  # the notes are damaged; the pixels need not be
        return None
    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(noted)


def _on_white(image: Image) -> Image:
    """Return the image in RGB."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGB", layer.size, (255, 255, 255))
    white.paste(layer, mask=layer.getchannel("A"))
    return white


def _eight_bits(image: Image) -> Image:
    """Return shades of 16 bits as ones of 8; Pillow's own conversion cuts all above 255 off."""
    from PIL import Image

    shades = image.tobytes()
    high = shades[0::2] if image.mode.endswith("B") else shades[1::2]
    return Image.frombytes("L", image.size, high)


def _damaged(name: str) -> ImageError:
    return ImageError(f"The {name} image cannot be read: its file is damaged or incomplete.")


def shown_size(width: int, height: int, detail: Detail) -> tuple[int, int]:
    """Return the width and height that a picture is shown with: never enlarged, and in its proportions."""
    limit = MAX_PIXELS[detail]
    if limit is None or width * height <= limit:
        return width, height
    scale = math.sqrt(limit / (width * height))
    return max(1, int(width * scale)), max(1, int(height * scale))
