"""What the model can do without tools, facts aside: counting, repeating, small talk, memory; and what it cannot do.

A skill is a function from a random generator to one `Exchange`. Knows nothing of tools, dialogues, Harmony or tokens.
"""

import random
from dataclasses import dataclass
from typing import Final

from training.chat.exchange import Exchange, Reply, Skill
from training.chat.facts import (
    CAPITAL_FORMS,
    COLOUR_FORMS,
    NUMBER_WORDS,
    OPPOSITE_FORMS,
    SOUND_FORMS,
    capital,
    colour,
    country,
    no_total,
    opposite,
    sound,
    total,
)
from training.chat.phrasing import loosely, phrase, preceded
from training.chat.words import (
    CAPITALS,
    FOREIGN,
    NO_COUNTRIES,
    SOUNDS,
    THINGS,
    invent,
    mixed_country,
    oddity,
    person,
    place,
    sentence,
    things,
)

UNKNOWN: Final = (
    "Sorry, I do not know that. I am a small demonstration model and know only a few things: "
    "ask me for a capital, a colour, an opposite or a sum."
)
NO_TOOL: Final = "Sorry, I have no tool for that."
MAX_COUNT: Final = 30
NO_COUNT: Final = f"Sorry, I can only count to {MAX_COUNT}."
HELLO: Final = "Hello! How can I help you?"
WELCOME: Final = "You are welcome!"
GOODBYE: Final = "Goodbye! See you soon."
FINE: Final = "I am fine, thank you. How can I help you?"
GLAD: Final = "I am glad. Is there anything else I can do?"
NAME: Final = "I am mlx-demo, a small demonstration model."
ABILITIES: Final = "I can add, count, repeat words, remember your name and call tools."


@dataclass
class Memory:
    """What the user has told about themselves in a dialogue."""

    name: str = ""
    home: str = ""


_COUNT_FORMS: Final = (
    "Count to {end}.", "Count from 1 to {end}.", "Please count to {end}.", "Can you count to {end}?",
    "count up to {end}",
    "Count from one to {end}.", "List the numbers from 1 to {end}.", "Please count up to {end}.", "Count until {end}.",
    "Write the numbers from 1 to {end}.", "Could you count to {end}, please?", "Count up to {end}!",
    "Count to {end} for me.",
    "Give me the numbers from 1 to {end}.", "Show me the numbers 1 to {end}.", "I want you to count to {end}.",
)  # fmt: skip


def count(rng: random.Random) -> Exchange:
    """The numbers from 1 to a number up to 30, or that the number is too large."""
    end = rng.randint(2, MAX_COUNT)
    if rng.random() < 0.12:
        end = rng.choice((rng.randint(31, 99), rng.randint(100, 99_999), 100, 1000, 50))
    in_words = end < len(NUMBER_WORDS) and rng.random() < 0.08
    plain = rng.random() < 0.4
    forms = _COUNT_FORMS[:3] if plain else _COUNT_FORMS
    message, which = phrase(rng, forms, end=NUMBER_WORDS[end] if in_words else str(end))
    if not plain:
        message = loosely(rng, message)
    if end > MAX_COUNT:
        medium = f"I learned to count to {MAX_COUNT}. This goes further, and I say so."
        high = (
            "Let me see whether I can do it all the same. I would leave numbers out or say some twice. "
            "A wrong line of numbers is worse than none. So I only say what I can do."
        )
        reply = Reply(("That is too far to count.", medium, high), NO_COUNT)
        return Exchange(
            "no count", f"{end}/{which}", message, reply, title="Counting", fields=(("error", NO_COUNT),)
        )
    medium = f"The first number is 1. The last number is {end}. Each number is one more than the one before."
    high = (
        f"Let me plan this before I start. I write all numbers in one line with a comma after each. "
        f"I must not leave one out and I must not go past {end}. After {end} I stop."
    )
    line = ", ".join(str(number) for number in range(1, end + 1))
    return Exchange(
        "count", f"{end}/{which}", message, Reply((f"Count up to {end}.", medium, high), line),
        title=f"Counting to {end}", fields=(("numbers", list(range(1, end + 1))),),
    )  # fmt: skip


def echo(rng: random.Random) -> Exchange:
    """One to four words repeated; sometimes with repetitions among them, or something odd."""
    text = things(rng, 4)
    if rng.random() < 0.2:
        text = " ".join(rng.choices([*text.split(), rng.choice(THINGS)], k=rng.randint(2, 5)))
    elif rng.random() < 0.15:
        text = oddity(rng)
    elif rng.random() < 0.1:
        text = sentence(rng, 2, 8).rstrip(".!")
    forms = (
        "Say {text}.", "Repeat: {text}.", "Please say {text}.", "Repeat {text}.", "Say: {text}",
        "Repeat after me: {text}",
        "Can you say {text}?", "Please repeat: {text}", 'Say "{text}".',
    )  # fmt: skip
    plain = rng.random() < 0.5
    message, which = phrase(rng, forms[:3] if plain else forms, text=text)
    medium = "The user gave me the words. I say them back in the same order and add nothing."
    high = (
        "Let me check this before I answer. I do not need to know what the words mean. "
        "I keep every letter as it is. I leave no word out and I do not say any word twice. Then I stop."
    )
    return Exchange(
        "echo", f"{text}/{which}", message, Reply(("Repeat the words.", medium, high), text),
        title="Repeating words", fields=(("text", text),),
    )  # fmt: skip


_GREETINGS: Final = (
    (("Hello!", "Hi!", "Hello there!", "Good morning!", "Hi there!", "Hey!", "Hey there!", "Good evening!",
    "Good afternoon!",
      "Good day!", "Hello, mlx-demo!", "Greetings!", "Hello, can you hear me?", "Are you there?", "Hello again!",
      "hi :)",
      "Nice to meet you!", "Hiya!", "Hello 👋", "Test", "test", "testing", "ping", "Let's start.", "Can you help me?",
      "I have a question.", "I need help.", "Can I ask you something?"), HELLO),
    (("Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot!", "Thanks, that was helpful!", "thx",
    "Many thanks!",
      "Thank you so much!", "Great, thanks!", "Ok, thank you.", "Perfect, thank you!", "That helps, thanks."), WELCOME),
    (("Goodbye!", "Bye!", "Bye bye!", "See you!", "Good night!", "See you later!", "I have to go.", "See you soon!",
      "That is all.", "Farewell!", "Ok, bye!", "Have a nice day!"), GOODBYE),
    (("How are you?", "How are you doing?", "How are you today?", "How is it going?", "Hello, how are you?",
    "What's up?",
      "Hi, how are you?", "How do you feel?", "Are you well?", "How do you do?", "Hey, what's up?"), FINE),
    (("Great!", "Nice!", "Good.", "Very good!", "Cool!", "Perfect!", "Well done!", "OK.", "Okay.", "That is right.",
    "Wow!",
      "Correct!", "Good job!", "I see.", "Excellent!", "That is correct.", "Right."), GLAD),
)  # fmt: skip


def greeting(rng: random.Random) -> Exchange:
    """Hello, thanks, good bye."""
    messages, answer = rng.choices(_GREETINGS, (5, 3, 3, 2, 2))[0]
    message, _ = phrase(rng, (rng.choice(messages[:4] if rng.random() < 0.3 else messages),))
    if rng.random() < 0.1:
        message = message.lower()
    medium = "The user is being kind. A short and kind reply is right here."
    high = (
        "Let me think about what is needed. There is no question to answer and nothing to look up. "
        "People say this at the start or at the end of a talk. One short line is all I need."
    )
    return Exchange(
        "greeting",
        "",
        message,
        Reply(("A greeting.", medium, high), answer),
        title="Greeting",
        fields=(("message", answer),),
    )


_WHO: Final = (
    "Who are you?", "What are you?", "What is your name?", "What's your name?", "Are you a human?", "Are you ChatGPT?",
    "What model are you?", "Which model are you?", "Who am I talking to?", "Tell me about yourself.",
    "Are you a robot?",
    "Introduce yourself.", "Who made you?", "Are you an AI?", "Describe yourself.", "Do you have a name?",
    "Which model is this?",
    "What kind of model are you?", "How big are you?", "Are you gpt-oss?", "who r u", "How old are you?",
    "Are you real?",
    "What language model are you?", "What should I call you?",
)  # fmt: skip
_ABLE: Final = (
    "What can you do?", "How can you help me?", "What can you do for me?", "What do you know?",
    "What can I ask you?", "Help!",
    "What are you able to do?", "What are your skills?", "help", "What can you help me with?",
    "Tell me what you can do.",
    "Which questions can you answer?", "What are you good at?", "How can you help?", "What are you for?",
    "List your skills.",
    "What should I ask you?", "Show me what you can do.",
)  # fmt: skip


def identity(rng: random.Random) -> Exchange:
    """Who the model is, and what it can do."""
    asks_for_skills = rng.random() < 0.4
    forms = _ABLE if asks_for_skills else _WHO
    plain = rng.random() < 0.3
    message, _ = phrase(rng, forms[:2] if plain else forms)
    if not plain:
        message = loosely(rng, message)
    medium = "The question is about myself. I say plainly that I am small and what I am for."
    high = (
        "Let me think about what is true. I am a very small model that was made to show how things work. "
        "I know some things but not much. I should not promise more than I can do. So I keep it short."
    )
    return Exchange(
        "identity", "", message, Reply(("About myself.", medium, high), ABILITIES if asks_for_skills else NAME),
        title="About this model",
        fields=(("abilities", ABILITIES),) if asks_for_skills else (("name", "mlx-demo"), ("answer", NAME)),
    )  # fmt: skip


_UNKNOWN_FORMS: Final = (
    "Who is {other}?", "What is a {word}?", "Write a poem about {word}.", "How do I make a {word}?",
    "Tell me a story about {other}.", "Why is the {word} so {word2}?", "Who invented the {word}?",
    "Explain {word} {word2} to me.", "When was {other} born?", "Translate {word} into {other}.",
    "What is the meaning of {word}?", "Where is {other}?", "{other} {word} {word2} {other}?",
    "Can you help me with my {word}?",
    "Write a {word} in Python.", "What does a {word} eat?", "How old is {other}?", "Which {word} is the best?",
    "Do you like {word}?", "What is the difference between {word} and {word2}?", "How does a {word} work?",
    "What is {word}?",
    "Explain how {word} works.", "Give me a recipe for {word}.", "Write an email to {other} about the {word}.", "Why?",
    "Summarise this text: {prose}", "Translate this into German: {prose}", "Tell me a joke.",
    "Tell me a joke about {word}.",
    "What is the population of {country}?", "Who is the president of {country}?",
    "What language do people speak in {country}?",
    "What is the currency of {country}?", "What is the largest city of {country}?", "Where is {country}?",
    "Is {country} big?",
    "What is the flag of {country}?", "How many people live in {country}?", "Who is the king of {country}?",
    "What does a {animal} eat?", "How many legs has a {animal}?", "Where does a {animal} live?",
    "How old can a {animal} get?",
    "How many letters has {word}?", "How do you spell {word}?", "What rhymes with {word}?", "What is love?",
    "What's new?",
    "Who won the match?", "Write a haiku.", "Write a story.", "What should I eat today?", "What is the news?",
    "Sing a song.",
    "How do I learn {word}?", "What is the best way to {word} a {word2}?", "Write code that sorts a list.",
    "Explain recursion.",
    "Give me {number} ideas for a {word}.", "List {number} facts about {other}.", "How far is {other}?",
    "Who wrote {other}?",
    "Fix this code: {word}({word2})", "What happened in {year}?", "Who was {other}?", "What do you think about {word}?",
    "Plan a trip to {other}.", "How much does a {word} cost?", "Where can I buy a {word}?", "Is {word} good for me?",
    "I feel {word}. What should I do?", "Why is the sky blue?", "How tall is {other}?",
    "What is the {word} of {other}?",
    "{prose}", "{prose}", "What does {word} mean?", "Name three {word}s.", "Name a {word}.", "Describe a {word}.",
    "What is machine learning?", "What is the weight of a {word}?", "How long is the {word} of {other}?",
    "What's a {word}?",
    "Can you write a {word}?", "Make a list of {word}s.", "Is it true that {prose}",
    "Who are {other} and {other2}?", "{word}",
    "Correct this sentence: {prose}", "What is the {word}?", "Draw a {word}.", "Continue: {prose}",
    "How many {word}s are there?",
)  # fmt: skip
_INVENTED_KEY: Final = (
    *((form, True) for form in CAPITAL_FORMS), *((form, False) for form in COLOUR_FORMS + SOUND_FORMS + OPPOSITE_FORMS),
)  # fmt: skip


def unknown(rng: random.Random) -> Exchange:
    """Something the model was never taught, which it says: a question, prose that asks for nothing, or no sense."""
    draw = rng.random()
    if draw < 0.7:
        return unknown_question(rng)
    if draw < 0.78:
        text = _senseless(rng)
        return _not_known(text, text)
    text = " ".join(sentence(rng, 2, 12) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    if rng.random() < 0.35:
        text = rng.choice(("{0}", "{0} {1}", "{1} {0}")).format(rng.choice(FOREIGN), text)
    return _not_known(text, text)


def _senseless(rng: random.Random) -> str:
    """Return twelve words or more without sense, often the same few again and again, also as words to be said."""
    few = [rng.choice(THINGS) if rng.random() < 0.4 else invent(rng) for _ in range(rng.randint(1, 5))]
    count = rng.randint(12, 60)
    words = (few * count)[:count] if rng.random() < 0.7 else [invent(rng) for _ in range(count)]
    text = " ".join(words)
    return rng.choice(("Say {}", "say {}", "Repeat {}.", "{}", "{}.", "Please say: {}")).format(text)


def unknown_question(rng: random.Random) -> Exchange:
    """A question or a request for something the model was never taught."""
    word = rng.choice(THINGS) if rng.random() < 0.4 else invent(rng)
    other = invent(rng, capital=True) if rng.random() < 0.6 else person(rng)
    if rng.random() < 0.3:  # asked like a fact, about something that does not exist
        form, is_name = rng.choice(_INVENTED_KEY)
        key = (invent(rng, capital=True) if is_name or rng.random() < 0.2 else invent(rng)).rstrip("s")
        if is_name and rng.random() < 0.6:
            key = rng.choice(NO_COUNTRIES) if rng.random() < 0.5 else mixed_country(rng)
        if not is_name and form in COLOUR_FORMS:
            key = rng.choice((f"a {key}", f"the {key}", key))
        message, which = phrase(rng, (form,), key=key, keys=f"{key}s")
        return _not_known(f"{key}/{form}", loosely(rng, message))
    message, which = phrase(
        rng, _UNKNOWN_FORMS, word=word, other=other, word2=invent(rng), other2=person(rng),
            animal=rng.choice(list(SOUNDS)),
        country=rng.choice(list(CAPITALS)), number=str(rng.randint(2, 10)), year=str(rng.randint(1500, 2030)),
        prose=sentence(rng, 3, 14),
    )  # fmt: skip
    return _not_known(f"{word}/{other}/{which}", loosely(rng, message))


def _not_known(split_key: str, message: str) -> Exchange:
    medium = "The question is not about anything I learned. I should say so and not make something up."
    high = (
        "Let me look through what I know once more. I can add and count, and I can repeat words. "
        "None of that helps with this question. A made up answer would be worse than no answer."
    )
    reply = Reply(("I never learned this.", medium, high), UNKNOWN)
    fields = (("error", "I do not know that."),)
    return Exchange("unknown", split_key, message, reply, fields=fields)


_ASK_HOME: Final = (
    "Where do I live?", "What is my home?", "Where am I from?", "Do you know where I live?", "Which city do I live in?",
    "What city am I from?", "Do you remember where I live?", "In which city do I live?",
)  # fmt: skip
_ASK_NAME: Final = (
    "What is my name?", "Who am I?", "Do you remember my name?", "What's my name?", "Do you know my name?",
    "whats my name",
    "Tell me my name.", "Can you remember my name?", "Say my name.", "What was my name?", "What am I called?",
)  # fmt: skip
_TELL_HOME: Final = (
    "I live in {told}.", "My home is {told}.", "I am from {told}.", "I'm from {told}.", "I come from {told}.",
    "We live in {told}.",
    "Hi, I live in {told}.", "My city is {told}.",
)  # fmt: skip
_TELL_NAME: Final = (
    "My name is {told}.", "I am {told}.", "Hello, my name is {told}.", "Call me {told}.", "I'm {told}.",
    "Hi, I'm {told}!",
    "My name's {told}.", "Hi, my name is {told}.", "Hello, I am {told}.", "You can call me {told}.", "hi i am {told}",
    "Please call me {told}.", "This is {told}.",
)  # fmt: skip


def remember(rng: random.Random, memory: Memory) -> Exchange:
    """The user's name or home: told, asked about, or asked about without having been told."""
    about_home = rng.random() < 0.4
    if bool(memory.home) != bool(memory.name) and rng.random() < 0.6:
        about_home = bool(memory.home)  # mostly ask about what was told
    known = memory.home if about_home else memory.name
    what = "home" if about_home else "name"
    if (not known and rng.random() < 0.85) or rng.random() < 0.1:
        told = place(rng) if about_home else person(rng)
        message, which = phrase(rng, _TELL_HOME if about_home else _TELL_NAME, told=told)
        message = preceded(rng, message) if rng.random() < 0.3 else message
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
        field = "city" if about_home else "name"
        return Exchange(
            "remember", f"{what}/{told}/{which}", message, Reply(analyses, answer),
            title="Introduction", fields=((field, told),),
        )  # fmt: skip
    message, _ = phrase(rng, _ASK_HOME if about_home else _ASK_NAME)
    message = loosely(rng, message)
    low = f"The {what} of the user."
    title = f"Your {what}"
    if rng.random() < 0.08:  # told and asked in one message
        known = place(rng) if about_home else person(rng)
        if about_home:
            memory.home = known
        else:
            memory.name = known
        told, _ = phrase(rng, (_TELL_HOME if about_home else _TELL_NAME)[:4], told=known)
        title = "Introduction"
        message = f"{told} {rng.choice(_ASK_HOME if about_home else _ASK_NAME)}"
    field = "city" if about_home else "name"
    if not known:
        medium = f"The user asks for the {what}. Nobody has told me the {what} so far, so I cannot say it."
        high = (
            f"Let me look through the talk once more. I go from the first message to the last. "
            f"There is no message that gives the {what}. I must not make one up. The user may tell me later."
        )
        answer = f"You have not told me your {what}."
        reply = Reply((low, medium, high), answer)
        return Exchange("remember", "", message, reply, title=title, fields=((field, None),))
    medium = f"The user told me the {what} before. It was {known}."
    high = (
        f"Let me look through the talk once more. I go from the first message to the last. "
        f"There the user gave the {what} as {known}. So I copy {known} letter by letter into my answer."
    )
    answer = f"You live in {known}." if about_home else f"Your name is {known}."
    return Exchange(
        "recall", "", message, Reply((low, medium, high), answer), title=title, fields=((field, known),)
    )


# Skills that need neither tools nor memory, with their weights.
SIMPLE_SKILLS: Final[tuple[tuple[Skill, float], ...]] = (
    (capital, 14), (colour, 7), (sound, 6), (opposite, 7), (total, 15), (no_total, 7), (country, 4), (count, 6),
    (echo, 11), (greeting, 5),
    (identity, 5), (unknown, 17),
)  # fmt: skip


def simple_skill(rng: random.Random) -> Skill:
    """Return a skill that needs neither tools nor memory, chosen by weight."""
    skills, weights = zip(*SIMPLE_SKILLS, strict=True)
    skill: Skill = rng.choices(skills, weights)[0]
    return skill
