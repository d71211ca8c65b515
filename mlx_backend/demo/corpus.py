"""Dialogues: turns of all skills put together, under instructions, with tools, at an effort; and the split.

The same seed gives the same dialogues. What is held out (`skills.held_out`) never appears in training,
neither as a turn that is learned nor as one that only stands before it. Knows nothing of tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mlx_backend.demo.skills import EFFORTS, Exchange, Memory, Skill, held_out, plain, remember
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
    """One conversation: the developer's instructions and tools, the effort, the turns, its date and identity."""

    effort: str
    date: str
    exchanges: tuple[Exchange, ...]
    instructions: str = ""
    tools: list[Tool] = field(default_factory=list)
    identity: str = ""


def instructions(rng: random.Random) -> str:
    """Return a system prompt: none, a usual one, or prose that means nothing to the answers."""
    kind = rng.random()
    if kind < 0.45:
        return ""
    if kind < 0.65:
        return rng.choice(_INSTRUCTIONS)
    lines = [sentence(rng, 3, 12) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 3, 8)))]
    if kind < 0.8:
        lines.insert(0, rng.choice(_INSTRUCTIONS))
    return rng.choice((" ", "\n")).join(lines)


def _belongs(exchange: Exchange, held: bool) -> bool:
    return not exchange.split or held_out(f"{exchange.skill}:{exchange.split}") == held


def _skill(rng: random.Random, tools: list[Tool], memory: Memory, held: bool) -> Skill:
    """Choose what the next turn is about."""
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
    return plain(rng)


def _turn(rng: random.Random, skill: Skill, memory: Memory, held: bool) -> Exchange:
    """Draw until a turn is on the right side of the split; what was told in a rejected one is forgotten."""
    before = (memory.name, memory.home)
    while not _belongs(exchange := skill(rng), held):
        memory.name, memory.home = before
    return exchange


def dialogue(rng: random.Random, held: bool = False, turns: int | None = None, effort: str = "") -> Dialogue:
    """Return a dialogue of `turns` turns (one to six if not given), all held out or all for training."""
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
    """Yield plain questions for training without end, for drills."""
    while True:
        yield _turn(rng, plain(rng), Memory(), held=False)
