"""Texts to be put into one of a few categories, as Dify's question classifier asks for it.

Knows nothing of Harmony's messages or tokens.
"""

import json
import random
import uuid
from dataclasses import dataclass
from typing import Any, Final

from training.chat.exchange import Dialogue, Exchange, Reply, held_out
from training.chat.program_prompts import RECORDED, padded, question, recorded
from training.chat.words import invent, person, place, sentence, things

# Topics a text can be classified by: what a category may be called, and what is said about it.
TOPICS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "geography": (("Geography", "Questions about geography", "Countries and capitals", "Capitals", "Places",
    "Cities", "Countries",
                   "Country questions", "Travel and geography"), ()),
    "math": (("Sums", "Math", "Mathematics", "Arithmetic", "Calculations", "Numbers", "Maths questions",
    "Additions", "Calculation"), ()),
    "animals": (("Animals", "Animal sounds", "Questions about animals", "Pets", "Nature and animals", "Zoo"), ()),
    "colours": (("Colours", "Colors", "Questions about colours", "Color questions", "What colour things have"), ()),
    "language": (("Language", "Words", "Opposites", "Vocabulary", "Questions about words", "Language questions"), ()),
    "smalltalk": (("Greetings", "Small talk", "Greeting", "Hello and goodbye", "Chitchat", "Social"), ()),
    "weather": (("Weather", "Questions about the weather", "Weather and climate", "Forecast"),
                ("What is the weather in {place}?", "Is it raining in {place}?", "How is the weather in {place}?",
                "Will it snow in {place}?", "Do I need an umbrella in {place}?", "How warm is it in {place}?",
                "Will it rain tomorrow?")),
    "time": (("Time", "Date and time", "Questions about the time", "Clock"),
             ("What time is it?", "What day is it today?", "What is the date?", "Tell me the time.", "What year is it?",
             "Which day of the week is it?", "How late is it?")),
    "shipping": (("Shipping", "Delivery", "Orders and delivery", "Shipping and delivery", "Order status", "Orders",
    "Logistics"),
                 ("Where is my order?", "My package has not arrived.", "When will my {thing} be delivered?",
                 "My order is late.",
                  "I ordered a {thing} and it is not here.", "Can I track my package?", "The delivery took too long.",
                  "How long does the delivery take?", "Do you ship to {place}?", "Has my {thing} been sent yet?")),
    "refund": (("Refund", "Refunds", "Returns", "Returns and refunds", "Money back", "After-sales"),
               ("I want my money back.", "How do I return the {thing}?", "I want a refund.",
               "I would like to return my {thing}.",
                "Please refund my order.", "Can I send the {thing} back?",
                "How long does a refund take?", "Give me my money back.", "I do not want the {thing} any more.")),
    "billing": (("Billing", "Payment", "Payments", "Invoices", "Billing and payment", "Price", "Account and billing"),
                ("I was charged twice.", "Where is my invoice?", "Can I pay by card?", "My payment failed.",
                "How much does the {thing} cost?",
                 "The price of the {thing} is too high.", "I have not paid the bill yet.", "Do you take credit cards?",
                 "Please send me the bill.")),
    "technical": (("Technical support", "Technical issue", "Support", "Bugs", "Technical problems", "Tech support",
    "IT"),
                  ("The app crashes.", "I cannot log in.", "My password does not work.",
                  "The {thing} does not start.", "I get an error message.",
                   "The website is down.", "How do I install the {thing}?", "I forgot my password.",
                   "The screen stays black.", "The {thing} stopped working.")),
    "sales": (("Sales", "Buying", "Purchase", "Product information", "Products", "Product questions", "Pre-sales"),
              ("I want to buy a {thing}.", "Do you sell {thing}s?", "Which {thing} should I buy?",
              "Is the {thing} in stock?",
               "Tell me about your {thing}s.", "What sizes does the {thing} have?", "I need a new {thing}.")),
    "complaint": (("Complaint", "Complaints", "Negative feedback", "Bad experience", "Dissatisfaction"),
                  ("Your service is terrible.", "I am very unhappy with the {thing}.",
                  "This is the worst {thing} ever.", "The staff was rude.",
                   "The food was cold and bad.", "I hate the new {thing}.",
                   "I am very disappointed.", "What an awful {thing}.")),
    "praise": (("Praise", "Positive feedback", "Compliments", "Satisfaction", "Good experience"),
               ("I love your {thing}.", "Great service, thank you!", "The {thing} is excellent.",
               "The staff was very friendly.",
                "Best {thing} ever!", "I am very happy with my {thing}.",
                "What a wonderful {thing}!", "I really like the {thing}.")),
}  # fmt: skip
_OTHER: Final = (
    "Other",
    "Others",
    "Something else",
    "Other questions",
    "Unknown",
    "None of these",
    "Everything else",
    "General",
)
_BY_NAME: Final = (
    "I have a question about {0}.",
    "{0} please.",
    "Tell me more about {0}.",
    "It is about {0}.",
)
_SKILL_TOPICS: Final = {"capital": "geography", "country": "geography", "sum": "math", "no sum": "math",
    "count": "math", "no count": "math", "colour": "colours", "sound": "animals", "opposite": "language",
    "greeting": "smalltalk"}  # fmt: skip
_SAID: Final = {"smalltalk": "greetings", "shipping": "delivery", "refund": "refunds", "billing": "payments",
    "technical": "problems", "sales": "products", "complaint": "complaints", "": "something else"}  # fmt: skip
# Topics between which a reader could hesitate; they never stand in one list. "" is a text about none of the topics.
_CONFUSED: Final = tuple(map(frozenset, (
    ("sales", "billing"), ("sales", "shipping"), ("billing", "refund"), ("billing", "technical"),
    ("shipping", "refund"),
    ("shipping", "billing"), ("complaint", "technical"), ("complaint", "shipping"), ("complaint", "refund"),
    ("complaint", "billing"), ("praise", "smalltalk"), ("geography", "weather"),
    ("geography", "time"), ("colours", "animals"),
    ("", "smalltalk"), ("", "language"),
)))  # fmt: skip
_OFF_TOPIC: Final = (
    "Who is {name}?", "Tell me a joke.", "Write a poem about {word}.", "Who invented the {word}?", "What is a {word}?",
    "How does a {word} work?", "What is the meaning of life?", "Write a story.", "Who are you?", "Sing a song.",
    "How do I make a {word}?", "Tell me a story about {name}.", "Give me a recipe for {word}.", "What is love?",
    "Explain how {word} works.", "What should I eat today?", "Who won the match?", "Write code that sorts a list.",
    "Write a {word} in Python.", "When was {name} born?", "Who was {name}?", "What do you think about {word}?",
    "Plan a trip with {name}.", "Who wrote {word}?", "Explain recursion.", "Tell me something about {word}.",
)  # fmt: skip


def _topic_text(rng: random.Random, held: bool) -> tuple[str, str, str]:
    """Return a topic, or nothing, a text about it, and what decides about the side of the split."""
    draw = rng.random()
    if draw < 0.42:
        while (exchange := question(rng, held)).skill not in _SKILL_TOPICS:
            pass
        return _SKILL_TOPICS[exchange.skill], exchange.message.strip(), ""
    if draw < 0.87:
        topic, (_, forms) = rng.choice([(name, value) for name, value in TOPICS.items() if value[1]])
    else:
        topic, forms = "", _OFF_TOPIC
    form = rng.choice(forms)
    text = form.format(place=place(rng), thing=things(rng, 1), word=things(rng, 1), name=person(rng))
    if rng.random() < 0.15:
        text = text.lower()
    return topic, text, form


def _ids(rng: random.Random, count: int) -> list[str]:
    """Return ids as Dify gives them (1 and 2, then the time at which a category was added), or others, in order."""
    draw = rng.random()
    if draw < 0.45:
        return [str(number) for number in range(1, count + 1)]
    if draw < 0.9:
        first, span = rng.randint(1_600_000_000_000, 2_000_000_000_000), 10 ** rng.randint(4, 10)
        times = sorted(rng.sample(range(first, first + span), count))
        kept = rng.choice((2, 2, 1, 0))
        return [str(number) for number in range(1, count + 1)][:kept] + [str(time) for time in times[kept:]]
    return [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(count)]


def _keywords(text: str) -> list[str]:
    """Return the last word of a text, which mostly says what it is about, if it is one."""
    last = text.split()[-1].strip(".,?!:;\"'()")
    return [last] if last.isalpha() else []


@dataclass(frozen=True)
class _Case:
    """A text, the categories it may be put into, the right one, and what the text is about."""

    text: str
    entries: list[dict[str, str]]
    right: dict[str, str]
    about: str


def _categories(rng: random.Random, held: bool) -> _Case:
    """Return a text and categories, of which it clearly fits one; or none, and then the last one is right.

    Held out is the pair of a text's wording and its category's name.
    """
    while True:
        topic, text, form = _topic_text(rng, held)
        right = rng.choice(TOPICS[topic][0] if topic else _OTHER)
        if not form or held_out(f"classifier:{form}/{right}") == held:
            break
    others = [name for name in TOPICS if name != topic and frozenset((name, topic)) not in _CONFUSED]
    names = [rng.choice(TOPICS[name][0]) for name in rng.sample(others, rng.randint(1, 4))]
    if topic and rng.random() < 0.3:
        names.append(rng.choice(_OTHER))
    about = _SAID.get(topic, topic)
    fits_none = topic and not set(names) & set(_OTHER) and rng.random() < 0.2
    if fits_none:
        right = names.pop()
        if form and held_out(f"classifier:{form}/{right}") != held:
            return _categories(rng, held)
    elif rng.random() < 0.15:  # a category of which the text uses the name
        about = right = " ".join(
            invent(rng, capital=rng.random() < 0.5) for _ in range(rng.choice((1, 1, 2)))
        )
        text = rng.choice(_BY_NAME).format(right)
    rng.shuffle(names)
    names.insert(len(names) if fits_none else rng.randint(0, len(names)), right)
    entries = [
        {"category_id": number, "category_name": name}
        for number, name in zip(_ids(rng, len(names)), names, strict=True)
    ]
    return _Case(text, entries, next(entry for entry in entries if entry["category_name"] == right), about)


def _input(rng: random.Random, text: str, categories: list[dict[str, str]], is_example: bool = False) -> str:
    compact = is_example and rng.random() < 0.6  # only Dify's examples are
    listed = json.dumps(categories, ensure_ascii=False, separators=(",", ":") if compact else None)
    gap = rng.choice(("\n    ", "\n", " "))
    hint = sentence(rng, 3, 8) if rng.random() < 0.3 else ""
    message = _message(text, listed, hint, gap)
    return f"\n    {message}\n" if rng.random() < 0.7 else message


def _message(text: str, listed: str, hint: str, gap: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return f'{{"input_text": [{quoted}],{gap}"categories": {listed},{gap}"classification_instructions": ["{hint}"]}}'


def _dify_classifier(rng: random.Random, held: bool) -> Dialogue:
    case = _categories(rng, held)
    hint = sentence(rng, 3, 8) if rng.random() < 0.3 else ""
    message = _message(case.text, json.dumps(case.entries, ensure_ascii=False), hint, "\n    ")
    instructions, examples = recorded(rng, held, "classifier")
    exchange = _classified(case, f"\n    {message}\n")
    return Dialogue("", "", (exchange,), instructions, history=tuple(examples))


def classifier(rng: random.Random, held: bool) -> Dialogue:
    """A text and categories, after examples with other categories; the answer is a block of JSON."""
    if rng.random() < RECORDED:
        return _dify_classifier(rng, held)
    engine = "You are a text classification engine that " + sentence(rng, 4, 12)
    job = f"### Job Description\n{engine}"
    task = "### Task\nAssign one category to the input text, with its key words. " + sentence(rng, 3, 10)
    examples = [_categories(rng, held) for _ in range(rng.choice((0, 1, 2, 2, 2)))]
    are_given = (
        rng.random() < 0.6
    )  # as Dify gives them, in a form of their own; or as the model itself writes them
    history: list[dict[str, Any]] = []
    for case in examples if are_given else ():
        answer = json.dumps({"keywords": _keywords(case.text), **case.right}, ensure_ascii=False)
        if rng.random() < 0.7:
            answer = answer.replace(' "category_id"', '\n    "category_id"').replace(
                ' "category_name"', '\n    "category_name"'
            )
            answer = f"\n```json\n    {answer}\n```\n"
        history += [
            {"role": "user", "content": _input(rng, case.text, case.entries, is_example=True)},
            {"role": "assistant", "content": answer},
        ]
    drawn = [*(() if are_given else examples), _categories(rng, held)]
    exchanges = tuple(_classified(each, _input(rng, each.text, each.entries)) for each in drawn)
    return Dialogue("", "", exchanges, padded(rng, job, task), history=tuple(history))


def _classified(case: _Case, message: str) -> Exchange:
    name = case.right["category_name"]
    answer = json.dumps({"keywords": _keywords(case.text), **case.right}, ensure_ascii=False)
    # An id stands before its name, so it cannot be looked up by the name: the analysis reads the list up to the name,
    # at every effort, and the answer repeats what was read last.
    read = case.entries[: case.entries.index(case.right) + 1]
    walk = ", ".join(json.dumps(entry, ensure_ascii=False) for entry in read)
    reply = Reply(
        (
            f"The text is about {case.about}. I read the categories up to the one that fits: {walk}.",
            f"Of the categories {name} fits best.",
            f"Let me check the others. None of them fits as well as {name}. I copy the last one that I read.",
        ),
        f"```json\n{answer}\n```",
        unjudged="keywords",
    )
    return Exchange("classifier", "", message, reply)
