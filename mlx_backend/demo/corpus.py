"""Dialogues: turns of all skills, with instructions, tools and an effort; and the split into training and evaluation.

The same seed gives the same dialogues. What is held out (`skills.held_out`) never appears in training, neither as a
turn that is learned nor as an earlier turn of a dialogue. Knows nothing of tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mlx_backend.demo.skills import EFFORTS, Exchange, Memory, Skill, held_out, remember, simple_skill
from mlx_backend.demo.tools import Tool, known_tool, missing_tool, named_tool, toolbox
from mlx_backend.demo.words import sentence

_INSTRUCTIONS: Final = (
    "You are a helpful assistant.", "You are a friendly assistant. Answer the user's questions.",
    "Answer shortly.", "Be polite.", "Answer in English.", "You are a bot in a shop.",
    "You are a helpful assistant. If you do not know something, say so.",
    "Use the tools when they help.", "You are mlx-demo.", "Think before you answer.",
)  # fmt: skip


@dataclass(frozen=True)
class Dialogue:
    """One conversation: instructions and tools, effort, turns, and the date and identity in its system message."""

    effort: str
    date: str
    exchanges: tuple[Exchange, ...]
    instructions: str = ""
    tools: list[Tool] = field(default_factory=list)
    identity: str = ""


def instructions(rng: random.Random) -> str:
    """Return a system prompt: none, a common one, or prose that has no bearing on the answers."""
    kind = rng.random()
    if kind < 0.45:
        return ""
    if kind < 0.65:
        return rng.choice(_INSTRUCTIONS)
    lines = [sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 3, 8)))]
    if kind < 0.8:
        lines.insert(0, rng.choice(_INSTRUCTIONS))
    return rng.choice((" ", "\n")).join(lines)


def _is_on_side(exchange: Exchange, held: bool) -> bool:
    """Whether an exchange belongs to the evaluation (`held`) or to training; those without a split key fit both."""
    return not exchange.split_key or held_out(f"{exchange.skill}:{exchange.split_key}") == held


def _skill(rng: random.Random, tools: list[Tool], memory: Memory, held: bool) -> Skill:
    """Choose the skill of the next turn."""
    if tools and rng.random() < 0.65:
        kind = rng.random()
        if kind < 0.7:
            return lambda rng: named_tool(rng, tools)
        if kind < 0.92:
            return lambda rng: known_tool(rng, tools)
        return lambda rng: missing_tool(rng, held)
    if rng.random() < 0.05:
        if tools or rng.random() < 0.5:
            return lambda rng: known_tool(rng, tools)
        return lambda rng: missing_tool(rng, held)
    if rng.random() < (0.5 if memory.name or memory.home else 0.16):
        return lambda rng: remember(rng, memory)
    return simple_skill(rng)


def _turn(rng: random.Random, skill: Skill, memory: Memory, held: bool) -> Exchange:
    """Draw until a turn is on the right side of the split; what the user told in a rejected one is forgotten."""
    before = (memory.name, memory.home)
    while not _is_on_side(exchange := skill(rng), held):
        memory.name, memory.home = before
    return exchange


def dialogue(rng: random.Random, held: bool = False, turns: int | None = None, effort: str = "") -> Dialogue:
    """Return a dialogue of `turns` turns (default: one to six), all held out or all for training."""
    tools = toolbox(rng, held) if rng.random() < 0.45 else []
    memory = Memory()
    effort = effort or rng.choices(EFFORTS, (0.4, 0.35, 0.25))[0]
    if turns is None:
        turns = rng.choices((1, 2, 3, 4, 5, 6), (0.28, 0.28, 0.23, 0.13, 0.05, 0.03))[0]
    if tools:
        turns = min(turns, 3)
    exchanges = tuple(_turn(rng, _skill(rng, tools, memory, held), memory, held) for _ in range(turns))
    date = f"{rng.randint(2024, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    identity = sentence(rng, 3, 8) if rng.random() < 0.04 else ""
    return Dialogue(effort, date, exchanges, instructions(rng), tools, identity)


def questions(rng: random.Random) -> Iterator[Exchange]:
    """Yield simple questions for training, endlessly; for drills."""
    while True:
        yield _turn(rng, simple_skill(rng), Memory(), held=False)
