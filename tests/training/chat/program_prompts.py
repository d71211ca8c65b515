"""What prompts of programs are made of: sections of instructions, and the questions that stand in them."""

import random
from typing import Final

from training.chat.exchange import Exchange, is_on_side
from training.chat.skills import Memory, greeting, identity, remember, simple_skill
from training.chat.words import sentence

_HEADS: Final = (
    "Task",
    "Format",
    "Constraint",
    "Memory",
    "Job Description",
    "Instructions",
    "Guidelines",
    "Steps",
    "Example",
    "Output",
    "Note",
)


def section(rng: random.Random, head: str = "", sentences: int = 3) -> str:
    """Return a section of prose under a heading, as lines or as a list."""
    lines = [sentence(rng, 3, 14) for _ in range(rng.randint(1, sentences))]
    style = rng.random()
    if style < 0.25:
        lines = [f"- {line}" for line in lines]
    elif style < 0.4:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
    return f"### {head or rng.choice(_HEADS)}\n" + rng.choice(("\n", " ", "\n")).join(lines)


def padded(rng: random.Random, *important: str, most: int = 5) -> str:
    """Return sections of prose with what matters among them, in order."""
    parts = [section(rng) for _ in range(rng.randint(0, most))]
    places = sorted(rng.randint(0, len(parts)) for _ in important)
    for shift, (at, text) in enumerate(zip(places, important, strict=True)):
        parts.insert(at + shift, text)
    if rng.random() < 0.5:
        parts.insert(rng.randint(0, len(parts)), "### Memory\n<histories>\n\n</histories>")
    return "\n".join(parts)


def question(rng: random.Random, held: bool) -> Exchange:
    """Return what a user may have asked."""
    while True:
        draw = rng.random()
        skill = (
            (lambda r: remember(r, Memory()))
            if draw < 0.08
            else rng.choice((greeting, identity))  # of many wordings, each of them seldom
            if draw < 0.22
            else simple_skill(rng)
        )
        exchange = skill(rng)
        if is_on_side(exchange, held) and exchange.skill != "echo":
            return exchange
