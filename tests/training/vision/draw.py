"""Scenes as pictures: drawn by Pillow as programs and people draw, with antialiasing, noise or JPEG traces at times.

The same scene and generator give the same picture. Knows nothing of questions.
"""

import math
import random
from io import BytesIO
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from training.vision.glyphs import Point, number_mask
from training.vision.palette import Rgb, distance
from training.vision.scene import MODEL_AREA, Number, Scene, Shape
from training.vision.unknown import draw_unknown

Pixels = npt.NDArray[np.uint8]


def _ring(points: int) -> list[Point]:
    return [
        (math.cos(2 * math.pi * step / points), math.sin(2 * math.pi * step / points))
        for step in range(points)
    ]


_CIRCLE: Final = _ring(44)


def _heart() -> list[Point]:
    points = []
    for step in range(40):
        t = 2 * math.pi * step / 40
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 17.5, -(y + 2.5) / 17.5))
    return points


_HEART: Final = _heart()


def _star(inner: float) -> list[Point]:
    angles = [math.pi * (step / 5 - 0.5) for step in range(10)]
    return [
        ((inner if step % 2 else 1.0) * math.cos(angle), (inner if step % 2 else 1.0) * math.sin(angle))
        for step, angle in enumerate(angles)
    ]


def _triangle(rng: random.Random) -> list[Point]:
    if rng.random() < 0.12:  # right-angled
        return [(-0.75, -0.65), (0.75, 0.65), (-0.75, 0.65)]
    half = rng.uniform(0.62, 0.86)
    low = math.sqrt(1 - half * half)
    return [(0.0, -1.0 if half > 0.7 else -0.9), (half, low), (-half, low)]


def outline(rng: random.Random, name: str) -> list[Point]:
    """Return a shape's corners within a circle of radius 1, turned no further than its name allows."""
    turn = 0.0
    if name == "circle":
        return _CIRCLE
    if name == "heart":
        points, turn = _HEART, rng.choice((0, 0, 0, 15))
    elif name == "star":
        points, turn = _star(rng.uniform(0.36, 0.48)), rng.choice((0, 0, 0, 36))
    elif name == "oval":
        flat = rng.uniform(0.48, 0.64)
        points, turn = [(x, y * flat) for x, y in _CIRCLE], rng.choice((0, 0, 8))
        if rng.random() < 0.35:
            points = [(y, x) for x, y in points]
    elif name == "square":
        points, turn = [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)], rng.choice((0, 0, 0, 12))
    elif name == "rectangle":
        flat = rng.uniform(0.38, 0.62)
        wide = 1 / math.sqrt(1 + flat * flat)
        high = flat * wide
        points, turn = [(-wide, -high), (wide, -high), (wide, high), (-wide, high)], rng.choice((0, 0, 0, 10))
        if rng.random() < 0.35:
            points = [(y, x) for x, y in points]
    elif name == "diamond":
        flat = rng.uniform(0.6, 1.0)
        points, turn = [(0.0, -1.0), (flat, 0.0), (0.0, 1.0), (-flat, 0.0)], rng.choice((0, 0, 5))
        if rng.random() < 0.3:
            points = [(y, x) for x, y in points]
    elif name == "cross":
        arm = rng.uniform(0.13, 0.33)
        points = [
            (arm, -0.93), (arm, -arm), (0.93, -arm), (0.93, arm), (arm, arm), (arm, 0.93),
            (-arm, 0.93), (-arm, arm), (-0.93, arm), (-0.93, -arm), (-arm, -arm), (-arm, -0.93),
        ]  # fmt: skip
        turn = 6
        if rng.random() < 0.3:
            points = turned(points, 45)
    else:
        points, turn = _triangle(rng), rng.choice((0, 0, 0, 15))
        if rng.random() < 0.12:
            points = [(x, -y) for x, y in points]
    return turned(points, rng.uniform(-turn, turn)) if turn else points


def turned(points: list[Point], degrees: float) -> list[Point]:
    """Return points turned around the middle."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * c - y * s, x * s + y * c) for x, y in points]


def _by_hand(rng: random.Random, points: list[Point]) -> list[Point]:
    """Return an outline as a hand draws it: a little off, more so the farther around."""
    if len(points) < 20:  # corners: let the sides bend
        points = [
            (a[0] + (b[0] - a[0]) * part / 4, a[1] + (b[1] - a[1]) * part / 4)
            for a, b in zip(points, points[1:] + points[:1], strict=True)
            for part in range(4)
        ]
    waves = [(rng.uniform(0.0, 0.02), rng.uniform(0, 2 * math.pi), rng.randint(2, 5)) for _ in range(3)]
    drawn = []
    for step, (x, y) in enumerate(points):
        at = 2 * math.pi * step / len(points)
        swell = 0.95 + sum(size * math.sin(times * at + start) for size, start, times in waves)
        drawn.append((x * swell + rng.gauss(0, 0.006), y * swell + rng.gauss(0, 0.006)))
    return drawn


def _border(shape: Shape, paper: Rgb) -> Rgb:
    """Return the colour of a thin border around a filled shape: darker, where that is seen."""
    red, green, blue = (channel * 6 // 10 for channel in shape.ink)
    return (red, green, blue) if distance((red, green, blue), paper) > 60 else shape.ink


def _draw_shape(
    rng: random.Random, pen: Any, shape: Shape, points: list[Point], style: "_Style", paper: Rgb
) -> None:
    radius = shape.radius * style.zoom
    if style.by_hand:
        points = _by_hand(rng, points)
    thick = max(2 * style.zoom, round(radius * style.stroke)) if not shape.filled else 0
    reach = radius - thick * 0.5
    x, y = shape.x * style.zoom, shape.y * style.zoom
    placed = [(x + px * reach, y + py * reach) for px, py in points]
    if shape.filled:
        if shape.name == "circle" and not style.by_hand:
            pen.ellipse((x - reach, y - reach, x + reach, y + reach), fill=shape.ink)
        else:
            pen.polygon(placed, fill=shape.ink)
        if style.border and radius > 12 * style.zoom:
            edge = max(1, round(radius * 0.04))
            inner = [(x + px * (reach - edge), y + py * (reach - edge)) for px, py in points]
            pen.line([*inner, inner[0], inner[1]], fill=_border(shape, paper), width=edge, joint="curve")
    else:
        pen.line([*placed, placed[0], placed[1]], fill=shape.ink, width=round(thick), joint="curve")


class _Style:
    """How one picture is drawn: everything on it in the same way."""

    def __init__(self, rng: random.Random, area: int) -> None:
        self.zoom = 2 if area <= 2 * MODEL_AREA and rng.random() < 0.7 else 1  # antialiasing
        self.by_hand = rng.random() < 0.25
        self.stroke = rng.choice((0.1, 0.14, 0.18, 0.22))
        self.border = rng.random() < 0.15


def _paste_number(rng: random.Random, image: Any, number: Number, zoom: int) -> None:
    mask = number_mask(
        rng, number.text, max(8, round(number.width * zoom)), max(8, round(number.height * zoom))
    )
    left = round(number.x * zoom - mask.width / 2)
    top = round(number.y * zoom - mask.height / 2)
    left = max(0, min(left, image.width - mask.width))
    top = max(0, min(top, image.height - mask.height))
    image.paste(number.ink, (left, top), mask)


def _aged(rng: random.Random, image: Any) -> Pixels:
    """Return a picture's pixels with what cameras and files do to them, seldom enough to stay cheap."""
    kind = rng.random()
    if kind < 0.1:
        stream = BytesIO()
        image.save(stream, "JPEG", quality=rng.randint(35, 90))
        image = Image.open(stream).convert("RGB")
    elif (
        kind < 0.15 and image.width * image.height < 4 * MODEL_AREA
    ):  # to blur a large picture takes too long
        image = image.filter(ImageFilter.BoxBlur(0.6 * max(1.0, min(image.size) / 200)))
    pixels = np.array(image, dtype=np.uint8)
    if 0.15 <= kind < 0.23:
        noise = np.random.default_rng(rng.getrandbits(32))
        strength = rng.choice((4, 8, 16))
        grain = noise.integers(0, 2 * strength + 1, size=(*pixels.shape[:2], 1), dtype=np.int16)
        pixels = np.clip(pixels.astype(np.int16) + grain - strength, 0, 255).astype(np.uint8)
    return pixels


def _furnish(rng: random.Random, pen: Any, scene: Scene, zoom: int) -> None:
    """Draw what is on a picture besides its content: the faint lines of writing paper, or a window's thin frame."""
    sign = -1 if sum(scene.paper) > 380 else 1
    depth = rng.randint(10, 22)
    red, green, blue = (min(255, max(0, channel + sign * depth)) for channel in scene.paper)
    wide, high = scene.width * zoom, scene.height * zoom
    kind = rng.choice(("frame", "lines", "grid")) if scene.kind == "things" else "lines"
    if kind == "frame":
        pen.rectangle((0, 0, wide - 1, high - 1), outline=(red, green, blue), width=zoom)
        return
    step = max(10 * zoom, min(wide, high) // rng.randint(6, 14))
    for y in range(step, high, step):
        pen.line((0, y, wide, y), fill=(red, green, blue), width=zoom)
    if kind == "grid":
        for x in range(step, wide, step):
            pen.line((x, 0, x, high), fill=(red, green, blue), width=zoom)


def render(scene: Scene, rng: random.Random) -> Pixels:
    """Return a scene's picture, [height, width, 3]."""
    if scene.kind not in ("things", "blank"):
        return _aged(rng, draw_unknown(rng, scene.kind, scene.width, scene.height, scene.paper))
    style = _Style(rng, scene.width * scene.height)
    zoom = style.zoom if scene.kind == "things" else 1
    image = Image.new("RGB", (scene.width * zoom, scene.height * zoom), scene.paper)
    pen = ImageDraw.Draw(image)
    if rng.random() < 0.08:
        _furnish(rng, pen, scene, zoom)
    outlines: dict[str, list[Point]] = {}
    alike = rng.random() < 0.7  # all of a name in the same form
    for shape in scene.shapes:
        if not alike or shape.name not in outlines:
            outlines[shape.name] = outline(rng, shape.name)
        _draw_shape(rng, pen, shape, outlines[shape.name], style, scene.paper)
    if scene.number:
        _paste_number(rng, image, scene.number, zoom)
    if zoom > 1:
        image = image.reduce(zoom)
    return _aged(rng, image)
