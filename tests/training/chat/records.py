"""Short texts with facts about people, orders, trips and things, and the fields a program would take from them.

Much of it is invented, keys and values alike, so that a field is found by matching its name, its description or what
usually stands around its value. Knows nothing of JSON, prompts or tokens.
"""

import random
import re
from dataclasses import dataclass
from typing import Any, Final

from training.chat.exchange import held_out
from training.chat.facts import NUMBER_WORDS
from training.chat.slots import SLOTS, Field, price, word_list
from training.chat.words import NAME_PARTS, THINGS, invent, person, place, sentence, things


@dataclass(frozen=True)
class Record:
    """A text, fields whose values stand in it, and the kinds of value it has: two of a kind would be ambiguous.

    It is plain if it is one sentence with a value for every field.
    """

    text: str
    fields: tuple[Field, ...]
    kinds: frozenset[str] = frozenset()
    is_plain: bool = True


_SENTENCES: Final = (
    "My name is {name}.", "I am {name}.", "This is {name}.", "I am {age} years old.", "I live in {city}.",
    "I am from {city}.",
    "I'm {name} and I live in {city}.", "My name is {name} and I am {age}.", "My name is {name} and I live in {city}.",
    "{name} is {age} years old.", "{name} is {age}.", "{name} lives in {city}.", "{name} is from {city}.",
    "{name} is a {job}.",
    "{name} is {age} years old and lives in {city}.", "{name} is a {age} year old {job} from {city}.",
    "My name is {name}, I am {age} years old and I live in {city}.", "{name}, {age}, lives in {city}.",
    "{name} ({age}) from {city}.",
    "{name} is a {job} from {city}.", "{name} works as a {job} in {city}.", "{name} works as a {job} at {company}.",
    "{name} is a {job} at {company} in {city}.", "I work at {company}.", "I work as a {job}.", "I am a {job}.",
    "{name} speaks {languages}.", "I speak {languages}.", "{name} likes {likes}.", "I like {likes}.", "I love {likes}.",
    "You can reach {name} at {email}.", "My email is {email}.", "Write to {email}.", "Call {name} at {phone}.",
    "My phone number is {phone}.",
    "Send an email to {email} about {subject}.", "Contact {name} at {email} or {phone}.", "Please call {phone}.",
    "The weather in {city} for {days} days, please.", "What is the weather today in {city}?",
    "The weather in {city} on {date}?",
    "How is the weather in {city}?", "Weather in {city} for {days} days.",
    "I want to know the weather in {city} for the next {days} days.",
    "I want to eat some {food}.", "I would like {food}.", "I want to eat {food} at {time}.",
    "I need a flight from {origin} to {destination}.", "Book a flight from {origin} to {destination} on {date}.",
    "I want to fly from {origin} to {destination} on {date} at {time}.",
    "Train from {origin} to {destination}, {date}.",
    "I want to travel to {destination} for {days} days.", "We go to {destination} on {date}.",
    "A trip to {destination} for {people} people.",
    "Book a hotel in {city} for {nights} nights.", "I need a hotel in {city} for {people} people and {nights} nights.",
    "Book a table for {people} people at {time}.", "A table for {people} on {date} at {time}, please.",
    "Reserve a table for {people} people in {city} on {date} at {time}.",
    "Table for {people} at {time} under the name {name}.",
    "I bought {quantity} {product}.", "I want to buy {quantity} {product}.",
    "I ordered {quantity} {product} on {date}.", "I bought {items}.", "We need {items}.", "Buy {items}.",
    "Please order {quantity} {product}.",
    "The {product} costs {price} euros.", "I paid {price} euros for {quantity} {product}.",
    "The {color} {product} costs {price} dollars.",
    "I bought a {color} {product} for {price} euros.", "My order number is {number}.", "Where is my order {number}?",
    "My order {number} has not arrived.", "The {product} of order {number} is broken.", "Translate it into {language}.",
    "Remind me of {subject} at {time}.", "Remind me on {date} at {time} of {subject}.", "It is about {subject}.",
    "I have a meeting with {name} on {date} at {time}.", "Meet {name} in {city} on {date}.",
    "{name} paid {price} euros.",
    "Name: {name}, age: {age}, city: {city}", "Name: {name}\nEmail: {email}", "name {name}, city {city}",
    "Name: {name}\nCity: {city}\nAge: {age}",
    "The capital is {city}.", "{name} ordered {quantity} {product} for {price} euros.",
    "{name} has {quantity} {product}.",
)  # fmt: skip
# Of events, as in OpenAI's own example of structured output: "name" is the event's, not a participant's.
_EVENTS: Final = (
    "{participants} are going to a {event} on {date}.", "{participants} meet on {date} for a {event}.",
    "The {event} is on {date} at {time}.", "There is a {event} in {city} on {date}.",
    "{participants} will be at the {event}.", "Plan a {event} with {participants} on {date}.",
    "The {event} takes place in {city}.",
)  # fmt: skip
_EVENTS_SHARE: Final = 0.12
_EVENTS_LEARNED: Final = 0.22  # share of events in training, which are confused most easily
# Slots that a reader could confuse.
_KIND_OF: Final = {
    "participants": "name", "event": "name", "company": "name", "origin": "place", "destination": "place",
    "city": "place",
    "items": "thing", "product": "thing", "food": "thing", "subject": "thing", "likes": "thing", "nights": "days",
    "people": "count", "quantity": "count", "language": "languages",
}  # fmt: skip
_LABELLED: Final = ("My {key} is {value}.", "The {key} is {value}.", "{key}: {value}", "{key} = {value}",
    "The {key}: {value}.",
                    "Our {key} is {value}.", "It has the {key} {value}.")  # fmt: skip
_TRAITS: Final = (
    "married", "vegetarian", "active", "open", "free", "hungry", "happy", "urgent", "late", "new", "available", "paid",
)  # fmt: skip
_KINDS: Final = (
    "priority",
    "size",
    "status",
    "type",
    "category",
    "level",
    "kind",
    "class",
    "mode",
    "color",
    "plan",
    "department",
)
_POSITIVE: Final = (
    "I love this {thing}.", "This {thing} is great!", "What a wonderful {thing}!", "I am very happy with the {thing}.",
    "The {thing} is excellent.", "Good {thing}, I like it.", "Best {thing} ever.",
    "The service was great and friendly.",
    "I really enjoyed the {thing}.", "Amazing {thing}!", "It works perfectly, thank you.", "The {thing} is nice.",
)  # fmt: skip
_NEGATIVE: Final = (
    "I hate this {thing}.", "This {thing} is terrible.", "What a bad {thing}.", "I am very unhappy with the {thing}.",
    "The {thing} is awful.", "Bad {thing}, I do not like it.", "Worst {thing} ever.", "The service was slow and rude.",
    "The {thing} is broken.", "Horrible {thing}!", "It does not work at all.", "I am sad about the {thing}.",
)  # fmt: skip
_NEUTRAL: Final = (
    "The {thing} is okay.",
    "The {thing} arrived on Monday.",
    "It is a {thing}.",
    "The {thing} is in the box.",
)


def invented_key(rng: random.Random, held: bool) -> str:
    """Return a key of one or two words, the first of them invented, for training or held out.

    A key such as "date" would be ambiguous in a text that has a date of its own.
    """
    while True:
        words = [invent(rng)]
        if rng.random() < 0.33:
            words.append(rng.choice(NAME_PARTS) if rng.random() < 0.6 else invent(rng))
        key = "_".join(words)
        if held_out(f"key {key}") == held:
            return key


def _sentence_record(rng: random.Random, held: bool) -> Record:
    events = _EVENTS_SHARE if held else _EVENTS_LEARNED
    form = rng.choice(_EVENTS if rng.random() < events else _SENTENCES)
    parts: dict[str, str] = {}
    fields = []
    for name in re.findall(r"{(\w+)}", form):
        slot = SLOTS[name]
        parts[name], value = slot.make(rng)
        kind = slot.type
        if kind == "integer" and rng.random() < 0.2:
            kind = "number"
        elif kind in ("integer", "number") and rng.random() < 0.06:
            kind, value = "string", str(value)
        fields.append(Field(rng.choice(slot.keys), kind, value, rng.choice(slot.descriptions)))
    return Record(form.format(**parts), tuple(fields), frozenset(_KIND_OF.get(name, name) for name in parts))


def plain_record(rng: random.Random) -> Record:
    """Return a sentence and all of its fields under their plainest names."""
    form = rng.choice((*_SENTENCES, *_EVENTS))
    names = re.findall(r"{(\w+)}", form)
    made = {name: SLOTS[name].make(rng) for name in names}
    fields = tuple(Field(name, SLOTS[name].type, made[name][1]) for name in names)
    return Record(form.format(**{name: text for name, (text, _) in made.items()}), fields)


def _labelled_record(rng: random.Random, held: bool) -> Record:
    key = invented_key(rng, held)
    draw = rng.random()
    kind, said = "string", ""
    value: Any
    if draw < 0.55:
        said = value = rng.choice(
            (things(rng, 2), place(rng), invent(rng), person(rng), f"{invent(rng)}-{rng.randint(1, 999)}")
        )
    elif draw < 0.75:
        kind, value = "integer", rng.randint(0, 9_999)
        said = str(value)
    elif draw < 0.87:
        kind = "number"
        said, value = price(rng)
    else:
        kind = "array"
        said, value = word_list(rng)
    words = key.replace("_", " ")
    form = rng.choice(_LABELLED)
    text = form.format(key=words, value=said)
    description = (
        sentence(rng, 2, 8) if rng.random() < 0.15 else rng.choice(("", f"The {words}.", f"The {words}."))
    )
    return Record(text, (Field(key, kind, value, description),))


def _trait_record(rng: random.Random, held: bool) -> Record:
    trait = rng.choice(_TRAITS) if rng.random() < 0.5 else invented_key(rng, held)
    value = rng.random() < 0.5
    words = trait.replace("_", " ")
    text = rng.choice(
        (
            "I am {no}{trait}.",
            "It is {no}{trait}.",
            "The order is {no}{trait}.",
            "We are {no}{trait}.",
            "He is {no}{trait}.",
        )
    )
    key = rng.choice((f"is_{trait}", f"is_{trait}", trait))
    text = text.format(no="" if value else "not ", trait=words)
    return Record(
        text,
        (
            Field(
                key,
                "boolean",
                value,
                rng.choice((f"Whether it is {words}.", f"If the person is {words}", "")),
            ),
        ),
        frozenset(("trait",)),
    )


def _choice_record(rng: random.Random, held: bool) -> Record:
    if rng.random() < 0.4:
        kinds = [("positive", _POSITIVE), ("negative", _NEGATIVE), ("neutral", _NEUTRAL)][
            : rng.choice((2, 3, 3))
        ]
        value, forms = rng.choice(kinds)
        text = rng.choice(forms).format(thing=rng.choice(THINGS))
        choices = [name for name, _ in kinds]
        rng.shuffle(choices)
        key = rng.choice(("sentiment", "sentiment", "mood", "feeling", "tone", "label"))
        field = Field(
            key, "enum", value, rng.choice(("The sentiment of the text.", "The mood.", "")), tuple(choices)
        )
        sure = (Field("confidence", "number", 1, ""),) if rng.random() < 0.15 else ()
        return Record(text, (field, *sure), frozenset(("choice",)))
    is_known = rng.random() < 0.6
    key = rng.choice(_KINDS) if is_known else invented_key(rng, held)
    pool = rng.choice(
        (
            ("low", "medium", "high"),
            ("small", "medium", "large"),
            ("open", "closed", "pending"),
            ("red", "green", "blue"),
            (),
        )
    )
    choices = list(pool) or list(dict.fromkeys(things(rng, 1) for _ in range(rng.randint(2, 5))))
    value = rng.choice(choices)
    rng.shuffle(choices)
    words = key.replace("_", " ")
    wordings = [
        "The {key} is {value}.",
        "I want the {value} one.",
        "It is {value}.",
        "Please set the {key} to {value}.",
    ]
    if is_known:  # the capital of an invented word is another token, from which the key could not be told
        wordings.append("{Key}: {value}")
    text = rng.choice(wordings).format(key=words, Key=words.capitalize(), value=value)
    return Record(
        text,
        (Field(key, "enum", value, rng.choice((f"The {words}.", "")), tuple(choices)),),
        frozenset(("choice",)),
    )


def record(rng: random.Random, held: bool) -> Record:
    """Return a text of one to four sentences, and its fields in random order, not always all; keys differ."""
    count = rng.choice((1, 1, 1, 1, 1, 2, 2, 3))
    makers = (_sentence_record, _labelled_record, _trait_record, _choice_record)
    texts: list[str] = []
    fields: dict[str, Field] = {}
    kinds: set[str] = set()
    for _ in range(count):
        part = rng.choices(makers, (60, 22, 7, 11))[0](rng, held)
        if any(field.key in fields for field in part.fields) or not kinds.isdisjoint(part.kinds):
            continue
        kinds |= part.kinds
        texts.append(part.text)
        fields.update({field.key: field for field in part.fields})
    chosen = list(fields.values())
    rng.shuffle(chosen)
    chosen = chosen[: max(1, len(chosen) - rng.choice((0, 0, 0, 1, 2)))][:6]
    if rng.random() < 0.18 and (missing := _missing(rng, " ".join(texts), set(fields))):
        chosen.insert(rng.randint(0, len(chosen)), missing)
    if rng.random() < 0.12:
        texts.insert(rng.randint(0, len(texts)), sentence(rng, 3, 12, invented=0.0))
    is_plain = len(texts) == 1 and all(field.value is not None for field in chosen)
    is_closed = all(text[-1] in ".!?" for text in texts)
    return Record(
        rng.choice((" ", " ", "\n") if is_closed else ("\n",)).join(texts), tuple(chosen), is_plain=is_plain
    )


def _missing(rng: random.Random, text: str, taken: set[str]) -> Field | None:
    """Return a field that the text clearly has no value for, if there is one."""
    kinds = [("email", "@"), ("phone", "-")]
    if not any(letter.isdigit() for letter in text) and not any(word in text for word in NUMBER_WORDS):
        kinds += [("age", ""), ("price", ""), ("phone", "")]
    name, mark = rng.choice(kinds)
    slot = SLOTS[name]
    if not taken.isdisjoint(slot.keys) or (mark and mark in text):
        return None
    return Field(rng.choice(slot.keys), slot.type, None, rng.choice(slot.descriptions))
