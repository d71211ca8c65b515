"""Questions about one picture with their answers, by skill; each is asked only where the answer is beyond doubt.

Knows nothing of drawing, nor of what else is said in a dialogue.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from training.vision.language import (
    SIDES,
    article,
    asked,
    asked_side,
    colour_word,
    count_word,
    inventory,
    listed,
    place_word,
    plural,
    say,
    side_word,
    what,
)
from training.vision.palette import COLOURS
from training.vision.scene import MAX_COUNT, MAX_DIGITS, SHAPES, Number, Scene, Shape
from training.vision.wordings import ask

Pair = tuple[str, str]  # a question and its answer
Asker = Callable[[random.Random, str, Scene, bool], Pair | None]


def description(language: str, scene: Scene) -> str:
    """Return the sentence that says what is on a picture, in the order of the shapes' and the colours' lists."""
    if scene.kind != "things":
        return say(language, "blank" if scene.kind == "blank" else "unknown")
    if len(scene.shapes) > MAX_COUNT:
        return _counted(language, len(scene.shapes))
    if _is_too_long(scene):
        return say(language, "too long")
    counts = scene.counts
    groups = [
        (shape, colour, counts[shape, colour])
        for shape in SHAPES
        for colour in COLOURS
        if counts[shape, colour]
    ]
    return inventory(language, groups, scene.number.text if scene.number else "")


def _is_too_long(scene: Scene) -> bool:
    return scene.number is not None and len(scene.number.text) > MAX_DIGITS


def _counted(language: str, count: int, shape: str = "", colour: str = "") -> str:
    noun = what(language, shape, colour)
    whats = plural(noun) if language == "en" and count > 1 else noun
    if count == 0:
        return say(language, "none", what=noun)
    if count > MAX_COUNT:
        return say(language, "more", what=noun, whats=whats)
    are = "is" if count == 1 else "are"
    return say(language, "count", what=noun, whats=whats, are=are, count=count_word(language, count))


def _found(scene: Scene, shape: str = "", colour: str = "") -> list[Shape]:
    return [each for each in scene.shapes if shape in ("", each.name) and colour in ("", each.colour)]


def _alone(rng: random.Random, scene: Scene, coloured: bool | None = None) -> list[tuple[Shape, str, str]]:
    """Return each shape that a name picks out, with that name: by shape, or with its colour too."""
    names = Counter(shape.name for shape in scene.shapes)
    picked = []
    for shape in scene.shapes:
        if scene.counts[shape.name, shape.colour] > 1:
            continue
        full = names[shape.name] > 1 or (rng.random() < 0.4 if coloured is None else coloured)
        picked.append((shape, shape.name, shape.colour if full else ""))
    return picked


def _wished(rng: random.Random, scene: Scene, presence: float) -> tuple[str, str]:
    """Return a shape and a colour to ask for, either of them open: there, or often only almost there."""
    kind = rng.random()
    if scene.shapes and rng.random() < presence:
        chosen = rng.choice(scene.shapes)
        shape, colour = chosen.name, chosen.colour
    else:
        shape, colour = rng.choice(SHAPES), rng.choice(COLOURS)
        if scene.shapes and kind < 0.5:  # right in one, wrong in the other
            chosen = rng.choice(scene.shapes)
            shape, colour = (chosen.name, colour) if rng.random() < 0.5 else (shape, chosen.colour)
            return shape, colour
    return (shape, "") if kind < 0.45 else ("", colour) if kind < 0.7 else (shape, colour)


def describe(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """What is in this picture?"""
    one = scene.kind == "things" and len(scene.shapes) == 1 and not scene.number
    form = "what shape" if one and rng.random() < 0.35 else "describe"
    return ask(rng, language, form, held_out), description(language, scene)


def digits(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """What number is this?"""
    if _is_too_long(scene):
        answer = say(language, "too long")
    elif scene.number:
        answer = say(language, "number", number=scene.number.text)
    else:
        answer = say(language, "no number")
    return ask(rng, language, "digits", held_out), answer


def _colours(language: str, scene: Scene, shape: str) -> str:
    found = _found(scene, shape)
    words = [
        colour_word(language, colour) for colour in COLOURS if any(each.colour == colour for each in found)
    ]
    noun = what(language, shape)
    many = len(found) > 1
    return say(
        language, "colour", what=noun, whats=plural(noun) if language == "en" and many else noun,
        be="are" if many else "is", colours=listed(language, words),
    )  # fmt: skip


def colour(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """What colour is the circle?"""
    number = scene.number
    if number and (not scene.shapes or rng.random() < 0.25):
        answer = say(language, "colour of number", colours=colour_word(language, number.colour))
        if not scene.shapes and rng.random() < 0.4:
            return ask(rng, language, "what colour", held_out), answer
        noun = {"en": "number"}.get(language, "数字")
        return ask(rng, language, "colour", held_out, what=noun), answer
    if len(scene.shapes) == 1 and not number and rng.random() < 0.3:
        return ask(rng, language, "what colour", held_out), _colours(language, scene, scene.shapes[0].name)
    shape = rng.choice(scene.shapes).name if scene.shapes and rng.random() < 0.88 else rng.choice(SHAPES)
    question = ask(rng, language, "colour", held_out, what=asked(rng, language, shape))
    if not _found(scene, shape):
        return question, say(language, "none", what=what(language, shape))
    return question, _colours(language, scene, shape)


def check(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Is the circle red? Asked of what there is once."""
    names = Counter(each.name for each in scene.shapes)
    once = [each for each in scene.shapes if names[each.name] == 1]
    if not once:
        return None
    chosen = rng.choice(once)
    tint = chosen.colour if rng.random() < 0.5 else rng.choice(COLOURS)
    if tint != chosen.colour and len(scene.shapes) > 1 and rng.random() < 0.5:
        tint = rng.choice(scene.shapes).colour  # what another shape has
    question = ask(
        rng,
        language,
        "check",
        held_out,
        what=asked(rng, language, chosen.name),
        colour=colour_word(language, tint),
    )
    fact = "yes colour" if tint == chosen.colour else "no colour"
    return question, say(
        language, fact, what=what(language, chosen.name), colours=colour_word(language, chosen.colour)
    )


def shape(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Which shape is red?"""
    tint = rng.choice(scene.shapes).colour if scene.shapes and rng.random() < 0.85 else rng.choice(COLOURS)
    if len(scene.shapes) > MAX_COUNT or (scene.number and scene.number.colour == tint):
        return None  # too many to be named, or the number would be too
    question = ask(
        rng,
        language,
        "shape",
        held_out,
        colour=colour_word(language, tint),
        what=asked(rng, language, "", tint),
    )
    counts = scene.counts
    groups = [(name, tint, counts[name, tint]) for name in SHAPES if counts[name, tint]]
    if not groups:
        return question, say(language, "none", what=what(language, "", tint))
    return question, inventory(language, groups, "")


def count(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """How many circles are there?"""
    if len(scene.shapes) > MAX_COUNT or rng.random() < 0.25:
        name, tint = "", ""
    else:
        name, tint = _wished(rng, scene, 0.8)
    noun = asked(rng, language, name, tint)
    question = ask(
        rng, language, "count", held_out, what=noun, whats=plural(noun) if language == "en" else noun
    )
    return question, _counted(language, len(_found(scene, name, tint)), name, tint)


def exists(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Is there a star?"""
    if len(scene.shapes) > MAX_COUNT or _is_too_long(scene):
        return None
    if rng.random() < 0.15:
        question = ask(rng, language, "exists number", held_out)
        if scene.number:
            return question, say(language, "yes number", number=scene.number.text)
        return question, say(language, "no", what={"en": "number"}.get(language, "数字"))
    name, tint = _wished(rng, scene, 0.5)
    noun = what(language, name, tint)
    found = len(_found(scene, name, tint))
    whats = plural(noun) if language == "en" else noun
    term = asked(rng, language, name, tint)
    terms = plural(term) if language == "en" else term
    question = ask(rng, language, "exists", held_out, what=term, whats=terms, a_what=article(term))
    if not found:
        return question, say(language, "no", what=noun)
    if found == 1 and language == "en":
        return question, say(language, "yes", are="is", count=article(noun).split()[0], whats=noun)
    return question, say(
        language, "yes", are="are", count=count_word(language, found), whats=whats, what=noun
    )


def cell(scene: Scene, thing: Shape | Number) -> int | None:
    """Return the cell of three by three that a thing's centre lies in, or None if it is near a border of cells."""
    cells = []
    for at, size in ((thing.x, scene.width), (thing.y, scene.height)):
        part = at / size
        cells.append(0 if part < 0.31 else 1 if 0.41 < part < 0.59 else 2 if part > 0.69 else None)
    column, row = cells
    return None if column is None or row is None else row * 3 + column


def position(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Where is the circle?"""
    if len(scene.shapes) > MAX_COUNT:
        return None
    number = scene.number
    if number and rng.random() < 0.25:
        at = cell(scene, number)
        if at is None:
            return None
        noun = {"en": "number"}.get(language, "数字")
        question = ask(rng, language, "position", held_out, what=noun)
        return question, say(language, "place of number", place=place_word(language, at))
    if rng.random() < 0.1:
        name, tint = _wished(rng, scene, 0.0)
        if _found(scene, name, tint):
            return None
        noun = what(language, name, tint)
        question = ask(rng, language, "position", held_out, what=asked(rng, language, name, tint))
        return question, say(language, "none", what=noun)
    places = [(each, cell(scene, each[0])) for each in _alone(rng, scene)]
    known = [(each, at) for each, at in places if at is not None]
    if not known:
        return None
    (_, name, tint), at = rng.choice(known)
    noun = what(language, name, tint)
    question = ask(rng, language, "position", held_out, what=asked(rng, language, name, tint))
    return question, say(language, "place", what=noun, place=place_word(language, at))


def _along(scene: Scene, side: str, one: Shape, other: Shape) -> float:
    """Return how far the other lies on this side of the one, in parts of the picture."""
    if side in ("left", "right"):
        part = (other.x - one.x) / scene.width
        return part if side == "right" else -part
    part = (other.y - one.y) / scene.height
    return part if side == "below" else -part


_CLEAR: Final = 0.16  # least distance of two centres, as a share of the picture's width or height


def relation(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """What is to the left of the circle? Asked of two or three shapes, if one or none is clearly there."""
    alone = _alone(rng, scene)
    if not 2 <= len(scene.shapes) <= 3 or scene.number or not alone:
        return None
    one, name, tint = rng.choice(alone)
    side = rng.choice(SIDES)
    across = [_along(scene, side, one, other) for other in scene.shapes if other is not one]
    others = [other for other in scene.shapes if other is not one]
    there = [other for other, far in zip(others, across, strict=True) if far > _CLEAR]
    if any(0 < far <= _CLEAR or -_CLEAR / 2 < far <= 0 for far in across) or len(there) > 1:
        return None
    noun, word = what(language, name, tint), side_word(language, side)
    question = ask(
        rng,
        language,
        "relation",
        held_out,
        what=asked(rng, language, name, tint),
        side=asked_side(rng, language, side),
    )
    if not there:
        return question, say(language, "nothing on that side", what=noun, side=word)
    return question, inventory(language, [(there[0].name, there[0].colour, 1)], "")


_OPPOSITE: Final = {"left": "right", "right": "left", "above": "below", "below": "above"}


def compare(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Is the circle to the left of the square?"""
    alone = _alone(rng, scene)
    if len(alone) < 2 or len(scene.shapes) > 3:
        return None
    (one, name, tint), (other, other_name, other_tint) = rng.sample(alone, 2)
    side = rng.choice(SIDES)
    far = _along(scene, side, other, one)
    if abs(far) < _CLEAR:
        return None
    noun, second = what(language, name, tint), what(language, other_name, other_tint)
    question = ask(
        rng, language, "compare", held_out, what=asked(rng, language, name, tint),
        other=asked(rng, language, other_name, other_tint), side=asked_side(rng, language, side),
    )  # fmt: skip
    true = side if far > 0 else _OPPOSITE[side]
    fact = "yes, on that side" if far > 0 else "no, not on that side"
    return question, say(language, fact, what=noun, other=second, side=side_word(language, true))


def size(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """Which shape is the biggest? Asked where one is clearly so."""
    if not 2 <= len(scene.shapes) <= MAX_COUNT or scene.number:
        return None
    order = sorted(scene.shapes, key=lambda each: each.radius)
    options = []
    if order[-1].radius > 1.7 * order[-2].radius:
        options.append(("biggest", order[-1]))
    if order[0].radius < order[1].radius / 1.7:
        options.append(("smallest", order[0]))
    if not options:
        return None
    fact, chosen = rng.choice(options)
    answer = say(language, fact, what=what(language, chosen.name, chosen.colour))
    return ask(rng, language, fact, held_out), answer


def background(rng: random.Random, language: str, scene: Scene, held_out: bool) -> Pair | None:
    """What colour is the background?"""
    if not scene.paper_name:
        return None
    answer = say(language, "background", colours=colour_word(language, scene.paper_name))
    return ask(rng, language, "background", held_out), answer


ASKERS: Final[dict[str, Asker]] = {
    "describe": describe, "digits": digits, "colour": colour, "check": check, "shape": shape, "count": count,
    "exists": exists, "position": position, "relation": relation, "compare": compare, "size": size,
    "background": background,
}  # fmt: skip
