"""Dialogues: turns of all skills, with instructions, tools and an effort; and the split into training and evaluation.

The same seed gives the same dialogues. What is held out (`exchange.held_out`) never appears in training, neither as a
turn that is learned nor as an earlier turn of a dialogue. Knows nothing of tokens.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from training.chat.exchange import EFFORTS, Dialogue, Exchange, Skill, is_on_side
from training.chat.facts import changed_subject, follow_up_of
from training.chat.json_answers import json_dialogue
from training.chat.passages import Entry, context, entries, lookup, pasted
from training.chat.programs import program_dialogue
from training.chat.skills import Memory, remember, simple_skill
from training.chat.tools import MAX_TOOLS, Tool, known_tool, missing_tool, named_tool, toolbox
from training.chat.words import sentence

Maker = Callable[[random.Random, bool], Dialogue]
_INSTRUCTIONS: Final = (
    "You are a helpful assistant.", "You are a friendly assistant. Answer the user's questions.",
    "Answer shortly.", "Be polite.", "Answer in English.", "You are a bot in a shop.",
    "You are a helpful assistant. If you do not know something, say so.",
    "Use the tools when they help.", "You are mlx-demo.", "Think before you answer.", "You are ChatGPT.",
    "You are a helpful AI assistant.", "Keep your answers short and clear.", "Always answer in the user's language.",
    "You are an expert. Answer truthfully.", "You are a customer support agent.", "Be concise.",
)  # fmt: skip


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


class _Talk:
    """A dialogue while it is drawn: what has been told, and what the last turn was about."""

    def __init__(self, rng: random.Random, held: bool, tools: list[Tool], known: list[Entry]) -> None:
        self.rng, self.held, self.tools, self.known = rng, held, tools, known
        self.memory = Memory()
        self.last: Exchange | None = None

    def _follow_up(self) -> Skill | None:
        """Return a short question that is understood from the last turn, if one could follow."""
        if self.last is None:
            return None
        same = follow_up_of(self.last.skill)
        if same is not None:
            return same if self.rng.random() < 0.85 else changed_subject
        if self.last.title.startswith("Weather"):
            return lambda rng: known_tool(rng, self.tools, follow_up=True)
        return None

    def _skill(self) -> Skill:
        """Choose the skill of the next turn."""
        rng, tools, memory = self.rng, self.tools, self.memory
        follow_up = self._follow_up()
        if follow_up and rng.random() < 0.28:
            return follow_up
        if self.known and rng.random() < 0.6:
            return lambda rng: lookup(rng, self.known)
        if tools and rng.random() < 0.6:
            kind = rng.random()
            if kind < 0.66:
                return lambda rng: named_tool(rng, tools)
            if kind < 0.92:
                return lambda rng: known_tool(rng, tools)
            return lambda rng: missing_tool(rng, self.held)
        if rng.random() < 0.05:
            if tools or rng.random() < 0.5:
                return lambda rng: known_tool(rng, tools)
            return lambda rng: missing_tool(rng, self.held)
        if rng.random() < (0.45 if memory.name or memory.home else 0.16):
            return lambda rng: remember(rng, memory)
        return simple_skill(rng)

    def turn(self) -> Exchange:
        """Draw until a turn is on the right side of the split; what the user told in a rejected one is forgotten."""
        before = (self.memory.name, self.memory.home)
        while not is_on_side(exchange := self._skill()(self.rng), self.held):
            self.memory.name, self.memory.home = before
        if exchange.skill not in ("greeting", "remember", "recall"):  # these may stand before a follow-up
            self.last = exchange
        return exchange


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2024, 2035)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _settled(rng: random.Random, drawn: Dialogue, effort: str) -> Dialogue:
    """Return a dialogue with what every dialogue has: an effort, a date, seldom an identity."""
    effort = effort or rng.choices(EFFORTS, (0.4, 0.35, 0.25))[0]
    identity = sentence(rng, 3, 8) if rng.random() < 0.04 else ""
    return replace(drawn, effort=effort, date=_date(rng), identity=identity)


def dialogue(rng: random.Random, held: bool = False, turns: int | None = None, effort: str = "") -> Dialogue:
    """Return a dialogue of `turns` turns (default: one to six), all held out or all for training."""
    known = entries(rng, rng.randint(1, 5)) if rng.random() < 0.07 else []
    tools = toolbox(rng, held) if not known and rng.random() < 0.45 else []
    if turns is None:
        turns = rng.choices((1, 2, 3, 4, 5, 6), (0.26, 0.28, 0.24, 0.14, 0.05, 0.03))[0]
    if tools:
        turns = min(turns, 3)
    talk = _Talk(rng, held, tools, known)
    exchanges = tuple(talk.turn() for _ in range(turns))
    text = context(rng, known, rng.randint(0, 1_200)) if known else instructions(rng)
    return _settled(rng, Dialogue("", "", exchanges, text, tools), effort)


def single(rng: random.Random, skill: Skill, held: bool = False, effort: str = "") -> Dialogue:
    """Return a dialogue of one turn of a skill."""
    while not is_on_side(exchange := skill(rng), held):
        pass
    return _settled(rng, Dialogue("", "", (exchange,), instructions(rng)), effort)


def program(rng: random.Random, held: bool = False, effort: str = "", make: Maker | None = None) -> Dialogue:
    """Return a dialogue of one turn that a program reads: an answer in JSON, or one of a program's own prompts.

    Some have a plain turn or two before the one that counts. `make` draws that one, instead of any of those.
    """
    drawn = (make or (json_dialogue if rng.random() < 0.58 else program_dialogue))(rng, held)
    if not drawn.history and not drawn.tools and rng.random() < 0.15:
        talk = _Talk(rng, held, [], [])
        turns = [talk.turn() for _ in range(rng.choice((1, 1, 2)))]
        earlier = [replace(turn, learned=False) for turn in turns if turn.reply.call is None]
        drawn = replace(drawn, exchanges=(*earlier, *drawn.exchanges))
    return _settled(rng, drawn, effort)


def paste(rng: random.Random, held: bool = False, effort: str = "", size: int = 0) -> Dialogue:
    """Return a dialogue of one turn, a question about a text in the same message."""
    return _settled(
        rng, Dialogue("", "", (pasted(rng, size or rng.randint(0, 900)),), instructions(rng)), effort
    )


def long_dialogue(rng: random.Random, size: int, held: bool = False, effort: str = "") -> Dialogue:
    """Return a dialogue of about `size` characters: a long history, long instructions, many tools, or a pasted text."""
    kind = rng.random()
    if kind < 0.15:
        return paste(rng, held, effort, size)
    known = entries(rng, rng.randint(3, 12)) if rng.random() < 0.6 else []
    tools: list[Tool] = []
    prose = rng.randint(0, 600)
    if kind < 0.4:
        tools = toolbox(rng, held, min(MAX_TOOLS, max(5, size // 450)))
        turns = rng.randint(2, 6)
    elif kind < 0.7:
        prose, turns = size, rng.randint(2, 10)
    else:
        turns = max(4, size // 190)
    talk = _Talk(rng, held, tools, known)
    exchanges = tuple(talk.turn() for _ in range(turns))
    text = context(rng, known, prose) if known or prose > 2_000 else instructions(rng)
    return _settled(rng, Dialogue("", "", exchanges, text, tools), effort)


def questions(rng: random.Random) -> Iterator[Exchange]:
    """Yield simple questions and their follow-ups for training, endlessly; for drills."""
    talk = _Talk(rng, False, [], [])
    while True:
        follow_up = talk._follow_up()
        skill = follow_up if follow_up and rng.random() < 0.25 else simple_skill(rng)
        exchange = skill(rng)
        if is_on_side(exchange, held=False):
            talk.last = exchange
            yield exchange
