"""Numbers as masks: in handwriting of our own strokes, in Pillow's built-in font, and in fonts of a folder.

Knows nothing of scenes or colours.
"""

import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
_SIZES: Final = tuple(sorted({round(8 * 1.07**step) for step in range(75)}))
_FONTS: list[str] = [""]  # "" is Pillow's own; more are added by `add_fonts`


def add_fonts(folder: Path) -> int:
    """Add every TrueType and OpenType font of a folder, in the order of their names; return how many there are now."""
    for path in sorted(folder.glob("*.[to]tf")):
        if str(path) not in _FONTS:
            _FONTS.append(str(path))
    return len(_FONTS)


@lru_cache(maxsize=2_000)
def _font(path: str, size: int) -> Any:
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


def _at_most(size: float) -> int:
    """Return the next smaller of a few sizes, since to load a font costs more than to write with it."""
    return next((step for step in reversed(_SIZES) if step <= size), _SIZES[0])


def _arc(x: float, y: float, across: float, down: float, start: float, end: float) -> list[Point]:
    """Return points on an ellipse; degrees go clockwise from three o'clock, as y grows downwards."""
    steps = max(4, round(abs(end - start) / 24))
    return [
        (x + across * math.cos(math.radians(angle)), y + down * math.sin(math.radians(angle)))
        for angle in (start + (end - start) * step / steps for step in range(steps + 1))
    ]


# Each digit in a box of width 0.6 and height 1, in the ways it is written; each way is a list of strokes.
_STROKES: Final[dict[str, tuple[list[list[Point]], ...]]] = {
    "0": ([_arc(0.3, 0.5, 0.27, 0.5, -80, 280)], [_arc(0.3, 0.5, 0.22, 0.5, -100, 262)]),
    "1": (
        [[(0.1, 0.27), (0.34, 0.0), (0.34, 1.0)]],
        [[(0.12, 0.22), (0.32, 0.0), (0.32, 1.0)], [(0.1, 1.0), (0.54, 1.0)]],
    ),
    "2": (
        [[*_arc(0.3, 0.27, 0.26, 0.27, -170, 30), (0.03, 1.0), (0.58, 1.0)]],
        [[*_arc(0.3, 0.3, 0.24, 0.3, -150, 40), (0.05, 0.98), (0.58, 0.96)]],
    ),
    "3": (
        [[*_arc(0.27, 0.25, 0.24, 0.25, -150, 80), *_arc(0.27, 0.74, 0.29, 0.26, -80, 150)]],
        [[(0.05, 0.0), (0.53, 0.0), (0.26, 0.42), *_arc(0.27, 0.71, 0.28, 0.29, -75, 150)]],
    ),
    "4": (
        [[(0.42, 1.0), (0.42, 0.0), (0.02, 0.68), (0.6, 0.68)]],
        [[(0.14, 0.02), (0.04, 0.58), (0.58, 0.58)], [(0.44, 0.3), (0.42, 1.0)]],
    ),
    "5": (
        [[(0.53, 0.0), (0.1, 0.0), (0.07, 0.46), *_arc(0.26, 0.68, 0.29, 0.31, -120, 145)]],
        [[(0.1, 0.02), (0.08, 0.45), *_arc(0.25, 0.69, 0.3, 0.3, -115, 150)], [(0.1, 0.0), (0.55, 0.0)]],
    ),
    "6": (
        [[(0.46, 0.0), (0.22, 0.26), (0.07, 0.55), *_arc(0.3, 0.71, 0.25, 0.28, 180, -180)]],
        [[*_arc(0.36, 0.55, 0.32, 0.54, -70, -180), *_arc(0.3, 0.7, 0.26, 0.29, 180, -180)]],
    ),
    "7": (
        [[(0.03, 0.0), (0.57, 0.0), (0.22, 1.0)]],
        [[(0.03, 0.02), (0.57, 0.0), (0.25, 1.0)], [(0.16, 0.5), (0.52, 0.47)]],
    ),
    "8": (
        [[*_arc(0.3, 0.25, 0.22, 0.25, 90, 450), *_arc(0.3, 0.75, 0.27, 0.25, -90, 270)]],
        [[*_arc(0.3, 0.24, 0.2, 0.24, 90, -270), *_arc(0.3, 0.74, 0.28, 0.26, -90, 270)]],
    ),
    "9": (
        [[*_arc(0.29, 0.28, 0.25, 0.28, 0, -360), (0.54, 0.3), (0.5, 0.66), (0.4, 1.0)]],
        [[*_arc(0.29, 0.29, 0.26, 0.29, 0, -360), (0.55, 0.3), (0.54, 1.0)]],
    ),
}


def _handwritten(rng: random.Random, text: str, width: int, height: int) -> Any:
    """Return a number in strokes of one pen that shake a little, in a box of the size given."""
    mask = Image.new("L", (width, height), 0)
    pen = ImageDraw.Draw(mask)
    room = width / len(text)
    tall = min(height * 0.9, room / 0.66 * 1.08)
    thick = max(2, round(tall * rng.choice((0.07, 0.07, 0.09, 0.12, 0.15))))
    tall -= thick
    slant, shake = rng.uniform(-0.06, 0.16), rng.choice((0.0, 0.01, 0.018))
    for place, digit in enumerate(text):
        wide = min(tall * rng.uniform(0.9, 1.1), (room - thick) / 0.76)
        high = tall * rng.uniform(0.9, 1.0)
        left = place * room + (room - 0.6 * wide) / 2
        top = (height - high) / 2 + rng.uniform(-0.03, 0.03) * tall
        for stroke in rng.choice(_STROKES[digit]):
            points = [
                (
                    left + (x + slant * (0.5 - y) * 0.6 + rng.gauss(0, shake)) * wide,
                    top + (y + rng.gauss(0, shake)) * high,
                )
                for x, y in stroke
            ]
            pen.line(points, fill=255, width=thick, joint="curve")
            for x, y in (points[0], points[-1]):
                pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=255)
    return mask


def _printed(rng: random.Random, text: str, width: int, height: int) -> Any:
    """Return a number in a font, as large as the box allows, at times only its outline or bolder."""
    path = "" if rng.random() < 0.25 else rng.choice(_FONTS)
    size = _at_most(height * 1.3)
    font = _font(path, size)
    left, top, right, bottom = font.getbbox(text)
    if right - left > width or bottom - top > height:
        size = _at_most(size * min(width / (right - left), height / (bottom - top)))
        font = _font(path, size)
        left, top, right, bottom = font.getbbox(text)
    bold = rng.choice((0, 0, 0, max(1, size // 40)))
    mask = Image.new("L", (right - left + 2 * bold, bottom - top + 2 * bold), 0)
    pen = ImageDraw.Draw(mask)
    if rng.random() < 0.1:
        pen.fontmode = "1"  # as some programs draw it: no grey edges
    pen.text((bold - left, bold - top), text, fill=255, font=font, stroke_width=bold)
    return mask


def number_mask(rng: random.Random, text: str, width: int, height: int) -> Any:
    """Return a number as a mask (mode L) that fits the size given, turned by a few degrees at times."""
    turn = rng.uniform(-8, 8) if rng.random() < 0.25 else 0.0
    s, c = abs(math.sin(math.radians(turn))), math.cos(math.radians(turn))
    fit = min(1.0, height / (width * s + height * c), width / (width * c + height * s))
    make = _handwritten if rng.random() < 0.4 else _printed
    mask = make(rng, text, max(8, int(width * fit)), max(8, int(height * fit)))
    return mask.rotate(turn, resample=Image.Resampling.BILINEAR, expand=True) if turn else mask


def word_mask(rng: random.Random, text: str, width: int, height: int) -> Any:
    """Return a word or a line of text as a mask that fits the size given."""
    return _printed(rng, text, width, height)
