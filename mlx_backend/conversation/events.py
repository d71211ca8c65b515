"""What a model's output means: a closed set of frozen events, and the message they fold to.

A parser turns text into these events; the wire turns them into chunks; `fold` turns them into one message.
An event never carries a marker, and every event says by its class where its text belongs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

type FinishReason = Literal["stop", "length", "tool_calls"]
type EndedBy = Literal["stop", "length"]


class Channel(StrEnum):
    """What a span of output is for (Harmony's names; a `<think>` block is analysis)."""

    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"


# One of the deltas is made for every token. They set their slots directly: what `dataclass` writes for a frozen class
# takes twice as long, and that would be half of what parsing a token takes.


@dataclass(frozen=True, slots=True, init=False)
class ReasoningDelta:
    """More text of the analysis channel: the model's reasoning, not part of the answer."""

    text: str

    def __init__(self, text: str) -> None:
        _set_reasoning(self, text)


@dataclass(frozen=True, slots=True, init=False)
class ContentDelta:
    """More text for the user: the final channel, or a preamble (commentary without a recipient)."""

    text: str
    channel: Channel = Channel.FINAL

    def __init__(self, text: str, channel: Channel = Channel.FINAL) -> None:
        _set_content(self, text)
        _set_channel(self, channel)


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A message with a recipient begins. `index` counts the calls of this turn from 0.

    `id` is the model's own, where it writes one before the arguments. It is unique in the turn only, if at all.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True, init=False)
class ToolCallDelta:
    """More text of the call's arguments: JSON, as far as what the model wrote can be that (`json_arguments`)."""

    index: int
    arguments: str

    def __init__(self, index: int, arguments: str) -> None:
        _set_index(self, index)
        _set_arguments(self, arguments)


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is over. `complete` is False when the token limit cut it: then it must not be run."""

    index: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last event of every stream, exactly once."""

    finish: FinishReason


type Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | StreamEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A folded call: the tool's name without `functions.`, the arguments as JSON text, the model's own id for it."""

    name: str
    arguments: str
    complete: bool = True
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One assistant turn, folded. An incomplete call (cut by the token limit) is last and says so."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"


_set_reasoning = ReasoningDelta.__dict__["text"].__set__
_set_content, _set_channel = (ContentDelta.__dict__[name].__set__ for name in ("text", "channel"))
_set_index, _set_arguments = (ToolCallDelta.__dict__[name].__set__ for name in ("index", "arguments"))
