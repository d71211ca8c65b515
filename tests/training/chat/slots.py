"""What a text can say of people, orders, trips and things, each with the keys and descriptions that programs give it.

Knows no sentences, no JSON and no prompts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from training.chat.facts import NUMBER_WORDS
from training.chat.results import random_date
from training.chat.words import invent, person, place, things


@dataclass(frozen=True)
class Field:
    """A field of an object: its key, JSON type, right value, and what a schema says of it.

    A value of None stands for nothing: the text has none. The type "enum" is a string out of `choices`.
    """

    key: str
    type: str
    value: Any
    description: str = ""
    choices: tuple[str, ...] = ()


Made = tuple[str, Any]  # as the text words it, and as JSON has it


@dataclass(frozen=True)
class Slot:
    """A place for a value in a sentence: its JSON type, how programs call and describe it, and how it is made."""

    type: str
    keys: tuple[str, ...]
    descriptions: tuple[str, ...]
    make: Callable[[random.Random], Made]


def _said(make: Callable[[random.Random], str]) -> Callable[[random.Random], Made]:
    def made(rng: random.Random) -> Made:
        text = make(rng)
        return text, text

    return made


def _number(low: int, high: int) -> Callable[[random.Random], Made]:
    def made(rng: random.Random) -> Made:
        number = rng.randint(low, high)
        return (NUMBER_WORDS[number] if number <= 12 and rng.random() < 0.35 else str(number)), number

    return made


def _full_name(rng: random.Random) -> str:
    return person(rng) if rng.random() < 0.7 else f"{person(rng)} {invent(rng, capital=True)}"


def price(rng: random.Random) -> Made:
    """Return an amount of money, whole or with two digits."""
    if rng.random() < 0.5:
        number: float = rng.randint(1, 999)
    else:
        number = rng.randint(1, 99) + rng.choice((0.5, 0.99, 0.25, 0.75, 0.95))
    return str(number), number


def _thing(rng: random.Random) -> str:
    return things(rng, 2)


def word_list(rng: random.Random) -> Made:
    """Return one to four different words."""
    words = list(dict.fromkeys(things(rng, 1) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))))
    return _joined(words), words


def _people(rng: random.Random) -> Made:
    names = list(dict.fromkeys(person(rng) for _ in range(rng.choice((2, 2, 2, 3)))))
    return _joined(names), names


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _clock(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45)):02}",
            f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}",
        )
    )


_DAYS: Final = (
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "tomorrow",
    "today",
)
_MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def _day(rng: random.Random) -> str:
    return rng.choice(
        (
            rng.choice(_DAYS),
            rng.choice(_DAYS),
            random_date(rng),
            f"{rng.choice(_MONTHS)} {rng.randint(1, 28)}",
        )
    )


def _email(rng: random.Random) -> str:
    return f"{invent(rng)}@{rng.choice((invent(rng), 'example'))}.{rng.choice(('com', 'org', 'net', 'de'))}"


_JOBS: Final = (
    "teacher", "doctor", "engineer", "nurse", "baker", "driver", "lawyer", "farmer", "painter",
    "student", "pilot",
    "cook", "writer", "designer", "developer", "singer",
)  # fmt: skip
_EVENTS: Final = (
    "science fair", "birthday party", "meeting", "concert", "workshop", "wedding", "dinner", "conference", "book club",
    "football match", "picnic", "team lunch", "art show",
)  # fmt: skip


_LANGUAGES: Final = (
    "English",
    "German",
    "French",
    "Spanish",
    "Japanese",
    "Chinese",
    "Italian",
    "Dutch",
    "Polish",
)


def _languages(rng: random.Random) -> Made:
    words = rng.sample(_LANGUAGES, rng.choice((1, 2, 2, 3)))
    return _joined(words), words


SLOTS: Final[dict[str, Slot]] = {
    "name": Slot("string", ("name", "name", "full_name", "person", "user_name", "customer", "customer_name",
    "username", "contact"),
                  ("The person's name.", "Full name", "The name of the person", "Name of the user", "Who it is."),
                  _said(_full_name)),
    "age": Slot("integer", ("age", "age", "age_in_years", "years"), ("The age in years.", "Age",
    "How old the person is"), _number(1, 99)),
    "city": Slot("string", ("city", "city", "town", "location", "place", "city_name", "home"),
                  ("The city.", "City", "The city that is asked about.", "Where it is", "The location",
                  "The city the person lives in"),
                  _said(place)),
    "destination": Slot("string", ("destination", "to", "to_city", "arrival", "arrival_city"),
                         ("Where the trip goes.", "The destination", "The city of arrival"), _said(place)),
    "origin": Slot("string", ("origin", "from", "from_city", "departure", "departure_city"),
                    ("Where the trip starts.", "The origin", "The city of departure"), _said(place)),
    "job": Slot("string", ("job", "job", "profession", "occupation", "role", "job_title"), ("The profession.",
    "What the person does"),
                 _said(lambda rng: rng.choice(_JOBS) if rng.random() < 0.6 else invent(rng))),
    "company": Slot("string", ("company", "employer", "organization", "firm"), ("The company.",
    "Where the person works"),
                     _said(lambda rng: invent(rng, capital=True))),
    "days": Slot("integer", ("days", "days", "number_of_days", "duration", "num_days", "length_in_days"),
                  ("For how many days.", "The number of days", "How long, in days"), _number(1, 30)),
    "nights": Slot("integer", ("nights", "number_of_nights", "duration"), ("The number of nights",
    "How many nights"), _number(1, 21)),
    "people": Slot("integer", ("people", "number_of_people", "guests", "party_size", "persons", "num_guests"),
                    ("For how many people.", "The number of guests", "Number of people"), _number(1, 20)),
    "quantity": Slot("integer", ("quantity", "count", "how_many", "qty", "number_of_items"),
                      ("How many.", "The quantity", "The number of items"), _number(1, 50)),
    "product": Slot("string", ("product", "item", "product_name", "article", "thing", "goods"), ("The product.",
    "What is bought", "The item"),
                     _said(_thing)),
    "food": Slot("string", ("food", "dish", "meal"), ("The food to eat", "The dish.", "What to eat"), _said(_thing)),
    "price": Slot("number", ("price", "price", "cost", "amount", "total", "total_price"), ("The price.",
    "How much it costs", "The price in euros"),
                   price),
    "date": Slot("string", ("date", "date", "day", "when", "weekday", "event_date"), ("The date.", "When it is",
    "The day"), _said(_day)),
    "time": Slot("string", ("time", "time", "start_time", "hour", "at"), ("The time.", "At what time",
    "When it starts"), _said(_clock)),
    "email": Slot("string", ("email", "email", "email_address", "mail"), ("The email address.", "Email"),
    _said(_email)),
    "phone": Slot("string", ("phone", "phone_number", "telephone", "mobile"), ("The phone number.", "Phone"),
                   _said(lambda rng: f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}")),
    "event": Slot("string", ("event", "name", "event_name", "title", "occasion"), ("The event.", "What happens",
    "Name of the event"),
                   _said(lambda rng: rng.choice(_EVENTS) if rng.random() < 0.7 else _thing(rng))),
    "participants": Slot("array", ("participants", "attendees", "names", "members"),
                          ("Who takes part.", "The participants", "Names of the people"), _people),
    "likes": Slot("array", ("likes", "hobbies", "interests", "favourites", "favorites"), ("What the person likes.",
    "The hobbies"), word_list),
    "items": Slot("array", ("items", "products", "shopping_list", "things", "ingredients", "goods"), ("All items.",
    "What is bought", "The list"),
                   word_list),
    "languages": Slot("array", ("languages", "spoken_languages"), ("The languages.",), _languages),
    "language": Slot("string", ("language", "target_language"), ("The language.",),
    _said(lambda rng: rng.choice(_LANGUAGES))),
    "subject": Slot("string", ("subject", "topic", "title", "about"), ("What it is about.", "The topic"),
    _said(_thing)),
    "color": Slot("string", ("color", "colour"), ("The color.", "The colour"),
                   _said(lambda rng: rng.choice(("red", "blue", "green", "black", "white", "yellow", "pink", "grey",
                       "brown")))),
    "number": Slot("string", ("order_number", "order_id", "id", "order", "reference"), ("The order number.", "The id"),
                    _said(lambda rng: f"{rng.choice('ABKRX')}{rng.choice(('', '-'))}{rng.randint(100, 99_999)}")),
}  # fmt: skip
