"""Pictures of what the model does not know: photographs, scribbles, letters, arrows, charts and so on."""

import math
import random
import string
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw

from training.vision.glyphs import word_mask
from training.vision.palette import Rgb, ink, shade


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


def _photo(rng: random.Random, width: int, height: int) -> Any:
    """Return soft large patches with finer ones on them, as a blurred photograph has."""
    least = min(width, height)
    coarse = _noise(rng, width, height, max(4, least // rng.randint(2, 9)), smooth=True)
    if rng.random() < 0.3:
        return coarse
    fine = _noise(rng, width, height, max(2, least // rng.randint(14, 50)), smooth=True)
    return Image.blend(coarse, fine, rng.uniform(0.15, 0.45))


def _landscape(rng: random.Random, width: int, height: int) -> Any:
    """Return a sky and hills, with grain."""
    image = _gradient(rng, width, height)
    pen = ImageDraw.Draw(image)
    level = rng.uniform(0.35, 0.6)
    for _ in range(rng.randint(1, 4)):
        swing, start, bends = rng.uniform(0.02, 0.12), rng.uniform(0, 6), rng.uniform(2, 9)
        line = [
            (width * x / 24, height * (level + swing * math.sin(start + bends * x / 24) + rng.gauss(0, 0.01)))
            for x in range(25)
        ]
        tint = (rng.randint(10, 200), rng.randint(30, 200), rng.randint(10, 180))
        pen.polygon([*line, (width, height), (0, height)], fill=tint)
        level += rng.uniform(0.1, 0.25)
    grain = _noise(rng, width, height, rng.choice((1, 2, 3)), smooth=False)
    return Image.blend(image, grain, rng.uniform(0.05, 0.2))


def _clutter(rng: random.Random, width: int, height: int) -> Any:
    """Return many things before and behind each other, in shaded colours, as in a photograph of a room or a street."""
    image = _landscape(rng, width, height) if rng.random() < 0.5 else _photo(rng, width, height)
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(8, 22)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        across, down = (rng.uniform(0.08, 0.35) * size for size in (width, height))
        angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(rng.randint(4, 9)))
        dull = rng.randint(20, 230)
        tint = tuple(min(255, max(0, dull + rng.randint(-60, 60))) for _ in range(3))
        pen.polygon(
            [(x + across * math.cos(angle), y + down * math.sin(angle)) for angle in angles], fill=tint
        )
    grain = _noise(rng, width, height, rng.choice((1, 2, 8)), smooth=rng.random() < 0.5)
    return Image.blend(image, grain, rng.uniform(0.05, 0.25))


def _figure(rng: random.Random, pen: Any, width: int, height: int, tint: Rgb) -> None:
    """Draw one thing that has a name, though none of those the model knows: an arrow, a spiral, a man, a line."""
    least = min(width, height)
    size, thick = least * rng.uniform(0.28, 0.44), max(2, round(least * rng.uniform(0.02, 0.05)))
    x, y = width / 2 + rng.uniform(-0.1, 0.1) * least, height / 2 + rng.uniform(-0.04, 0.04) * least
    kind = rng.choice(("arrow", "arrow", "spiral", "man", "line", "zigzag", "wave"))
    if kind == "arrow":
        points = [(-1, -0.2), (0.2, -0.2), (0.2, -0.6), (1, 0), (0.2, 0.6), (0.2, 0.2), (-1, 0.2)]
        angle = math.radians(rng.choice((0, 90, 180, 270)) + rng.uniform(-15, 15))
        c, s = math.cos(angle), math.sin(angle)
        pen.polygon([(x + size * (a * c - b * s), y + size * (a * s + b * c)) for a, b in points], fill=tint)
        return
    if kind == "spiral":
        points = [
            (x + size * t / 60 * math.cos(t / 60 * 18), y + size * t / 60 * math.sin(t / 60 * 18))
            for t in range(60)
        ]
    elif kind == "man":
        head = size * 0.25
        pen.ellipse((x - head, y - size, x + head, y - size + 2 * head), outline=tint, width=thick)
        for part in (
            ((0, -0.5), (0, 0.35)),
            ((-0.5, -0.2), (0.5, -0.2)),
            ((0, 0.35), (-0.4, 1)),
            ((0, 0.35), (0.4, 1)),
        ):
            pen.line([(x + a * size, y + b * size) for a, b in part], fill=tint, width=thick)
        return
    elif kind == "line":
        rise = rng.uniform(-0.8, 0.8)
        points = [(x - size, y - size * rise), (x + size, y + size * rise)]
    elif kind == "zigzag":
        count = rng.randint(5, 9)
        points = [
            (x + size * (2 * step / (count - 1) - 1), y + size * (0.35 if step % 2 else -0.35))
            for step in range(count)
        ]
    else:
        points = [(x + size * (step / 20 - 1), y + size * 0.3 * math.sin(step / 2.5)) for step in range(41)]
    pen.line(points, fill=tint, width=thick, joint="curve")


_LETTERS: Final = "AEFHKMNPRUWY"  # none that could be a digit or one of the shapes


def _letters(rng: random.Random, image: Any, width: int, height: int, tint: Rgb) -> None:
    """Write one to four large letters where a number could be."""
    text = "".join(rng.choices(_LETTERS, k=rng.randint(1, 4)))
    mask = word_mask(rng, text, round(width * rng.uniform(0.5, 0.9)), round(height * rng.uniform(0.3, 0.8)))
    left, top = (width - mask.width) // 2, (height - mask.height) // 2
    image.paste(
        tint, (left + round(rng.uniform(-0.4, 0.4) * left), top + round(rng.uniform(-0.4, 0.4) * top)), mask
    )


def _scribble(rng: random.Random, pen: Any, width: int, height: int, tint: Rgb) -> None:
    for _ in range(rng.randint(1, 4)):
        x, y = rng.uniform(0, width), rng.uniform(0, height)
        points = []
        for _ in range(rng.randint(12, 30)):
            points.append((x, y))
            x = min(width, max(0, x + rng.gauss(0, width / 5)))
            y = min(height, max(0, y + rng.gauss(0, height / 5)))
        pen.line(
            points, fill=tint, width=max(1, min(width, height) // rng.choice((40, 60, 90))), joint="curve"
        )


def _text(rng: random.Random, image: Any, width: int, height: int, tint: Rgb, lines: int) -> None:
    room = height // lines
    for line in range(lines):
        words = [
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
            for _ in range(rng.randint(1, 3))
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
        return _photo(rng, width, height)
    if kind == "landscape":
        return _landscape(rng, width, height)
    if kind == "clutter":
        return _clutter(rng, width, height)
    if kind == "gradient":
        return _gradient(rng, width, height)
    image = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(image)
    _, tint = ink(rng, paper, "")
    if kind == "scribble":
        _scribble(rng, pen, width, height, tint)
    elif kind == "text":
        _text(rng, image, width, height, tint, rng.choice((1, 1, 2, 3, 5)))
    elif kind == "page":
        _text(rng, image, width, height, tint, rng.randint(6, 10))
    elif kind == "letters":
        _letters(rng, image, width, height, tint)
    elif kind == "figure":
        _figure(rng, pen, width, height, tint)
    elif kind == "stripes":
        _stripes(rng, pen, width, height, tint)
    else:
        _chart(rng, pen, width, height, tint)
    return image
