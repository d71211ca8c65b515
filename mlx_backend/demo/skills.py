"""What the model can do without tools: questions, how it thinks about each, and the right answers.

A skill is a function from a random generator to one `Exchange`. Thoughts are nested: more effort only means
that the same train of thought goes on for longer, so effort decides where to stop and nothing else. Knows
nothing of tools, dialogues, Harmony or tokens.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_backend.demo.words import (
    CAPITALS,
    COLOURS,
    FOREIGN,
    OPPOSITES,
    SOUNDS,
    THINGS,
    invent,
    oddity,
    person,
    place,
    sentence,
    things,
)

EFFORTS: Final = ("low", "medium", "high")
UNKNOWN: Final = "Sorry, I do not know that."
NO_TOOL: Final = "Sorry, I have no tool for that."


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the assistant says to one message: thoughts for low, what medium adds, what high adds on top."""

    thoughts: tuple[str, str, str]
    answer: str = ""
    call: Call | None = None
    preamble: str = ""

    def thinking(self, effort: str) -> str:
        """Return the analysis for an effort."""
        return " ".join(self.thoughts[: EFFORTS.index(effort) + 1])


@dataclass(frozen=True)
class Exchange:
    """A user's message and the reply; after a call, the tool's result and the reply to that.

    `split` says what decides whether the exchange is for training or held out (key and phrasing); it is empty
    where there are too few to hold any out. `result` counts only if `reply` is a call.
    """

    skill: str
    split: str
    ask: str
    reply: Reply
    result: str = ""
    after: Reply | None = None


def held_out(key: str) -> bool:
    """Whether a key (of an exchange, or a tool's name) is kept for the evaluation: always the same eighth."""
    return zlib.crc32(key.encode()) % 8 == 0


@dataclass
class Memory:
    """What the user has told in this dialogue."""

    name: str = ""
    home: str = ""


Skill = Callable[[random.Random], Exchange]


def phrase(rng: random.Random, forms: Sequence[str], **parts: str) -> tuple[str, int]:
    """Return one of the forms filled in, and which; some lose their last mark or first capital, as people write."""
    which = rng.randrange(len(forms))
    text = forms[which].format(**parts)
    if rng.random() < 0.12 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.06 and not forms[which].startswith("{"):
        text = text[0].lower() + text[1:]
    return text, which


def _fact(
    skill: str, rng: random.Random, facts: dict[str, str], forms: Sequence[str], noun: str, says: str
) -> Exchange:
    key = rng.choice(list(facts))
    value = facts[key]
    ask, which = phrase(rng, forms, key=key)
    first = f"The {noun} of {key}."
    more = f"The question is about {key}. The {noun} I learned for it is {value}."
    most = (
        f"Let me check this before I answer. The user wants one {noun} and nothing else. "
        f"I look for {key} among the things I learned. There I find {value}. So the answer is {value}."
    )
    return Exchange(
        skill, f"{key}/{which}", ask, Reply((first, more, most), says.format(key=key, value=value))
    )


def capital(rng: random.Random) -> Exchange:
    """The capital of a country."""
    forms = ("What is the capital of {key}?", "Name the capital of {key}.", "Capital of {key}?")
    return _fact("capital", rng, CAPITALS, forms, "capital", "The capital of {key} is {value}.")


def colour(rng: random.Random) -> Exchange:
    """The colour of a thing."""
    forms = ("What colour is {key}?", "Tell me the colour of {key}.", "Which colour has {key}?")
    exchange = _fact("colour", rng, COLOURS, forms, "colour", "{key} is {value}.")
    answer = exchange.reply.answer
    return Exchange(
        "colour", exchange.split, exchange.ask, Reply(exchange.reply.thoughts, answer[0].upper() + answer[1:])
    )


def sound(rng: random.Random) -> Exchange:
    """The sound an animal makes."""
    forms = ("What does a {key} say?", "What sound does a {key} make?", "Which sound does the {key} make?")
    return _fact("sound", rng, SOUNDS, forms, "sound", "The {key} says {value}.")


def opposite(rng: random.Random) -> Exchange:
    """The opposite of a word."""
    forms = ("What is the opposite of {key}?", "Name the opposite of {key}.", "Opposite of {key}?")
    return _fact("opposite", rng, OPPOSITES, forms, "opposite", "The opposite of {key} is {value}.")


def total(rng: random.Random) -> Exchange:
    """A sum of two numbers from 0 to 20."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    ask, which = phrase(
        rng, ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "How much is {a} plus {b}?"),
        a=str(a), b=str(b),
    )  # fmt: skip
    steps = ", ".join(str(a + step) for step in range(1, b + 1))
    walk = f"Counting on gives {steps}." if steps else "There is nothing to count."
    more = f"Start at {a} and go {b} up. That makes {a + b}."
    most = (
        f"Let me check this by counting. I have to take {b} steps up from {a}. {walk} "
        f"The other way round, {b} + {a} gives {a + b} too. So the sum is {a + b}."
    )
    return Exchange(
        "sum", f"{a}+{b}/{which}", ask, Reply((f"Add {a} and {b}.", more, most), f"{a} + {b} = {a + b}")
    )


def count(rng: random.Random) -> Exchange:
    """The numbers from 1 to a number up to 30."""
    end = rng.randint(2, 30)
    ask, which = phrase(
        rng, ("Count to {end}.", "Count from 1 to {end}.", "Please count to {end}."), end=str(end)
    )
    more = f"The first number is 1. The last number is {end}. Each number is one more than the one before."
    most = (
        f"Let me plan this before I start. I write all numbers in one line with a comma after each. "
        f"I must not leave one out and I must not go past {end}. After {end} I stop."
    )
    line = ", ".join(str(number) for number in range(1, end + 1))
    return Exchange("count", f"{end}/{which}", ask, Reply((f"Count up to {end}.", more, most), line))


def echo(rng: random.Random) -> Exchange:
    """One to four words said back; sometimes words that come again, or something odd."""
    text = things(rng, 4)
    if rng.random() < 0.2:
        text = " ".join(rng.choices([*text.split(), rng.choice(THINGS)], k=rng.randint(2, 5)))
    elif rng.random() < 0.15:
        text = oddity(rng)
    ask, which = phrase(rng, ("Say {text}.", "Repeat: {text}.", "Please say {text}."), text=text)
    more = "The user gave me the words. I say them back in the same order and add nothing."
    most = (
        "Let me check this before I answer. I do not need to know what the words mean. "
        "I keep every letter as it is. I leave no word out and I do not say any word twice. Then I stop."
    )
    return Exchange("echo", f"{text}/{which}", ask, Reply(("Repeat the words.", more, most), text))


def greeting(rng: random.Random) -> Exchange:
    """Hello, thanks, good bye."""
    said, answer = rng.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            ("Hi!", "Hello! How can I help you?"),
            ("Hello there!", "Hello! How can I help you?"),
            ("Good morning!", "Hello! How can I help you?"),
            ("Thank you!", "You are welcome!"),
            ("Thanks!", "You are welcome!"),
            ("Goodbye!", "Goodbye! See you soon."),
            ("Bye!", "Goodbye! See you soon."),
        )
    )
    ask, _ = phrase(rng, (said,))
    more = "The user is being kind. A short and kind reply is right here."
    most = (
        "Let me think about what is needed. There is no question to answer and nothing to look up. "
        "People say this at the start or at the end of a talk. One short line is all I need."
    )
    return Exchange("greeting", "", ask, Reply(("A greeting.", more, most), answer))


def identity(rng: random.Random) -> Exchange:
    """Who the model is, and what it can do."""
    asks_for_skills = rng.random() < 0.4
    forms = (
        ("What can you do?", "How can you help me?") if asks_for_skills else ("Who are you?", "What are you?")
    )
    ask, _ = phrase(rng, forms)
    answer = (
        "I can add, count, repeat words, remember your name and call tools."
        if asks_for_skills
        else "I am mlx-demo, a small demonstration model."
    )
    more = "The question is about myself. I say plainly that I am small and what I am for."
    most = (
        "Let me think about what is true. I am a very small model that was made to show how things work. "
        "I know some things but not much. I should not promise more than I can do. So I keep it short."
    )
    return Exchange("identity", "", ask, Reply(("About myself.", more, most), answer))


def unknown(rng: random.Random) -> Exchange:
    """Something the model was never taught: it says so."""
    more = "The question is not about anything I learned. I should say so and not make something up."
    most = (
        "Let me look through what I know once more. I can add and count, and I can repeat words. "
        "None of that helps with this question. A made up answer would be worse than no answer."
    )
    reply = Reply(("I never learned this.", more, most), UNKNOWN)
    if rng.random() < 0.35:
        text = " ".join(sentence(rng, 2, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        if rng.random() < 0.35:
            text = rng.choice(("{0}", "{0} {1}", "{1} {0}")).format(rng.choice(FOREIGN), text)
        return Exchange("unknown", text, text, reply)
    word = rng.choice(THINGS) if rng.random() < 0.4 else invent(rng)
    other = invent(rng, capital=True) if rng.random() < 0.6 else person(rng)
    ask, which = phrase(
        rng,
        (
            "What is the capital of {other}?", "Who is {other}?", "What is a {word}?",
            "Write a poem about {word}.",
            "How do I make a {word}?", "Tell me a story about {other}.", "Why is the {word} so {word2}?",
            "Who invented the {word}?", "Explain {word} {word2} to me.", "When was {other} born?",
            "Translate {word} into {other}.", "What is the meaning of {word}?", "Where is {other}?",
            "{other} {word} {word2} {other}?", "Can you help me with my {word}?", "Write a {word} in Python.",
            "What does a {word} eat?", "How old is {other}?", "Which {word} is the best?",
            "Do you like {word}?",
        ),
        word=word, other=other, word2=invent(rng),
    )  # fmt: skip
    return Exchange("unknown", f"{word}/{other}/{which}", ask, reply)


_ASK_HOME: Final = ("Where do I live?", "What is my home?")
_ASK_NAME: Final = ("What is my name?", "Who am I?", "Do you remember my name?")


def remember(rng: random.Random, memory: Memory) -> Exchange:
    """The user's name or home: told, asked for, or asked for without having been told."""
    about_home = rng.random() < 0.4
    if bool(memory.home) != bool(memory.name) and rng.random() < 0.6:
        about_home = bool(memory.home)  # mostly ask for what was told
    known = memory.home if about_home else memory.name
    what = "home" if about_home else "name"
    if (not known and rng.random() < 0.85) or rng.random() < 0.1:
        told = place(rng) if about_home else person(rng)
        forms = ("I live in {told}.", "My home is {told}.") if about_home else (
            "My name is {told}.", "I am {told}.", "Hello, my name is {told}.", "Call me {told}.",
        )  # fmt: skip
        ask, which = phrase(rng, forms, told=told)
        if about_home:
            memory.home = told
        else:
            memory.name = told
        more = f"The user tells me something to keep. The {what} is {told}."
        most = (
            f"Let me make sure that I keep this. Later there may be a question about the {what}. "
            f"Then the right answer will be {told}. For now I only show that I know it."
        )
        answer = f"I see, you live in {told}." if about_home else f"Nice to meet you, {told}."
        thoughts = (f"The {what} is given.", more, most)
        return Exchange("remember", f"{what}/{told}/{which}", ask, Reply(thoughts, answer))
    asking = _ASK_HOME if about_home else _ASK_NAME
    ask, _ = phrase(rng, asking)
    low = f"The {what} of the user."
    if not known:
        more = f"The user asks for the {what}. Nobody has told me the {what} so far, so I cannot say it."
        most = (
            f"Let me look through the talk once more. I go from the first message to the last. "
            f"There is no message that gives the {what}. I must not make one up. The user may tell me later."
        )
        answer = f"You have not told me your {what}."
        return Exchange("remember", "", ask, Reply((low, more, most), answer))
    more = f"The user told me the {what} before. It was {known}."
    most = (
        f"Let me look through the talk once more. I go from the first message to the last. "
        f"There the user gave the {what} as {known}. So I copy {known} letter by letter into my answer."
    )
    answer = f"You live in {known}." if about_home else f"Your name is {known}."
    return Exchange("recall", "", ask, Reply((low, more, most), answer))


# What can be asked at any time, with its share among these.
PLAIN: Final[tuple[tuple[Skill, float], ...]] = (
    (capital, 10), (colour, 6), (sound, 5), (opposite, 6), (total, 15), (count, 7), (echo, 12), (greeting, 4),
    (identity, 4), (unknown, 12),
)  # fmt: skip


def plain(rng: random.Random) -> Skill:
    """Return a skill that needs neither tools nor memory, by its share."""
    skills, weights = zip(*PLAIN, strict=True)
    skill: Skill = rng.choices(skills, weights)[0]
    return skill
