"""The vocabulary of the corpus: facts the model is taught, names, and invented words.

Much of what is copied rather than known (names, places, tool names, values) comes from `invent`, so that knowing the
words of this module is not enough. Knows nothing of dialogues or tokens.
"""

import random
from typing import Final


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


CAPITALS: Final = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Greece": "Athens", "Hungary": "Budapest",
    "Russia": "Moscow",
    "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Morocco": "Rabat",
    "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Nepal": "Kathmandu", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Iran": "Tehran", "Iraq": "Baghdad", "Canada": "Ottawa", "Cuba": "Havana",
    "Peru": "Lima", "Chile": "Santiago", "Iceland": "Reykjavik", "Belgium": "Brussels", "Croatia": "Zagreb",
    "Serbia": "Belgrade", "the United States": "Washington", "the Netherlands": "Amsterdam",
    "the United Kingdom": "London", "England": "London", "Scotland": "Edinburgh", "Switzerland": "Bern",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Mexico": "Mexico City", "Australia": "Canberra",
    "South Korea": "Seoul", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Colombia": "Bogota", "Venezuela": "Caracas", "Indonesia": "Jakarta", "the Philippines": "Manila",
    "New Zealand": "Wellington", "Taiwan": "Taipei", "Israel": "Jerusalem", "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana", "Estonia": "Tallinn", "Latvia": "Riga", "Nigeria": "Abuja", "Ethiopia": "Addis Ababa",
}  # fmt: skip

# Asked about like countries; none of them has a capital that was taught.
NO_COUNTRIES: Final = (
    "Narnia", "Wakanda", "Atlantis", "Mordor", "Texas", "California", "Africa", "Europe", "Asia", "Mars",
    "the moon", "Hogwarts",
    "Bavaria", "Antarctica", "Westeros", "Gondor", "Oz", "Neverland", "Siberia", "Hawaii", "Alaska", "Sicily",
    "Hyrule", "Florida",
    "Middle Earth", "Gotham", "Utopia", "Elbonia", "Latveria", "Genovia", "Panem", "Zamunda", "Krypton", "Tatooine",
    "Asgard",
    "Eldorado", "Lilliput", "Ruritania", "Freedonia", "Zubrowka", "Tuscany", "Provence", "Quebec", "Ontario",
    "Queensland",
)  # fmt: skip


def mixed_country(rng: random.Random) -> str:
    """Return the beginning of one country's name with the end of another's."""
    while True:
        one, two = (rng.choice(list(CAPITALS)).split()[-1] for _ in range(2))
        name = (
            one[: rng.randint(2, max(2, len(one) - 2))] + two[rng.randint(1, max(1, len(two) - 2)) :].lower()
        )
        if name not in CAPITALS and one != two:
            return name


COLOURS: Final = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "milk": "white", "a lemon": "yellow",
    "a banana": "yellow", "a carrot": "orange", "chocolate": "brown", "a frog": "green", "a crow": "black",
    "a tomato": "red", "the sky": "blue", "the sun": "yellow", "the sea": "blue", "a leaf": "green",
    "a flamingo": "pink", "an elephant": "grey", "a strawberry": "red", "a cucumber": "green", "a cherry": "red",
    "gold": "yellow", "a polar bear": "white", "coffee": "brown",
}  # fmt: skip

SOUNDS: Final = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "owl": "hoot",
    "horse": "neigh", "lion": "roar", "bee": "buzz", "snake": "hiss", "frog": "croak", "hen": "cluck",
    "mouse": "squeak", "wolf": "howl", "goat": "maa", "crow": "caw", "chicken": "cluck", "rooster": "cock-a-doodle-doo",
}  # fmt: skip

OPPOSITES: Final = {
    "hot": "cold", "big": "small", "up": "down", "open": "closed", "day": "night", "old": "new",
    "fast": "slow",
    "hard": "soft", "wet": "dry", "full": "empty", "left": "right", "good": "bad", "light": "dark",
    "early": "late", "high": "low", "rich": "poor", "loud": "quiet", "black": "white",
    "strong": "weak", "happy": "sad", "young": "old", "long": "short", "inside": "outside", "heavy": "light",
}  # fmt: skip

NAMES: Final = _split(
    "Alice Anna Ben Carla David Emma Felix Grace Hans Ines Jonas Kenji Laura Maria Nora Oscar Paula "
    "Sara Tom Yuki Ada Bob Clara Max Mia Leo"
)

PLACES: Final = (
    "Oslo", "Paris", "Tokyo", "London", "Berlin", "Madrid", "Kyoto", "Lima", "Cairo", "Rome", "Boston",
    "Osaka",
    "New York", "San Jose", "Hong Kong", "Buenos Aires", "Cape Town",
)  # fmt: skip

THINGS: Final = _split(
    "apple book river stone garden window music letter bridge candle forest island mirror pencil rocket "
    "silver summer table tiger train water winter house cloud coffee dragon engine flower hammer jacket "
    "kitten ladder market needle orange planet rabbit school ticket violin bread chair cheese door "
    "paper ship star"
)

NAME_PARTS: Final = _split(
    "get find list read fetch check make send show look up search web file page user data mail news map "
    "date clock zone day week unit rate price stock track image text word code math calc run query item "
    "order info note task room score table graph chart sound voice local time weather wiki tool convert "
    "translate random number id key log cloud state city"
)

PARAMETERS: Final = _split(
    "city query text url name format timezone date place location path user_id word term topic q input "
    "file title language country value amount unit code expression symbol id key page max_results "
    "from_date mode target image_url message"
)

FOREIGN: Final = (
    "こんにちは", "日本の首都はどこですか。", "你好，你是谁？", "Привет!", "¿Qué tal?", "Où est la gare ?",
    "Schöne Grüße", "🙂", "🎉🎉", "안녕하세요", "x = [1, 2, 3]",
    "SELECT * FROM t;", "<b>bold</b>", "def f(x): return x",
    "...", "???",
)  # fmt: skip

# Words of the random prose in prompts (descriptions, instructions), which has no bearing on the answer.
PROSE: Final = _split(
    "the a an of to in for and or with from by on at is are be this that your you it as not any all "
    "each one two answer question user assistant tool result value string format time date zone current "
    "local city name list search text page file standard optional used returns gives finds be short "
    "polite clear helpful friendly always never please when if then only about which must may should "
    "can will have has do does was no more than first last every other new time numbers words people "
    "language English help tell say write read think step data"
)

_ONSETS: Final = _split("b c d f g h k l m n p r s t v z br dr kl st tr pl sh th")
_VOWELS: Final = _split("a e i o u a e i o ai")
_CODAS: Final = ["", "", "n", "r", "l", "s", "t", "k", "m"]


_PROSE_WORDS: Final = frozenset(PROSE)


def invent(rng: random.Random, capital: bool = False) -> str:
    """Return a meaningless word of one to three syllables."""
    count = rng.choice((1, 2, 2, 2, 3))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
    if rng.random() < 0.12:
        word = rng.choice(_VOWELS)[0] + word
    if len(word) < 3:
        word += rng.choice("nrlst")
    if word in _PROSE_WORDS:
        return invent(rng, capital)
    return word.capitalize() if capital else word


def person(rng: random.Random) -> str:
    """Return a person's name, half of them invented."""
    return rng.choice(NAMES) if rng.random() < 0.5 else invent(rng, capital=True)


def place(rng: random.Random) -> str:
    """Return a place of one or two words, about two thirds of them invented."""
    if rng.random() < 0.35:
        return rng.choice(PLACES)
    return " ".join(invent(rng, capital=True) for _ in range(rng.choice((1, 1, 1, 2))))


def things(rng: random.Random, max_words: int) -> str:
    """Return one to `max_words` different lower-case words, half of them invented."""
    count = rng.randint(1, max_words)
    words: dict[str, None] = {}
    while len(words) < count:
        words[rng.choice(THINGS) if rng.random() < 0.5 else invent(rng)] = None
    return " ".join(words)


def oddity(rng: random.Random) -> str:
    """Return something people paste: a URL, a path, a code, a title. No quotes, no backslashes."""
    one, two, number = invent(rng), rng.choice(THINGS), rng.randint(0, 9999)
    return rng.choice(
        (
            f"https://{one}.com", f"https://www.{one}.org/{two}/{number}", f"http://{one}.net/{two}.html",
            f"{two}_{one}.txt", f"/home/{one}/{two}.py", f"{one}@{two}.com", f"{one.upper()}-{number}",
            f"{one.capitalize()} {two.capitalize()}", f"{one.capitalize()}'s {two} ({number})", f"#{number}",
            f"%Y-%m-%d {one}", f"{one}: {two}, {two} {number}", f"{two}-{one}", f"{number} {two} & {number} {one}",
        )
    )  # fmt: skip


def sentence(rng: random.Random, min_words: int, max_words: int, invented: float = 0.1) -> str:
    """Return `min_words` to `max_words` words that look like a sentence of prose, some of them invented."""
    count = rng.randint(min_words, max_words)
    words = [invent(rng) if rng.random() < invented else rng.choice(PROSE) for _ in range(count)]
    for i in range(1, count):
        if rng.random() < 0.06:
            words[i] = rng.choice(
                (words[i] + ",", words[i].capitalize(), str(rng.randint(0, 2100)), f"({words[i]})")
            )
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", "", "!"))
