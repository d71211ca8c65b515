"""What is on a picture, as data: shapes, a number, nothing, or something the model does not know; and where it lies.

A scene is true by construction: things do not overlap, nothing is cut off, every ink is seen on the paper, and nothing
becomes too small to see when the picture is shrunk for the model. Knows nothing of drawing or of words.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from training.vision.palette import COLOURS, Rgb, ink, paper

SHAPES: Final = ("circle", "oval", "square", "rectangle", "triangle", "diamond", "star", "heart", "cross")
MAX_COUNT: Final = 5  # most shapes of a kind that are counted; more are "more than five"
MAX_DIGITS: Final = 4
MODEL_AREA: Final = 160 * 160  # pixels that a larger picture is shrunk to
_MIN_RADIUS: Final = 10.0  # radius of a shape in the model's pixels
_MIN_HEIGHT: Final = 18.0  # height of a digit in the model's pixels


@dataclass(frozen=True)
class Shape:
    """One shape: its name, its colour by name and as drawn, and its place in pixels."""

    name: str
    colour: str
    ink: Rgb
    x: float
    y: float
    radius: float
    filled: bool = True


@dataclass(frozen=True)
class Number:
    """A number as it is written, leading zeros included, in a box of the size given around its centre."""

    text: str
    colour: str
    ink: Rgb
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Scene:
    """A picture's content. `kind` is "things", "blank", or what it shows that the model does not know."""

    width: int
    height: int
    paper: Rgb
    paper_name: str
    kind: str = "things"
    shapes: tuple[Shape, ...] = ()
    number: Number | None = None

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """How many shapes there are of each name and colour."""
        return Counter((shape.name, shape.colour) for shape in self.shapes)


UNKNOWN_KINDS: Final = (
    "noise", "photo", "landscape", "clutter", "clutter", "scribble", "text", "page", "letters", "figure", "gradient",
    "stripes", "chart",
)  # fmt: skip


def is_held(key: str) -> bool:
    """Return whether something is one of the eight parts that training never sees."""
    return crc32(key.encode()) % 8 == 0


def sides(scene: Scene) -> tuple[bool, ...]:
    """Return for each thing that can be held out whether it is: the number, and the shapes as a whole."""
    found = []
    if scene.number and len(scene.number.text) > 1:  # there are too few digits to hold one out
        found.append(is_held(f"number {scene.number.text}"))
    if scene.shapes:
        found.append(is_held(f"shapes {sorted(scene.counts.items())}"))
    return tuple(found)


def is_on_side(scene: Scene, held_out: bool) -> bool:
    """Return whether a scene may stand in training, or has something that training never shows."""
    found = sides(scene)
    return not found or any(found) is held_out


_ASPECTS: Final = (
    (1, 1),
    (1, 1),
    (1, 1),
    (4, 3),
    (3, 2),
    (16, 9),
    (3, 4),
    (2, 3),
    (2, 1),
    (1, 2),
    (3, 1),
    (8, 5),
)


def canvas(rng: random.Random, things: int) -> tuple[int, int]:
    """Return a picture's width and height: an icon only for one thing, seldom something large."""
    kind = rng.random()
    if things <= 1 and kind < 0.1:
        side = rng.choice((32, 40, 48, 64, 64, 80))
        return side, side
    if kind < 0.7:
        long = rng.randint(110 if things <= 2 else 160, 320)
    elif kind < 0.95:
        long = rng.randint(320, 520)
    else:
        long = rng.randint(520, 900)
    if rng.random() < 0.3:
        long = max(128, long // 32 * 32)
    across, down = rng.choice(_ASPECTS)
    if rng.random() < 0.25:
        across, down = rng.randint(12, 32), 20
    short = max(64 if things <= 2 else 110, round(long * min(across, down) / max(across, down)))
    return (long, min(long, short)) if across >= down else (min(long, short), long)


def shrinking(width: int, height: int) -> float:
    """Return how much of its size a picture keeps in the model's eye; small ones are never counted as grown."""
    return min(1.0, math.sqrt(MODEL_AREA / (width * height)))


@dataclass
class _Box:
    """Half the width and height of one thing while places are tried, and where it lies."""

    across: float
    down: float
    x: float = 0.0
    y: float = 0.0


def _overlap(one: _Box, other: _Box, gap: float) -> bool:
    return (
        abs(one.x - other.x) < one.across + other.across + gap
        and abs(one.y - other.y) < one.down + other.down + gap
    )


def _scattered(rng: random.Random, boxes: list[_Box], width: int, height: int) -> bool:
    gap = 0.02 * min(width, height)
    for place, box in enumerate(boxes):
        for _ in range(30):
            box.x = rng.uniform(box.across + 1.5, width - box.across - 1.5)
            box.y = rng.uniform(box.down + 1.5, height - box.down - 1.5)
            if not any(_overlap(box, other, gap) for other in boxes[:place]):
                break
        else:
            return False
    return True


def _in_line(rng: random.Random, boxes: list[_Box], width: int, height: int) -> bool:
    """Set things in a row, or in a column on a tall picture, evenly."""
    column = height > width * 1.2 or (height > width * 0.8 and rng.random() < 0.4)
    room = (height if column else width) / len(boxes)
    middle = rng.uniform(0.4, 0.6)
    for place, box in enumerate(boxes):
        along, aside = (box.down, box.across) if column else (box.across, box.down)
        if along > room * 0.48:
            return False
        slack = min(room * 0.48 - along, room * 0.06)
        spot = (place + 0.5) * room + rng.uniform(-slack, slack)
        size = width if column else height
        across = min(max(size * (middle + rng.uniform(-0.03, 0.03)), aside + 1.5), size - aside - 1.5)
        box.x, box.y = (across, spot) if column else (spot, across)
    return True


def _placed(rng: random.Random, boxes: list[_Box], width: int, height: int) -> bool:
    """Find places for all boxes; whether there were any."""
    if any(2 * box.across + 3 > width or 2 * box.down + 3 > height for box in boxes):
        return False
    if len(boxes) == 1 and rng.random() < 0.6:
        box = boxes[0]
        box.x = width / 2 + rng.uniform(-0.2, 0.2) * (width / 2 - box.across)
        box.y = height / 2 + rng.uniform(-0.2, 0.2) * (height / 2 - box.down)
        return True
    if len(boxes) > 1 and rng.random() < 0.3:
        return _in_line(rng, boxes, width, height)
    return _scattered(rng, boxes, width, height)


_DIGIT_WIDTH: Final = 0.66  # width of a digit and the space next to it, as a share of its height


def _number_box(rng: random.Random, text: str, width: int, height: int, alone: bool) -> _Box:
    tall = rng.uniform(0.25, 0.9) if alone else rng.uniform(0.18, 0.45)
    down = min(tall * height, 0.94 * width / (len(text) * _DIGIT_WIDTH)) / 2
    return _Box(down * _DIGIT_WIDTH * len(text), down)


def arrange(
    rng: random.Random, kinds: list[tuple[str, str]], number: str = "", one_stands_out: bool = False
) -> Scene:
    """Return a scene with these shapes (name, colour wished for) and this number, at places of its own.

    The first shape may stand out by its size: much larger than all others, or much smaller.
    """
    while True:
        name, rgb = paper(rng)
        width, height = canvas(rng, len(kinds) + bool(number) * (1 + len(number) // 3))
        least = min(width, height)
        scale = shrinking(width, height)
        total = len(kinds) + bool(number)
        largest = {1: 0.46, 2: 0.3, 3: 0.26, 4: 0.23}.get(total, 0.2 if total < 7 else 0.15)
        common = rng.uniform(0.1, largest) * least if rng.random() < 0.4 else 0.0
        is_big = rng.random() < 0.5
        for shrink in (1.0, 0.85, 0.7, 0.6):
            boxes = []
            for place in range(len(kinds)):
                radius = (common or rng.uniform(0.1, largest) * least) * shrink
                if one_stands_out:
                    radius = least * largest * shrink * rng.uniform(0.85, 1.0)
                    radius /= 1.0 if is_big is (place == 0) else 2.2
                radius = max(radius, min(_MIN_RADIUS / scale, 0.3 * least))
                boxes.append(_Box(radius, radius))
            if number:
                boxes.append(_number_box(rng, number, width, height, alone=not kinds))
                boxes[-1].across *= shrink
                boxes[-1].down *= shrink
                if boxes[-1].down * 2 * scale < _MIN_HEIGHT:
                    break
            if not _placed(rng, boxes, width, height):
                continue
            inks: dict[str, Rgb] = {}
            shapes = []
            filled = rng.choice((1.0, 1.0, 0.6, 0.0))
            thin = filled < 1 or bool(number)
            for (shape, colour), box in zip(kinds, boxes, strict=False):
                drawn, tint = ink(rng, rgb, name, colour, thin)
                tint = inks.setdefault(drawn, tint)  # one shade of a colour on one picture
                shapes.append(Shape(shape, drawn, tint, box.x, box.y, box.across, rng.random() < filled))
            written = None
            if number:
                colour = rng.choice(("black", "black", "white", *COLOURS))
                drawn, tint = ink(rng, rgb, name, colour, thin)
                box = boxes[-1]
                written = Number(
                    number, drawn, inks.get(drawn, tint), box.x, box.y, 2 * box.across, 2 * box.down
                )
            return Scene(width, height, rgb, name, "things", tuple(shapes), written)


def _kinds(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return names and colours of shapes; some of them alike, as counting needs."""
    names = rng.sample(SHAPES, min(count, rng.choice((1, 2, 2, 3, 5))))
    colours = rng.sample(COLOURS, min(count, rng.choice((1, 2, 3, 5))))
    return [(rng.choice(names), rng.choice(colours)) for _ in range(count)]


def digits(rng: random.Random, length: int = 0) -> str:
    """Return a number as it is written, at times with zeros in front."""
    length = length or rng.choices((1, 2, 3, 4), (0.3, 0.25, 0.25, 0.2))[0]
    text = "".join(rng.choices("0123456789", k=length))
    if length > 1 and text[0] == "0" and rng.random() < 0.8:
        return rng.choice("123456789") + text[1:]
    return text


CONTENTS: Final = {  # and how often each is drawn
    "one": 14, "pair": 22, "shapes": 28, "number": 22, "long number": 2, "mixed": 13, "many": 2, "blank": 3,
    "unknown": 8,
}  # fmt: skip


def draw_scene(rng: random.Random, content: str = "", held_out: bool = False) -> Scene:
    """Return a scene on one side of the split, with the content given or any of `CONTENTS`."""
    content = content or rng.choices(list(CONTENTS), list(CONTENTS.values()))[0]
    while True:
        if content in ("blank", "unknown"):
            name, rgb = paper(rng)
            width, height = canvas(rng, 1)
            kind = "blank" if content == "blank" else rng.choice(UNKNOWN_KINDS)
            if kind != "blank":
                width, height = max(width, 64), max(height, 64)
            return Scene(width, height, rgb, name, kind)
        count = {
            "one": 1, "pair": rng.choice((2, 2, 3)), "shapes": rng.randint(2, MAX_COUNT), "many": rng.randint(6, 9),
            "mixed": rng.choice((1, 1, 2, 2, 3)),
        }.get(content, 0)  # fmt: skip
        text = digits(rng) if content in ("number", "mixed") else ""
        if content == "long number":
            text = digits(rng, rng.randint(MAX_DIGITS + 1, 8))
        if content == "pair":
            names, colours = rng.sample(SHAPES, count), rng.choices(COLOURS, k=count)
            scene = arrange(rng, list(zip(names, colours, strict=True)), "", rng.random() < 0.45)
        else:
            scene = arrange(rng, _kinds(rng, count), text)
        if is_on_side(scene, held_out):
            return scene
