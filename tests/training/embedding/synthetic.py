"""Questions about the rules and tools of a workplace, and passages that answer them in other words, in three languages.

A thing (`things.txt`) is named by one of its synonyms in the question and by another in the passage; a question of each
kind (`question_kinds.txt`) can be worded in several ways, and so can its answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

LANGUAGES: Final = ("en", "ja", "zh")


def _read(name: str) -> str:
    """Return a file next to this one, without its first line."""
    return Path(__file__).with_name(name).read_text("utf-8").partition("\n")[2].strip()


def _things() -> list[tuple[list[str], ...]]:
    return [
        tuple(part.strip().split("|") for part in line.split(" / "))
        for line in _read("things.txt").splitlines()
    ]


def _kinds() -> list[tuple[tuple[list[str], list[str]], ...]]:
    blocks = [
        [line.split("|") for line in block.splitlines()]
        for block in _read("question_kinds.txt").split("\n\n")
    ]
    return [tuple(zip(block[::2], block[1::2], strict=True)) for block in blocks]


THINGS: Final = _things()
KINDS: Final = _kinds()


def examples(draw: random.Random, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield a language, a question in it, and a passage that answers it, in another language now and then."""
    for _ in range(count):
        thing, at = draw.choice(THINGS), draw.randrange(len(KINDS))
        asked = draw.randrange(3)
        answered = asked if draw.random() < 0.7 else draw.randrange(3)
        names = thing[asked]
        name = draw.choice(names)
        others = [each for each in thing[answered] if each != name] or [name]
        if draw.random() < 0.25:  # a thesaurus: names, or questions and answers, that mean the same
            side = draw.randrange(2)
            first = draw.choice(KINDS[at][asked][side])
            second = draw.choice(KINDS[at][answered][side])
            yield LANGUAGES[asked], _fill(first, name, draw), _fill(second, draw.choice(others), draw)
            continue
        question = _fill(draw.choice(KINDS[at][asked][0]), name, draw)
        answer = _fill(draw.choice(KINDS[at][answered][1]), draw.choice(others), draw)
        more = [
            _fill(draw.choice(KINDS[other][answered][1]), draw.choice(thing[answered]), draw)
            for other in draw.sample(range(len(KINDS)), draw.choice((0, 0, 1, 2)))
            if other != at
        ]
        passage = [answer, *more]
        draw.shuffle(passage)
        heading = [draw.choice(thing[answered])] if draw.random() < 0.3 else []
        yield LANGUAGES[asked], question, (" " if answered == 0 else "").join([*heading, *passage])


def _fill(template: str, name: str, draw: random.Random) -> str:
    text = template.replace("{x}", name).replace("{n}", str(draw.choice((2, 3, 5, 7, 10, 14, 20, 30, 50))))
    return text[0].upper() + text[1:]
