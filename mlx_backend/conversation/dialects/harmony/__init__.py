"""Harmony, the format of gpt-oss: messages on channels, with or without a recipient.

    header    what a header says, however badly it is written; the control tokens
    reader    a turn of output, read message by message

Here stands what is written rather than read (the beginning of an answer, a call, an answer's schema as the model is
told it), and the dialect that joins it all.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import (
    CallCodec,
    Continuation,
    Dialect,
    HistoryPolicy,
    Piece,
    RawMarkup,
    own,
)
from mlx_backend.conversation.dialects.harmony.header import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    HARMONY_TOKENS,
    MESSAGE,
    RETURN,
    START,
    parse_header,
)
from mlx_backend.conversation.dialects.harmony.reader import HarmonyReader
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_IN_NAMES = re.compile(r"[^\w-]+")
_MAX_NAME = 64
"""Characters; OpenAI's limit for the names of schemas."""
_DEFAULT_NAME = "response"


def response_format(name: str, description: str, schema: Mapping[str, Any]) -> str:
    """Write the section for one schema. `name` and `description` may be empty."""
    heading = _NOT_IN_NAMES.sub("_", name.strip())[:_MAX_NAME] or _DEFAULT_NAME
    comment = "".join(f"// {line.strip()}\n" for line in description.splitlines() if line.strip())
    body = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"# Response Formats\n\n## {heading}\n\n{comment}{body}"


__all__ = [
    "CALL",
    "CHANNEL",
    "CONSTRAIN",
    "END",
    "HARMONY",
    "HARMONY_CALLS",
    "HARMONY_TOKENS",
    "MESSAGE",
    "RETURN",
    "START",
]

_OPENED_BODY = re.compile(
    r"<\|channel\|>((?:[^<]|<\|constrain\|>)*)<\|message\|>(?:(?!<\|(?:end|call|return|start)\|>).)*\Z",
    re.DOTALL,
)


def opens_in(prompt_tail: str) -> Channel | None:
    """Return the channel whose body the prompt has opened and not closed, if any."""
    opened = _OPENED_BODY.search(prompt_tail)
    return parse_header(CHANNEL + opened[1]).channel if opened else None


def continuation(
    reasoning: str, content: str, *, opened: Channel | None = None, closes_reasoning: bool = False
) -> Continuation:
    """Write a begun answer after `<|start|>assistant`, or after the body that the prompt has opened."""
    pieces: list[Piece] = []
    if reasoning:
        pieces += [*_header(Channel.ANALYSIS, opened), Piece(reasoning)]
        opened = Channel.ANALYSIS
    if ((content and opened is not Channel.FINAL) or closes_reasoning) and opened is not None:
        pieces += [Piece(END, marker=True), Piece(START, marker=True), Piece("assistant")]
        opened = None
    if content:
        pieces += [*_header(Channel.FINAL, opened), Piece(content)]
        opened = Channel.FINAL
    return Continuation(tuple(pieces), opened)


def _header(channel: Channel, opened: Channel | None) -> list[Piece]:
    if opened is channel:
        return []
    return [Piece(CHANNEL, marker=True), Piece(channel.value), Piece(MESSAGE, marker=True)]


class HarmonyCalls(CallCodec):
    """A call is a message with a recipient. The reader streams its arguments as they come."""

    def is_taught_by(self, template: str) -> bool:
        """Return True: the format itself has calls."""
        return True

    def opening(self, name: str) -> tuple[Piece, ...]:
        """Write the header, after `<|start|>assistant`, as gpt-oss spells it."""
        return (
            Piece(CHANNEL, marker=True),
            Piece(f"{Channel.COMMENTARY} to=functions.{name} "),
            Piece(CONSTRAIN, marker=True),
            Piece("json"),
            Piece(MESSAGE, marker=True),
        )

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a whole call, up to the marker that ends it, and with it the turn."""
        written = json.dumps(arguments, ensure_ascii=False)
        return *self.opening(name), Piece(written), Piece(CALL, marker=True)


HARMONY_CALLS = HarmonyCalls()

HARMONY = Dialect(
    name="harmony",
    aliases=("gpt-oss",),
    signs=(own(CHANNEL, MESSAGE),),
    reader=HarmonyReader,
    continuation=continuation,
    opens_in=opens_in,
    tokens=HARMONY_TOKENS,
    calls=HARMONY_CALLS,
    response_format=response_format,
    history=HistoryPolicy(keeps_answered_turns=False),
    reasoning_markers=(f"{CHANNEL}{Channel.ANALYSIS}",),
    leaks=RawMarkup(
        openers=(CHANNEL, START, MESSAGE),
        stripped_opener=Channel.ANALYSIS.value,
        stripped_header=Channel.COMMENTARY.value,
        stripped_call_openers=(f"{Channel.COMMENTARY} to=", f"assistant{Channel.COMMENTARY} to="),
        message_openers=(f"{START}assistant", *(f"{CHANNEL}{channel}" for channel in Channel)),
        end_markers=(END, RETURN, END_OF_TEXT),
    ),
)
