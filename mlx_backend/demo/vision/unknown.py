"""Pictures of what the model does not know: noise, photographs, scribbles, texts, gradients, stripes and charts."""

import random
import string
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mlx_backend.demo.vision.glyphs import word_mask
from mlx_backend.demo.vision.palette import Rgb, ink, shade


def _noise(rng: random.Random, width: int, height: int, cell: int, smooth: bool) -> Any:
    """Return random colours in cells of a size: snow on a screen, or blurred to what a photograph looks like."""
    chance = np.random.default_rng(rng.getrandbits(32))
    across, down = max(2, width // cell), max(2, height // cell)
    cells = chance.integers(0, 256, size=(down, across, 3), dtype=np.uint8)
    if smooth or rng.random() < 0.3:
        tint = chance.integers(0, 256, size=3)
        cells = (cells * 0.6 + tint * 0.4).astype(np.uint8)
    if rng.random() < 0.3:
        cells = np.repeat(cells[:, :, :1], 3, axis=2)
    how = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    return Image.fromarray(cells).resize((width, height), how)


def _scribble(rng: random.Random, pen: Any, width: int, height: int, tint: Rgb) -> None:
    for _ in range(rng.randint(1, 4)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        points = []
        for _ in range(rng.randint(12, 30)):
            points.append((x, y))
            x = min(width, max(0, x + rng.gauss(0, width / 5)))
            y = min(height, max(0, y + rng.gauss(0, height / 5)))
        pen.line(points, fill=tint, width=max(1, min(width, height) // rng.choice((40, 60, 90))), joint="curve")


def _text(rng: random.Random, image: Any, width: int, height: int, tint: Rgb) -> None:
    lines = rng.choice((1, 1, 2, 3, 5))
    room = height // lines
    for line in range(lines):
        words = [
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(rng.randint(1, 3))
        ]
        text = " ".join(words) if rng.random() < 0.7 else " ".join(words).title()
        mask = word_mask(rng, text, round(width * 0.94), max(8, round(min(room * 0.7, 60))))
        image.paste(tint, (max(0, round(width * 0.03)), line * room + (room - mask.height) // 2), mask)


def _gradient(rng: random.Random, width: int, height: int) -> Any:
    ends = [np.array(shade(rng, name), dtype=np.float32) for name in rng.sample(("red", "blue", "green", "white",
            "black", "yellow", "purple", "orange"), 2)]  # fmt: skip
    along = np.linspace(0, 1, width, dtype=np.float32)[None, :, None]
    if rng.random() < 0.5:
        along = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    pixels = (ends[0] * (1 - along) + ends[1] * along).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3))))


def _stripes(rng: random.Random, pen: Any, width: int, height: int, tint: Rgb) -> None:
    step = max(4, min(width, height) // rng.randint(5, 12))
    kind = rng.choice(("across", "down", "checks", "slant"))
    for place in range(0, max(width, height) * 2, step * 2):
        if kind == "across":
            pen.rectangle((0, place, width, place + step), fill=tint)
        elif kind == "down":
            pen.rectangle((place, 0, place + step, height), fill=tint)
        elif kind == "slant":
            pen.line((place, -1, place - height, height), fill=tint, width=max(2, step // 2))
        else:
            for row in range(0, height, step):
                left = place + step * (row // step % 2)
                pen.rectangle((left, row, left + step - 1, row + step - 1), fill=tint)


def _chart(rng: random.Random, pen: Any, width: int, height: int, tint: Rgb) -> None:
    """Draw axes and a curve through many points."""
    thick = max(1, min(width, height) // 80)
    left, low = width * 0.1, height * 0.9
    pen.line([(left, height * 0.06), (left, low), (width * 0.95, low)], fill=tint, width=thick)
    count = rng.randint(8, 25)
    level = rng.uniform(0.3, 0.7)
    points = []
    for step in range(count):
        level = min(0.85, max(0.1, level + rng.gauss(0, 0.08)))
        points.append((left + (width * 0.84) * (step + 0.5) / count, level * height))
    pen.line(points, fill=tint, width=thick + 1)


def draw_unknown(rng: random.Random, kind: str, width: int, height: int, paper: Rgb) -> Any:
    """Return a picture (mode RGB) of a kind of `scene.UNKNOWN_KINDS`."""
    least = min(width, height)
    if kind == "noise":
        return _noise(rng, width, height, rng.choice((1, 1, 2, 4, max(1, least // 24))), smooth=False)
    if kind == "photo":
        return _noise(rng, width, height, max(4, least // rng.randint(4, 16)), smooth=True)
    if kind == "gradient":
        return _gradient(rng, width, height)
    image = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(image)
    _, tint = ink(rng, paper, "")
    if kind == "scribble":
        _scribble(rng, pen, width, height, tint)
    elif kind == "text":
        _text(rng, image, width, height, tint)
    elif kind == "stripes":
        _stripes(rng, pen, width, height, tint)
    else:
        _chart(rng, pen, width, height, tint)
    return image
