"""Colours by name, as people draw with them, and whether two can be told apart. Knows nothing of pictures."""

import random
from typing import Final

Rgb = tuple[int, int, int]

# What programs, style sheets and office software call by the name, without what lies between two names.
ANCHORS: Final[dict[str, tuple[Rgb, ...]]] = {
    "red": ((255, 0, 0), (220, 20, 40), (230, 30, 30), (204, 0, 0), (239, 68, 68), (244, 67, 54)),
    "orange": ((255, 165, 0), (255, 140, 0), (255, 152, 0), (249, 115, 22), (255, 128, 0), (245, 130, 32)),
    "yellow": ((255, 255, 0), (255, 235, 59), (253, 224, 40), (250, 220, 20), (255, 230, 0)),
    "green": (
        (0, 128, 0), (0, 255, 0), (76, 175, 80), (34, 197, 94), (0, 160, 60), (46, 139, 87), (50, 205, 50),
        (34, 139, 34), (0, 100, 0),
    ),
    "blue": (
        (0, 0, 255), (33, 150, 243), (59, 130, 246), (30, 60, 200), (0, 0, 200), (65, 105, 225), (0, 100, 220),
        (20, 30, 160), (80, 160, 255),
    ),
    "purple": ((128, 0, 128), (156, 39, 176), (160, 70, 240), (147, 51, 234), (106, 13, 173), (138, 43, 226)),
    "pink": ((255, 192, 203), (255, 105, 180), (236, 72, 153), (255, 150, 190), (244, 143, 177)),
    "brown": ((165, 42, 42), (139, 69, 19), (121, 85, 72), (150, 75, 0), (110, 60, 30), (160, 82, 45)),
    "black": ((0, 0, 0), (20, 20, 20), (33, 33, 33)),
    "white": ((255, 255, 255), (250, 250, 250), (245, 245, 245)),
    "grey": ((128, 128, 128), (150, 150, 150), (169, 169, 169), (110, 110, 110), (158, 158, 158)),
}  # fmt: skip
COLOURS: Final = tuple(ANCHORS)
_MIN_DISTANCE: Final = 140.0  # distance of two light colours, such as pink on white
_MIN_DISTANCE_IN_THE_DARK: Final = 255.0  # distance of two colours of which neither is very light
_THIN: Final = 1.25  # factor on these distances for lines and digits


def shade(rng: random.Random, name: str) -> Rgb:
    """Return a colour that everybody would call by this name."""
    anchors = ANCHORS[name]
    if rng.random() < 0.5:
        return anchors[0] if rng.random() < 0.5 else rng.choice(anchors)
    one, other, part = rng.choice(anchors), rng.choice(anchors), rng.random()
    spread = 0 if name in ("black", "white", "grey") else 8
    red, green, blue = (
        min(255, max(0, round(a + (b - a) * part) + rng.randint(-spread, spread)))
        for a, b in zip(one, other, strict=True)
    )
    return red, green, blue


def distance(one: Rgb, other: Rgb) -> float:
    """Return how far apart two colours look: the weighted distance called redmean."""
    mean = (one[0] + other[0]) / 2
    red, green, blue = (a - b for a, b in zip(one, other, strict=True))
    return float(
        ((2 + mean / 256) * red * red + 4 * green * green + (2 + (255 - mean) / 256) * blue * blue) ** 0.5
    )


def _light(colour: Rgb) -> float:
    return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]


def _luminance(colour: Rgb) -> float:
    red, green, blue = ((channel / 255) ** 2.2 for channel in colour)
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


def is_seen(one: Rgb, other: Rgb, thin: bool = False) -> bool:
    """Return whether one colour is easily seen on another, as an area or as thin lines."""
    dark = max(_light(one), _light(other)) < 225
    if thin and max(_light(one), _light(other)) < 95:  # blue on dark grey: far apart, and yet hard to read
        low, high = sorted((_luminance(one), _luminance(other)))
        if high + 0.05 < 1.7 * (low + 0.05):
            return False
    least = _MIN_DISTANCE_IN_THE_DARK if dark else _MIN_DISTANCE
    return distance(one, other) >= (least * _THIN if thin else least)


def ink(
    rng: random.Random, paper: Rgb, paper_name: str, name: str = "", thin: bool = False
) -> tuple[str, Rgb]:
    """Return a colour that is seen on a paper: of the name given, if one is to be had, or of any other."""
    for attempt in range(100):
        chosen = name if name and attempt < 4 else rng.choice(COLOURS)
        if chosen == paper_name:
            continue
        rgb = shade(rng, chosen)
        if is_seen(rgb, paper, thin):
            return chosen, rgb
    raise ValueError(f"no ink is seen on {paper}")


def paper(rng: random.Random) -> tuple[str, Rgb]:
    """Return a paper's colour and its name, or no name where people would not agree on one."""
    kind = rng.random()
    if kind < 0.4:
        return "white", (255, 255, 255)
    if kind < 0.48:
        return "white", shade(rng, "white")
    if kind < 0.66:
        return "", (rng.randint(215, 252), rng.randint(215, 252), rng.randint(205, 250))
    if kind < 0.76:
        return "black", shade(rng, "black")
    if kind < 0.82:
        level = rng.randint(40, 70)
        return "", (level, level + rng.randint(-8, 8), level + rng.randint(-5, 25))
    name = rng.choice(COLOURS)
    return name, shade(rng, name)
