"""What the model knows: capitals, colours, sounds, opposites and sums, asked for in many wordings.

Each skill is a function from a random generator to an `Exchange`. A follow-up is a short question that is understood
from the one before ("And of Italy?"). Knows nothing of the other skills.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from training.chat.exchange import Exchange, Reply, Skill
from training.chat.phrasing import loosely, phrase
from training.chat.words import CAPITALS, COLOURS, OPPOSITES, SOUNDS

MAX_SUMMAND: Final = 20
NO_SUM: Final = f"Sorry, I can only add two numbers up to {MAX_SUMMAND}."
NUMBER_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

CAPITAL_FORMS: Final = (
    "What is the capital of {key}?", "Name the capital of {key}.", "Capital of {key}?", "What's the capital of {key}?",
    "Whats the capital of {key}?", "Which city is the capital of {key}?", "What city is the capital of {key}?",
    "Tell me the capital of {key}.", "Do you know the capital of {key}?", "Can you tell me the capital of {key}?",
    "Could you tell me what the capital of {key} is?", "What is the capital city of {key}?", "{key}'s capital?",
    "What is {key}'s capital?", "The capital of {key}?", "The capital of {key} is?", "The capital of {key} is",
    "I want to know the capital of {key}.", "I would like to know the capital of {key}.",
    "Please name the capital of {key}.",
    "Give me the capital of {key}.", "What is the name of the capital of {key}?", "Which city is {key}'s capital?",
    "capital {key}", "{key} capital", "I forgot the capital of {key}.", "Please tell me what the capital of {key} is.",
    "What is the capital of the country {key}?", "Capital city of {key}?",
    "What do you know about the capital of {key}?",
    "Can you name the capital of {key}?", "Tell me what the capital of {key} is.", "Say the capital of {key}.",
)  # fmt: skip
_COUNTRY_FORMS: Final = (
    "{value} is the capital of which country?", "Which country has the capital {value}?",
    "Of which country is {value} the capital?",
    "What country is {value} the capital of?", "{value} is the capital of what country?",
    "In which country is {value}?",
    "Which country is {value} the capital of?", "What country is {value} in?", "Which country is {value} in?",
    "{value} is in which country?",
)  # fmt: skip
COLOUR_FORMS: Final = (
    "What colour is {key}?", "Tell me the colour of {key}.", "Which colour has {key}?", "What color is {key}?",
    "What is the colour of {key}?", "What is the color of {key}?", "Which color does {key} have?",
    "Tell me the color of {key}.",
    "What's the color of {key}?", "What colour does {key} have?", "Colour of {key}?", "Color of {key}?",
    "Do you know what color {key} is?", "Can you tell me the colour of {key}?", "Which color is {key}?",
    "What colour is {key} usually?", "Name the color of {key}.", "{key}: what color?", "Whats the color of {key}?",
)  # fmt: skip
SOUND_FORMS: Final = (
    "What does a {key} say?", "What sound does a {key} make?", "Which sound does the {key} make?",
    "What does the {key} say?",
    "How does a {key} sound?", "What noise does a {key} make?", "What sound do {keys} make?", "What do {keys} say?",
    "Sound of a {key}?", "Tell me what a {key} says.", "What is the sound of a {key}?",
    "Which noise does the {key} make?",
    "What sound does the {key} make?", "Do you know what a {key} says?", "How does a {key} go?", "The {key} says?",
    "What sound does a {key} produce?", "What's the sound of a {key}?",
)  # fmt: skip
OPPOSITE_FORMS: Final = (
    "What is the opposite of {key}?", "Name the opposite of {key}.", "Opposite of {key}?",
    "What's the opposite of {key}?",
    "Whats the opposite of {key}?", "Tell me the opposite of {key}.", "Which word is the opposite of {key}?",
    "Give me the opposite of {key}.", "The opposite of {key} is?", "Do you know the opposite of {key}?",
    "What is the opposite of the word {key}?", "What is the antonym of {key}?", 'What is the opposite of "{key}"?',
    "Can you tell me the opposite of {key}?", "What word is opposite to {key}?", "The opposite of {key}?",
)  # fmt: skip
_AND: Final = (
    "And {key}?", "And of {key}?", "What about {key}?", "How about {key}?", "And what about {key}?", "and {key}",
    "{key}?",
    "Now {key}.", "And for {key}?", "And now {key}?", "Same for {key}.", "The same for {key}, please.", "Then {key}?",
    "Okay, and {key}?", "Also {key}?", "and what about {key}", "what about {key}", "And with {key}?", "And in {key}?",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """A table of facts, and how they are asked for and told."""

    skill: str
    noun: str
    table: dict[str, str]
    forms: tuple[str, ...]
    follow_ups: tuple[str, ...]
    answer: str
    fields: tuple[str, str]  # what a JSON object calls the key and the value


CAPITAL: Final = Facts(
    "capital", "capital", CAPITALS, CAPITAL_FORMS,
    (*_AND, "And the capital of {key}?", "And that of {key}?", "And {key}'s?", "And the one of {key}?"),
    "The capital of {key} is {value}.", ("country", "capital"),
)  # fmt: skip
COLOUR: Final = Facts(
    "colour", "colour", COLOURS, COLOUR_FORMS,
    (*_AND, "And the colour of {key}?", "And what colour is {key}?", "And the color of {key}?", "And that of {key}?"),
    "{key} is {value}.", ("thing", "colour"),
)  # fmt: skip
SOUND: Final = Facts(
    "sound", "sound", SOUNDS, SOUND_FORMS,
    (*(each.replace("{key}", article + "{key}") for each in _AND for article in ("a ", "a ", "the ")),
     "And a {key}, what does it say?", "And what does a {key} say?", "And the sound of a {key}?", "And {keys}?"),
    "The {key} says {value}.", ("animal", "sound"),
)  # fmt: skip
OPPOSITE: Final = Facts(
    "opposite", "opposite", OPPOSITES, OPPOSITE_FORMS,
    (*_AND, "And the opposite of {key}?", "And that of {key}?"),
    "The opposite of {key} is {value}.", ("word", "opposite"),
)  # fmt: skip
_PLURALS: Final = {"mouse": "mice", "sheep": "sheep", "wolf": "wolves"}
TABLES: Final = (CAPITAL, COLOUR, SOUND, OPPOSITE)


def _worded(rng: random.Random, facts: Facts, key: str) -> str:
    """Return a key as a question may word it."""
    if facts is COLOUR and rng.random() < 0.3:
        noun = key.removeprefix("a ").removeprefix("an ").removeprefix("the ")
        return rng.choice((f"the {noun}", noun, f"a {noun}"))
    if facts is CAPITAL and key.startswith("the ") and rng.random() < 0.3:
        return key.removeprefix("the ")
    if key == "the United States" and rng.random() < 0.5:
        return rng.choice(("the USA", "the US", "America", "USA", "the United States of America"))
    if key == "the United Kingdom" and rng.random() < 0.3:
        return rng.choice(("the UK", "Great Britain", "UK"))
    if facts is SOUND and rng.random() < 0.06:
        return f"{rng.choice(('big', 'small', 'little', 'young'))} {key}"
    return key


def ask(rng: random.Random, facts: Facts, follow_up: bool = False) -> Exchange:
    """Ask for a fact; as a follow-up, with a question that does not say what is asked for."""
    key = rng.choice(list(facts.table))
    value = facts.table[key]
    forms = facts.follow_ups if follow_up else facts.forms
    plain = not follow_up and rng.random() < 0.2
    worded = key if plain else _worded(rng, facts, key)
    message, which = phrase(
        rng, forms[:3] if plain else forms, key=worded, keys=_PLURALS.get(worded, f"{worded}s")
    )
    if not plain:
        message = loosely(rng, message)
    noun = facts.noun
    low = f"The {noun} of {key}."
    medium = f"The question is about {key}. The {noun} I learned for it is {value}."
    high = (
        f"Let me check this before I answer. The user wants one {noun} and nothing else. "
        f"I look for {key} among the things I learned. There I find {value}. So the answer is {value}."
    )
    answer = facts.answer.format(key=key, value=value)
    return Exchange(
        f"{facts.skill} (follow-up)" if follow_up else facts.skill,
        f"{key}/{which}",
        message,
        Reply((low, medium, high), answer[0].upper() + answer[1:]),
        title=f"{noun.capitalize()} of {'a ' if facts is SOUND else ''}{key}",
        fields=((facts.fields[0], key.removeprefix("a ").removeprefix("an ")), (facts.fields[1], value)),
    )


def capital(rng: random.Random) -> Exchange:
    """The capital of a country."""
    return ask(rng, CAPITAL)


def country(rng: random.Random) -> Exchange:
    """The country of a capital."""
    key = rng.choice([name for name in CAPITALS if name != "England"])
    value = CAPITALS[key]
    message, which = phrase(rng, _COUNTRY_FORMS, value=value)
    high = (
        "Let me check this before I answer. The user wants one country and nothing else. "
        f"I look for {value} among the capitals I learned. It belongs to {key}. So the answer is {key}."
    )
    medium = f"The question is about {value}. The country I learned for it is {key}."
    return Exchange(
        "country", f"{value}/{which}", loosely(rng, message),
        Reply((f"The country of {value}.", medium, high), f"{value} is the capital of {key}."),
        title=f"Country of {value}", fields=(("capital", value), ("country", key)),
    )  # fmt: skip


def colour(rng: random.Random) -> Exchange:
    """The colour of a thing."""
    return ask(rng, COLOUR)


def sound(rng: random.Random) -> Exchange:
    """The sound an animal makes."""
    return ask(rng, SOUND)


def opposite(rng: random.Random) -> Exchange:
    """The opposite of a word."""
    return ask(rng, OPPOSITE)


_SUM_FORMS: Final = (
    "What is {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "How much is {a} plus {b}?", "What's {a} + {b}?",
    "whats {a}+{b}", "{a}+{b}", "{a} + {b}", "{a}+{b}=", "{a} + {b} =", "Calculate {a} + {b}.", "Compute {a} + {b}.",
    "What is {a} plus {b}?", "{a} plus {b}", "Sum of {a} and {b}?", "What is the sum of {a} and {b}?",
    "How much is {a} + {b}?",
    "What do you get if you add {a} and {b}?", "What does {a} + {b} equal?", "Can you add {a} and {b}?",
    "What's {a} plus {b}?",
    "What is {a}+{b}?", "{a} and {b} makes?", "How much is {a} and {b}?", "Please calculate {a} + {b}.",
    "Tell me {a} + {b}.",
    "What is the result of {a} + {b}?", "Please add {a} and {b}.", "Solve {a} + {b}.", "{a} + {b}?",
    "How much does {a} plus {b} make?",
    "I have {a} apples and get {b} more. How many do I have?", "How much is {a}+{b}?",
    "If I add {a} and {b}, what do I get?",
)  # fmt: skip
_SUM_FOLLOW_UPS: Final = (
    "And {a} + {b}?", "What about {a} + {b}?", "And {a} plus {b}?", "Now {a} + {b}.", "How about {a} + {b}?",
    "and {a}+{b}",
    "what about {a} + {b}", "And now {a} and {b}.", "And {a} and {b}?", "And what is {a} + {b}?", "Then {a} + {b}?",
)  # fmt: skip
_NO_SUM_FORMS: Final = (
    "What is {x} - {y}?", "What is {x} * {y}?", "What is {x} / {y}?", "{x} times {y}?", "What is {x} minus {y}?",
    "{x}*{y}",
    "{x} x {y} = ?", "{x}-{y}", "How much is {x} minus {y}?", "Subtract {x} from {y}.", "Multiply {x} by {y}.",
    "Divide {x} by {y}.", "What is {x} divided by {y}?", "How much is {x} times {y}?", "{x} / {y}", "{x} - {y} =",
    "What is the product of {x} and {y}?", "What is the square root of {x}?", "Calculate {x} * {y}.",
    "What is {x}% of {y}?",
    "What is {x} + {y} + {z}?", "What is {x} squared?", "Calculate {x} - {y}.", "What's {x} times {y}?",
    "whats {x}*{y}",
)  # fmt: skip


def total(rng: random.Random, follow_up: bool = False) -> Exchange:
    """A sum of two numbers from 0 to 20."""
    a, b = rng.randint(0, MAX_SUMMAND), rng.randint(0, MAX_SUMMAND)
    in_words = rng.random() < 0.07
    plain = not follow_up and rng.random() < 0.3
    forms = _SUM_FOLLOW_UPS if follow_up else _SUM_FORMS[:4] if plain else _SUM_FORMS
    parts = (NUMBER_WORDS[a], NUMBER_WORDS[b]) if in_words else (str(a), str(b))
    message, which = phrase(rng, forms, a=parts[0], b=parts[1])
    if not plain:
        message = loosely(rng, message)
    steps = ", ".join(str(a + step) for step in range(1, b + 1))
    walk = f"Counting on gives {steps}." if steps else "There is nothing to count."
    medium = f"Start at {a} and go {b} up. That makes {a + b}."
    high = (
        f"Let me check this by counting. I have to take {b} steps up from {a}. {walk} "
        f"The other way round, {b} + {a} gives {a + b} too. So the sum is {a + b}."
    )
    return Exchange(
        "sum (follow-up)" if follow_up else "sum", f"{a}+{b}/{which}", message,
        Reply((f"Add {a} and {b}.", medium, high), f"{a} + {b} = {a + b}"),
        title=f"Sum of {a} and {b}", fields=(("a", a), ("b", b), ("sum", a + b)),
    )  # fmt: skip


def no_total(rng: random.Random) -> Exchange:
    """Arithmetic that the model was not taught, which it says."""
    x, y = (
        rng.choice((rng.randint(0, 20), rng.randint(0, 999))),
        rng.choice((rng.randint(0, 20), rng.randint(0, 9999))),
    )
    z = rng.randint(0, 30)
    if rng.random() < 0.6:
        most = rng.choice((30, 60, 100, 100, 1_000, 99_999))
        x, y = (
            (rng.randint(0, most), rng.randint(21, most))
            if rng.random() < 0.5
            else (rng.randint(21, most), rng.randint(0, most))
        )
        message, which = phrase(rng, _SUM_FORMS, a=str(x), b=str(y))
        key = f"{x}+{y}/{which}"
    else:
        message, which = phrase(rng, _NO_SUM_FORMS, x=str(x), y=str(y), z=str(z))
        key = f"{x}?{y}/{which}"
    medium = f"I learned to add two numbers, each of them up to {MAX_SUMMAND}. This is something else, and I say so."
    high = (
        "Let me see whether I can do it all the same. I could guess a number, but it would most likely be wrong. "
        "A wrong number is worse than none. So I only say what I can do."
    )
    return Exchange(
        "no sum", key, loosely(rng, message), Reply(("I cannot do this sum.", medium, high), NO_SUM),
        title="A sum", fields=(("error", NO_SUM),),
    )  # fmt: skip


def _follow_up(facts: Facts) -> Skill:
    return lambda rng: ask(rng, facts, follow_up=True)


def follow_up_of(skill: str) -> Callable[[random.Random], Exchange] | None:
    """Return the follow-up to a skill, if it has one."""
    skill = skill.removesuffix(" (follow-up)")
    if skill == "sum":
        return lambda rng: total(rng, follow_up=True)
    return next((_follow_up(facts) for facts in TABLES if facts.skill == skill), None)


_AMBIGUOUS: Final = frozenset(("frog", "crow", "a frog", "a crow", "light", "black", "cold"))


def changed_subject(rng: random.Random) -> Exchange:
    """A follow-up whose subject alone says that another kind of fact is meant ("And a cow?")."""
    while True:
        exchange = ask(rng, rng.choice((CAPITAL, COLOUR, SOUND)), follow_up=True)
        if str(exchange.fields[0][1]) not in _AMBIGUOUS:
            return exchange
