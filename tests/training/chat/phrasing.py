"""How people word what they ask: forms filled in, and what they put around them. Knows no skill and no answer."""

import random
from collections.abc import Sequence
from typing import Final

from training.chat.words import sentence

_BEFORE: Final = (
    "Hi! ", "Hello! ", "Hey, ", "Hello, ", "Quick question: ", "I have a question. ", "Question: ", "So, ", "Ok, ",
    "Now, ",
    "Please tell me: ", "Can you tell me: ", "Please answer: ", "Q: ", "Thanks! ", "Thank you. ", "Great! ", "Well, ",
    "Answer the question.\n", "Please answer the question.\n", "Answer this question.\n\n", "Answer briefly.\n",
    "Tell me, ", "I wonder: ", "One more: ", "Next question: ", "Please help me. ", "> ", "- ", "1. ",
)  # fmt: skip
_AFTER: Final = (
    " Thanks!", " Thank you!", " Thank you.", " please", " please?", " Please.", ", please.", " Please be brief.",
    " Answer shortly.", " Just the answer.", "\n", "\n\n", " :)", " 🙂", "\n\nAnswer:", "\nThanks", "?", "??", "!",
    " Be short.",
    " Do you know?", " Tell me.",
)  # fmt: skip


def phrase(rng: random.Random, forms: Sequence[str], **parts: str) -> tuple[str, int]:
    """Return one of the forms filled in, and its index; some lose the final mark or the first capital."""
    which = rng.randrange(len(forms))
    text = forms[which].format(**parts)
    if rng.random() < 0.12 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.06 and not forms[which].startswith("{"):
        text = text[0].lower() + text[1:]
    return text, which


def loosely(rng: random.Random, text: str) -> str:
    """Return a message as people really type it. Only for messages from which nothing has to be copied."""
    draw = rng.random()
    if draw < 0.14:
        text = text.lower()
    if rng.random() < 0.1 and text[-1:] in (".", "?", "!"):
        text = text[:-1]
    if rng.random() < 0.08:
        text += rng.choice(_AFTER)
    return preceded(rng, text)


def preceded(rng: random.Random, text: str, is_broken: bool = True) -> str:
    """Return a message with what people put before a request, or broken over lines; its end stays the end."""
    draw = rng.random()
    if draw < 0.09:
        before = rng.choice(_BEFORE)
        text = before.lower() + text if text[:1].islower() else before + text
    elif draw < 0.11:
        text = f"{sentence(rng, 2, 10)}\n{text}"
    elif draw < 0.12:
        text = rng.choice((" ", "\n", "\n\n", "  ")) + text
    if is_broken and rng.random() < 0.07:
        text = _broken(rng, text)
    return text


def _broken(rng: random.Random, text: str) -> str:
    """Return a text with a line break where one of its spaces was, as text parts are joined."""
    spaces = [i for i, letter in enumerate(text) if letter == " "]
    if not spaces:
        return text
    at = rng.choice(spaces)
    return text[:at] + rng.choice(("\n", "\n", "\n", " \n", "\n\n")) + text[at + 1 :]
