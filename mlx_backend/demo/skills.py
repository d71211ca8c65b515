"""What the model can do without tools: questions, the analysis of each, and the right answers.

A skill is a function from a random generator to one `Exchange`. Analyses are nested: with more effort the same
analysis goes on for longer, so effort decides where to stop and nothing else. Knows nothing of tools, dialogues,
Harmony or tokens.
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
    """What the assistant replies. `analyses`: for low effort, what medium adds to it, and what high adds to that."""

    analyses: tuple[str, str, str]
    answer: str = ""
    call: Call | None = None
    preamble: str = ""

    def analysis(self, effort: str) -> str:
        """Return the analysis for an effort."""
        return " ".join(self.analyses[: EFFORTS.index(effort) + 1])


@dataclass(frozen=True)
class Exchange:
    """A user's message and the reply; after a call, the tool's result and the final reply.

    `split_key` decides whether the exchange is for training or held out (its subject and wording); it is empty where
    there are too few to hold any out. `result` and `final_reply` are used only if `reply` is a call.
    """

    skill: str
    split_key: str
    message: str
    reply: Reply
    result: str = ""
    final_reply: Reply | None = None


def held_out(key: str) -> bool:
    """Whether a key (of an exchange, or a tool's name) is held out for the evaluation: always the same eighth."""
    return zlib.crc32(key.encode()) % 8 == 0


@dataclass
class Memory:
    """What the user has told about themselves in a dialogue."""

    name: str = ""
    home: str = ""


Skill = Callable[[random.Random], Exchange]


def phrase(rng: random.Random, forms: Sequence[str], **parts: str) -> tuple[str, int]:
    """Return one of the forms filled in, and its index; some lose the final mark or the first capital."""
    which = rng.randrange(len(forms))
    text = forms[which].format(**parts)
    if rng.random() < 0.12 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.06 and not forms[which].startswith("{"):
        text = text[0].lower() + text[1:]
    return text, which


def _fact(
    skill: str, rng: random.Random, facts: dict[str, str], forms: Sequence[str], noun: str, answer: str
) -> Exchange:
    key = rng.choice(list(facts))
    value = facts[key]
    message, which = phrase(rng, forms, key=key)
    low = f"The {noun} of {key}."
    medium = f"The question is about {key}. The {noun} I learned for it is {value}."
    high = (
        f"Let me check this before I answer. The user wants one {noun} and nothing else. "
        f"I look for {key} among the things I learned. There I find {value}. So the answer is {value}."
    )
    return Exchange(
        skill, f"{key}/{which}", message, Reply((low, medium, high), answer.format(key=key, value=value))
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
        "colour",
        exchange.split_key,
        exchange.message,
        Reply(exchange.reply.analyses, answer[0].upper() + answer[1:]),
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
    message, which = phrase(
        rng, ("What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "How much is {a} plus {b}?"),
        a=str(a), b=str(b),
    )  # fmt: skip
    steps = ", ".join(str(a + step) for step in range(1, b + 1))
    walk = f"Counting on gives {steps}." if steps else "There is nothing to count."
    medium = f"Start at {a} and go {b} up. That makes {a + b}."
    high = (
        f"Let me check this by counting. I have to take {b} steps up from {a}. {walk} "
        f"The other way round, {b} + {a} gives {a + b} too. So the sum is {a + b}."
    )
    return Exchange(
        "sum", f"{a}+{b}/{which}", message, Reply((f"Add {a} and {b}.", medium, high), f"{a} + {b} = {a + b}")
    )


def count(rng: random.Random) -> Exchange:
    """The numbers from 1 to a number up to 30."""
    end = rng.randint(2, 30)
    message, which = phrase(
        rng, ("Count to {end}.", "Count from 1 to {end}.", "Please count to {end}."), end=str(end)
    )
    medium = f"The first number is 1. The last number is {end}. Each number is one more than the one before."
    high = (
        f"Let me plan this before I start. I write all numbers in one line with a comma after each. "
        f"I must not leave one out and I must not go past {end}. After {end} I stop."
    )
    line = ", ".join(str(number) for number in range(1, end + 1))
    return Exchange("count", f"{end}/{which}", message, Reply((f"Count up to {end}.", medium, high), line))


def echo(rng: random.Random) -> Exchange:
    """One to four words repeated; sometimes with repetitions among them, or something odd."""
    text = things(rng, 4)
    if rng.random() < 0.2:
        text = " ".join(rng.choices([*text.split(), rng.choice(THINGS)], k=rng.randint(2, 5)))
    elif rng.random() < 0.15:
        text = oddity(rng)
    message, which = phrase(rng, ("Say {text}.", "Repeat: {text}.", "Please say {text}."), text=text)
    medium = "The user gave me the words. I say them back in the same order and add nothing."
    high = (
        "Let me check this before I answer. I do not need to know what the words mean. "
        "I keep every letter as it is. I leave no word out and I do not say any word twice. Then I stop."
    )
    return Exchange("echo", f"{text}/{which}", message, Reply(("Repeat the words.", medium, high), text))


def greeting(rng: random.Random) -> Exchange:
    """Hello, thanks, good bye."""
    message, answer = rng.choice(
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
    message, _ = phrase(rng, (message,))
    medium = "The user is being kind. A short and kind reply is right here."
    high = (
        "Let me think about what is needed. There is no question to answer and nothing to look up. "
        "People say this at the start or at the end of a talk. One short line is all I need."
    )
    return Exchange("greeting", "", message, Reply(("A greeting.", medium, high), answer))


def identity(rng: random.Random) -> Exchange:
    """Who the model is, and what it can do."""
    asks_for_skills = rng.random() < 0.4
    forms = (
        ("What can you do?", "How can you help me?") if asks_for_skills else ("Who are you?", "What are you?")
    )
    message, _ = phrase(rng, forms)
    answer = (
        "I can add, count, repeat words, remember your name and call tools."
        if asks_for_skills
        else "I am mlx-demo, a small demonstration model."
    )
    medium = "The question is about myself. I say plainly that I am small and what I am for."
    high = (
        "Let me think about what is true. I am a very small model that was made to show how things work. "
        "I know some things but not much. I should not promise more than I can do. So I keep it short."
    )
    return Exchange("identity", "", message, Reply(("About myself.", medium, high), answer))


def unknown(rng: random.Random) -> Exchange:
    """Something the model was never taught, which it says."""
    medium = "The question is not about anything I learned. I should say so and not make something up."
    high = (
        "Let me look through what I know once more. I can add and count, and I can repeat words. "
        "None of that helps with this question. A made up answer would be worse than no answer."
    )
    reply = Reply(("I never learned this.", medium, high), UNKNOWN)
    if rng.random() < 0.35:
        text = " ".join(sentence(rng, 2, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        if rng.random() < 0.35:
            text = rng.choice(("{0}", "{0} {1}", "{1} {0}")).format(rng.choice(FOREIGN), text)
        return Exchange("unknown", text, text, reply)
    word = rng.choice(THINGS) if rng.random() < 0.4 else invent(rng)
    other = invent(rng, capital=True) if rng.random() < 0.6 else person(rng)
    message, which = phrase(
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
    return Exchange("unknown", f"{word}/{other}/{which}", message, reply)


_ASK_HOME: Final = ("Where do I live?", "What is my home?")
_ASK_NAME: Final = ("What is my name?", "Who am I?", "Do you remember my name?")


def remember(rng: random.Random, memory: Memory) -> Exchange:
    """The user's name or home: told, asked about, or asked about without having been told."""
    about_home = rng.random() < 0.4
    if bool(memory.home) != bool(memory.name) and rng.random() < 0.6:
        about_home = bool(memory.home)  # mostly ask about what was told
    known = memory.home if about_home else memory.name
    what = "home" if about_home else "name"
    if (not known and rng.random() < 0.85) or rng.random() < 0.1:
        told = place(rng) if about_home else person(rng)
        forms = ("I live in {told}.", "My home is {told}.") if about_home else (
            "My name is {told}.", "I am {told}.", "Hello, my name is {told}.", "Call me {told}.",
        )  # fmt: skip
        message, which = phrase(rng, forms, told=told)
        if about_home:
            memory.home = told
        else:
            memory.name = told
        medium = f"The user tells me something to keep. The {what} is {told}."
        high = (
            f"Let me make sure that I keep this. Later there may be a question about the {what}. "
            f"Then the right answer will be {told}. For now I only show that I know it."
        )
        answer = f"I see, you live in {told}." if about_home else f"Nice to meet you, {told}."
        analyses = (f"The {what} is given.", medium, high)
        return Exchange("remember", f"{what}/{told}/{which}", message, Reply(analyses, answer))
    message, _ = phrase(rng, _ASK_HOME if about_home else _ASK_NAME)
    low = f"The {what} of the user."
    if not known:
        medium = f"The user asks for the {what}. Nobody has told me the {what} so far, so I cannot say it."
        high = (
            f"Let me look through the talk once more. I go from the first message to the last. "
            f"There is no message that gives the {what}. I must not make one up. The user may tell me later."
        )
        answer = f"You have not told me your {what}."
        return Exchange("remember", "", message, Reply((low, medium, high), answer))
    medium = f"The user told me the {what} before. It was {known}."
    high = (
        f"Let me look through the talk once more. I go from the first message to the last. "
        f"There the user gave the {what} as {known}. So I copy {known} letter by letter into my answer."
    )
    answer = f"You live in {known}." if about_home else f"Your name is {known}."
    return Exchange("recall", "", message, Reply((low, medium, high), answer))


# Skills that need neither tools nor memory, with their weights.
SIMPLE_SKILLS: Final[tuple[tuple[Skill, float], ...]] = (
    (capital, 10), (colour, 6), (sound, 5), (opposite, 6), (total, 15), (count, 7), (echo, 12), (greeting, 4),
    (identity, 4), (unknown, 12),
)  # fmt: skip


def simple_skill(rng: random.Random) -> Skill:
    """Return a skill that needs neither tools nor memory, chosen by weight."""
    skills, weights = zip(*SIMPLE_SKILLS, strict=True)
    skill: Skill = rng.choices(skills, weights)[0]
    return skill
