"""What prompts of programs are made of: sections of instructions, and the questions that stand in them; Dify's own."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, Final

from training.chat.exchange import Exchange, is_on_side
from training.chat.skills import Memory, greeting, identity, remember, simple_skill
from training.chat.words import sentence

_HEADS: Final = (
    "Task",
    "Format",
    "Constraint",
    "Memory",
    "Job Description",
    "Instructions",
    "Guidelines",
    "Steps",
    "Example",
    "Output",
    "Note",
)


RECORDED: Final = 0.5
"""Share of the prompts of a kind that have Dify's own words, where these were recorded."""

_NO_HISTORY: Final = "<histories>\n\n</histories>"


@cache
def _recordings() -> dict[str, list[dict[str, Any]]]:
    path = Path(__file__).with_name("dify_prompts.json")
    recordings: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return recordings


def recorded(rng: random.Random, held: bool, node: str) -> tuple[str, list[dict[str, Any]]]:
    """Return a node's instructions and its examples, as Dify sends them; sometimes with a chat before the text."""
    system, *examples, _ = _recordings()[node]
    talk = [question(rng, held) for _ in range(rng.choice((0, 0, 1, 2)))]
    said = "\n".join(f"Human: {each.message.strip()}\nAssistant: {each.reply.answer}" for each in talk)
    instructions = system["content"].replace(_NO_HISTORY, _NO_HISTORY.replace("\n\n", f"\n{said}\n"))
    return instructions, [part for example in examples for part in _as_rendered(example)]


def _as_rendered(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as the server hands it to the template: what was said with a call is a message of its own."""
    if message["role"] != "assistant":
        return [message]
    said = {"role": "assistant", "content": message["content"].lstrip("\n")}
    return (
        [said, {"role": "assistant", "tool_calls": message["tool_calls"]}]
        if "tool_calls" in message
        else [said]
    )


def section(rng: random.Random, head: str = "", sentences: int = 3) -> str:
    """Return a section of prose under a heading, as lines or as a list."""
    lines = [sentence(rng, 3, 14) for _ in range(rng.randint(1, sentences))]
    style = rng.random()
    if style < 0.25:
        lines = [f"- {line}" for line in lines]
    elif style < 0.4:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
    return f"### {head or rng.choice(_HEADS)}\n" + rng.choice(("\n", " ", "\n")).join(lines)


def padded(rng: random.Random, *important: str, most: int = 5) -> str:
    """Return sections of prose with what matters among them, in order."""
    parts = [section(rng) for _ in range(rng.randint(0, most))]
    places = sorted(rng.randint(0, len(parts)) for _ in important)
    for shift, (at, text) in enumerate(zip(places, important, strict=True)):
        parts.insert(at + shift, text)
    if rng.random() < 0.5:
        parts.insert(rng.randint(0, len(parts)), "### Memory\n<histories>\n\n</histories>")
    return "\n".join(parts)


def question(rng: random.Random, held: bool) -> Exchange:
    """Return what a user may have asked."""
    while True:
        draw = rng.random()
        skill = (
            (lambda r: remember(r, Memory()))
            if draw < 0.08
            else rng.choice((greeting, identity))  # of many wordings, each of them seldom
            if draw < 0.22
            else simple_skill(rng)
        )
        exchange = skill(rng)
        if is_on_side(exchange, held) and exchange.skill != "echo":
            return exchange
