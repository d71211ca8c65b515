"""Facts that stand in the prompt: in the instructions, in a context, in what the user pasted; short or very long.

Everything in them is invented, so the answer can only come from the prompt. Knows nothing of Harmony or tokens.
"""

import random
from typing import Final

from training.chat.exchange import Exchange, Reply
from training.chat.phrasing import phrase, preceded
from training.chat.skills import UNKNOWN
from training.chat.words import NAME_PARTS, THINGS, invent, person, place, sentence, things

REPETITIVE: Final = 0.35  # share of the texts around facts that repeat the same few sentences
Entry = tuple[str, str, str]  # attribute, whose it is, value

_ATTRIBUTES: Final = (
    "code", "password", "price", "owner", "number", "address", "size", "deadline", "room", "author", "colour",
    "age", "weight", "name",
    "phone number", "manager", "date", "height", "address", "price", "secret word", "password", "key", "status",
    "team", "city",
)  # fmt: skip
_STATED: Final = (
    "The {what} of {whose} is {value}.", "The {what} of {whose} is {value}.", "{whose}'s {what} is {value}.",
    "The {what} of {whose}: {value}.", "Note: the {what} of {whose} is {value}.",
)  # fmt: skip
_ASKED: Final = (
    "What is the {what} of {whose}?", "What's the {what} of {whose}?", "Tell me the {what} of {whose}.",
    "The {what} of {whose}?",
    "What is {whose}'s {what}?", "Do you know the {what} of {whose}?", "Give me the {what} of {whose}.",
    "According to the text, what is the {what} of {whose}?", "Which is the {what} of {whose}?",
    "Look up the {what} of {whose}.",
)  # fmt: skip
_CONTEXT: Final = (
    "Use the following context as your learned knowledge, inside <context></context> XML tags.\n\n"
    "<context>\n{text}\n</context>",
    "Context:\n{text}", "Answer with the help of this text.\n\n{text}", "Documents:\n\n{text}",
    "<context>\n{text}\n</context>",
    "You answer questions about these notes:\n{text}", "{text}",
)  # fmt: skip


def entry(rng: random.Random) -> Entry:
    """Return an invented fact."""
    what = (
        rng.choice(_ATTRIBUTES) if rng.random() < 0.7 else rng.choice((invent(rng), rng.choice(NAME_PARTS)))
    )
    whose = rng.choice(
        (
            invent(rng, capital=True),
            f"the {rng.choice(THINGS)}",
            person(rng),
            f"the {invent(rng)}",
            f"{invent(rng, capital=True)} {rng.choice(THINGS)}",
        )
    )
    value = rng.choice(
        (
            invent(rng),
            str(rng.randint(0, 99_999)),
            things(rng, 2),
            place(rng),
            person(rng),
            f"{rng.randint(1, 99)} {rng.choice(THINGS)}",
        )
    )
    return what, whose, value


def entries(rng: random.Random, count: int) -> list[Entry]:
    """Return facts of which no two have the same subject."""
    drawn: dict[tuple[str, str], Entry] = {}
    while len(drawn) < count:
        one = entry(rng)
        drawn.setdefault(one[:2], one)
    return list(drawn.values())


def stated(rng: random.Random, known: list[Entry], size: int) -> str:
    """Return the facts as sentences, among about `size` characters of prose."""
    lines = [rng.choice(_STATED).format(what=what, whose=whose, value=value) for what, whose, value in known]
    lines = [line[0].upper() + line[1:] for line in lines]
    pool = [sentence(rng, 4, 16) for _ in range(rng.randint(1, 6))] if rng.random() < REPETITIVE else []
    prose: list[str] = []
    left = size
    while left > 0:
        prose.append(rng.choice(pool) if pool else sentence(rng, 4, 16))
        left -= len(prose[-1])
    for line in lines:
        prose.insert(rng.randint(0, len(prose)), line)
    separator = rng.choice((" ", " ", "\n", "\n\n"))
    return separator.join(prose)


def context(rng: random.Random, known: list[Entry], size: int) -> str:
    """Return instructions that hold the facts."""
    return rng.choice(_CONTEXT).format(text=stated(rng, known, size))


def lookup(rng: random.Random, known: list[Entry]) -> Exchange:
    """A question about one of the facts, or seldom about one that is not there."""
    is_there = bool(known) and rng.random() < 0.82
    what, whose, value = rng.choice(known) if is_there else entry(rng)
    message, _ = phrase(rng, _ASKED, what=what, whose=whose)
    low = f"The {what} of {whose}."
    if not is_there:
        medium = "I look for it in the text. It is not there, and I never learned it."
        high = (
            "Let me read the text once more. There is nothing about it. "
            "A made up answer would be worse than no answer."
        )
        return Exchange(
            "passage (absent)",
            "",
            preceded(rng, message, is_broken=False),
            Reply((low, medium, high), UNKNOWN),
        )
    medium = f"I look for {whose} in the text. It says that it is {value}."
    high = (
        f"Let me read that place once more. It is about the {what} and about {whose}. "
        f"I copy {value} letter by letter into my answer."
    )
    reply = Reply((low, medium, high), f"The {what} of {whose} is {value}.")
    return Exchange(
        "passage", "", preceded(rng, message, is_broken=False), reply, title=f"{what.capitalize()} of {whose}"
    )


def pasted(rng: random.Random, size: int) -> Exchange:
    """A question with the text that answers it in the same message."""
    known = entries(rng, rng.randint(1, 4))
    asked = lookup(rng, known)
    text = stated(rng, known, size)
    forms = (
        "{text}\n\n{asked}",
        "{asked}\n\n{text}",
        "Text: {text}\n\nQuestion: {asked}",
        "Context: {text}\nQuestion: {asked}",
        "{text} {asked}",
    )
    message = rng.choice(forms).format(text=text, asked=asked.message.strip())
    return Exchange("pasted text", "", message, asked.reply, title=asked.title)
