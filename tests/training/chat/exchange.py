"""One exchange of a dialogue: a user's message and the right reply, as data; and what is held out from training.

Analyses are nested: with more effort the same analysis goes on for longer, so effort decides where to stop and nothing
else. Knows no skill, no Harmony and no tokens.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

EFFORTS: Final = ("low", "medium", "high")


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the assistant replies. `analyses`: for low effort, what medium adds to it, and what high adds to that.

    `forced` is a beginning of the answer that a grammar would force, so that it is not learned. `whole` is a text too
    long to be repeated, of which the answer is the beginning with an ellipsis; any such beginning is right, and so is
    the text in full. `unjudged` is a key of a JSON answer whose value may differ.
    """

    analyses: tuple[str, str, str]
    answer: str = ""
    call: Call | None = None
    preamble: str = ""
    forced: str = ""
    whole: str = ""
    unjudged: str = ""

    def analysis(self, effort: str) -> str:
        """Return the analysis for an effort."""
        return " ".join(self.analyses[: EFFORTS.index(effort) + 1])


@dataclass(frozen=True)
class Exchange:
    """A user's message and the reply; after a call, the tool's result and the final reply.

    `split_key` decides whether the exchange is for training or held out (its subject and wording); it is empty where
    there are too few to hold any out. `result` and `final_reply` are used only if `reply` is a call. `title` is what a
    chat that begins with the message may be called; `fields` are what a JSON object of the answer would hold. An
    exchange that is not `learned` only stands in the history.
    """

    skill: str
    split_key: str
    message: str
    reply: Reply
    result: str = ""
    final_reply: Reply | None = None
    title: str = ""
    fields: tuple[tuple[str, Any], ...] = ()
    learned: bool = True


@dataclass(frozen=True)
class Dialogue:
    """One conversation: instructions and tools, effort, turns, and the date and identity in its system message.

    `history` are messages in OpenAI's format that stand before the first turn, such as a program's examples.
    """

    effort: str
    date: str
    exchanges: tuple[Exchange, ...]
    instructions: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    identity: str = ""
    history: tuple[dict[str, Any], ...] = ()


Skill = Callable[[random.Random], Exchange]


def held_out(key: str) -> bool:
    """Whether a key (of an exchange, or a tool's name) is held out for the evaluation: always the same eighth."""
    return zlib.crc32(key.encode()) % 8 == 0


def is_on_side(exchange: Exchange, held: bool) -> bool:
    """Whether an exchange belongs to the evaluation (`held`) or to training; those without a split key fit both."""
    return not exchange.split_key or held_out(f"{exchange.skill}:{exchange.split_key}") == held
