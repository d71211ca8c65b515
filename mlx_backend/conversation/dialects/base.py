"""What a dialect is: one object that says everything about a model family, and what all output readers share.

A reader is a state machine over text and markers. It knows no tokens and no chunks: the parser tells text from
markers and hands over both in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.conversation.scanner import NO_MARKERS

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Mapping, Sequence, Set

    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.scanner import MarkerSet


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: a control token's own text, or plain text that must be tokenised as plain text."""

    text: str
    marker: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """What goes after the generation prompt so that the model goes on with a begun answer."""

    pieces: tuple[Piece, ...]
    opens_in: Channel | None


class Reader(ABC):
    """Reads one turn: the part that is the same in every dialect.

    `markers` are what the parser is to look for in text now, `spelt` what it is to look for in the text of
    plain tokens, where token ids say what is a marker. Both may change with every piece read. `delta` is
    the fast path: while it is set, text without markers is no more than `delta(text)`, and the parser notes it in
    `last` and `before_last`, which hold the last two pieces put out.
    """

    fragments: Set[str] = frozenset()
    """Control tokens that are parts of markers: the parser hands them over in text, with `scanner.CONTROL` before."""

    __slots__ = (
        *("_call_count", "_complete_calls", "_has_spoken", "_in_call", "before_last", "delta", "ended"),
        *("events", "last", "markers", "spelt"),
    )

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.delta: Callable[[str], Event] | None = None
        self.markers: MarkerSet = NO_MARKERS
        self.spelt: MarkerSet = NO_MARKERS
        self.ended = False
        self.last = self.before_last = ""
        self._call_count = 0
        self._complete_calls = 0
        self._in_call = False
        self._has_spoken = False  # a message for the user or for a tool has begun

    @property
    def is_reasoning(self) -> bool:
        """Whether text that came next would be reasoning."""
        return False

    @property
    def is_answering(self) -> bool:
        """Whether the answer has begun, and text that came next would be part of it."""
        return False

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """Return what closes the open reasoning and begins the answer: texts that are tokenised one by one.

        `prompt_tail` ends with what opened the reasoning, where that was the prompt.
        """
        return ()

    def is_cut_marker(self, text: str) -> bool:
        """Whether the end of the output, which may be the beginning of a marker, cannot be text."""
        return False

    @abstractmethod
    def text(self, text: str) -> str | None:
        """Take plain text, which is never empty. Return the end of it that has to be cut at markers afresh, if any."""

    @abstractmethod
    def marker(self, marker: str) -> None:
        """Take a marker."""

    @abstractmethod
    def close(self, ended_by: EndedBy) -> None:
        """Handle the end of the output."""

    def finish(self, ended_by: EndedBy) -> None:
        """Put out the StreamEnd. A turn that had ended by itself is not cut, whatever stopped the model."""
        if ended_by == "length" and not self.ended:
            self.events.append(StreamEnd("length"))
        else:
            self.events.append(StreamEnd("tool_calls" if self._complete_calls else "stop"))

    def _open(self, channel: Channel) -> None:
        self._has_spoken = self._has_spoken or channel is not Channel.ANALYSIS
        match channel:
            case Channel.ANALYSIS:
                self.delta = ReasoningDelta
            case Channel.COMMENTARY:
                self.delta = partial(ContentDelta, channel=Channel.COMMENTARY)
            case Channel.FINAL:
                self.delta = ContentDelta

    def _open_call(self, name: str, own_id: str = "") -> None:
        self.events.append(ToolCallStart(self._call_count, name, own_id))
        self.delta = partial(ToolCallDelta, self._call_count)
        self._has_spoken = self._in_call = True

    def _close_call(self, *, complete: bool) -> None:
        self.events.append(ToolCallEnd(self._call_count, complete))
        self.delta = None
        self._in_call = False
        self._call_count += 1
        self._complete_calls += complete

    def _emit(self, text: str) -> None:
        """Put text out on the open channel; drop it where none is open."""
        if text and self.delta is not None:
            self.before_last, self.last = self.last, text
            self.events.append(self.delta(text))


class CallCodec(ABC):
    """How a family writes a call to a tool. Reading one back is the reader's work."""

    @abstractmethod
    def is_taught_by(self, template: str) -> bool:
        """Whether the calls that a chat template teaches its model are written like this."""

    @abstractmethod
    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a whole call, with the markers around it."""


type ToolPromptWriter = Callable[[Sequence[Mapping[str, Any]], CallCodec], tuple[Piece, ...]]
"""Writes what a model is told of tools in OpenAI's nested form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMarkup:
    """How a family's raw output is recognised in a text that should hold none, because a server let it through."""

    openers: tuple[str, ...] = ()
    """A text that begins with one of these is raw output."""
    stripped_opener: str = ""
    """So is one whose markers were removed: this word, and a capital letter glued to it."""
    stripped_header: str = ""
    """Likewise at the beginning of a text, if there are tools: the word is not part of it."""
    stripped_call_openers: tuple[str, ...] = ()
    """Anywhere, if there are tools: a call whose markers were removed."""
    message_openers: tuple[str, ...] = ()
    """Anywhere: a message begins here."""
    call_openers: tuple[str, ...] = ()
    """Anywhere, if there are tools: a call begins here."""
    reasoning_closers: tuple[str, ...] = ()
    """Anywhere: what stood before this was reasoning."""
    end_markers: tuple[str, ...] = ()
    """At the end of a text: not part of it."""

    def begins(self, text: str) -> bool | None:
        """Whether a text begins as raw output does; None if more of it is needed to tell."""
        if text.startswith(self.openers):
            return True
        word = self.stripped_opener
        if word and text.startswith(word) and len(text) > len(word):
            return text[len(word)].isupper()
        is_prefix = any(opener.startswith(text) for opener in (*self.openers, word) if opener)
        return None if is_prefix else False

    def without_header(self, text: str) -> str | None:
        """Return a text without a header whose markers were removed; None if more of it is needed to tell."""
        word = self.stripped_header
        if word and word.startswith(text):
            return None
        return text.removeprefix(word) if text.startswith(word) and text[len(word)].isupper() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPolicy:
    """Which reasoning of earlier messages a family was trained to see again.

    That of an unfinished tool loop, and of a last message that is to be continued, always stays. That of answered
    turns goes to the chat template, which knows its own family best: it drops it, keeps it, or has a switch.
    """

    keeps_answered_turns: bool = True
    """Whether the template gets the reasoning before the last answer, to keep or to drop."""
    keeps_with_tools: bool = False
    """Whether its models, as agents, were trained to see all of it: with tools, the template's switch is set so."""


END_MARKERS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<end_of_turn>", "<eos>", "</s>", "<|end|>", "<|return|>"),
        *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>"),
        *("<turn|>", "<seed:eos>", "[e~[", "<|eot|>", "<|role_end|>"),
    }
)
"""Control tokens that end a turn in one family or another."""

RESULT_TEXT = "<tool_response>\n{}\n</tool_response>"
"""How most families write a tool's result as the user's text."""


type Text = str | re.Pattern[str]
"""A text of a template, which is a whole control token; or a pattern that is searched for in either."""


class SignKind(Enum):
    """What a sign shows (`recognition` says which counts for more)."""

    OWN = auto()
    FORMAT = auto()
    LAYOUT = auto()
    COMMON = auto()


@dataclass(frozen=True, slots=True)
class Sign:
    """Texts that show a family where all of them are found; `in_template`: control tokens do not count."""

    kind: SignKind
    texts: tuple[Text, ...]
    in_template: bool = False


def own(*texts: Text, in_template: bool = False) -> Sign:
    """Return a sign that only this family has."""
    return Sign(SignKind.OWN, texts, in_template)


def call_format(*texts: Text, in_template: bool = False) -> Sign:
    """Return a sign of how calls are written."""
    return Sign(SignKind.FORMAT, texts, in_template)


def layout(*texts: Text) -> Sign:
    """Return a sign of how turns begin."""
    return Sign(SignKind.LAYOUT, texts)


def common(*texts: Text) -> Sign:
    """Return a sign that tells only where nothing else does."""
    return Sign(SignKind.COMMON, texts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dialect:
    """Everything that sets one family of models apart. Two are the same only if they are one object."""

    name: str
    """The name people give it: `mlx-backend parse --dialect`."""
    aliases: tuple[str, ...] = ()
    """Other names that people know its models by."""
    signs: tuple[Sign, ...] = ()
    """By which a model is recognised as one of it (`recognition`)."""
    reader: Callable[..., Reader]
    """Makes what reads one turn, of `tools`, `opens_in` and `special_tokens`, which are ChannelParser's."""
    continuation: Callable[..., Continuation]
    """Writes the beginning of an answer that the model is to go on with, of its reasoning and its content.

    `opened` is the channel that the generation prompt has opened; `closes_reasoning` says whether reasoning without an
    answer is over.
    """
    opens_in: Callable[[str], Channel | None]
    """From the end of a rendered prompt: the channel on which the model will be writing at once, if any."""
    tokens: Mapping[int, str] = field(default_factory=dict)
    """The control tokens the family is known to use, id -> text, for callers that have ids but no tokenizer."""
    calls: CallCodec | None = None
    """How it writes calls to tools, if it can."""
    tool_prompt: ToolPromptWriter | None = None
    """How its models are told of tools, which its own templates leave to the client. None: a template tells them, and
    where one does not, it is done in the general way (`tool_prompts.json_tool_prompt`)."""
    response_format: Callable[[str, str, Mapping[str, Any]], str] | None = None
    """Writes, of an answer's name, description and schema, how its models were trained to be told of them. None: they
    are told nothing, only held to it."""
    has_reasoning: bool = True
    """Whether its models may reason before they answer."""
    reasoning_markers: tuple[str, ...] = ()
    """A chat template that holds one of these writes or looks for reasoning."""
    history: HistoryPolicy = HistoryPolicy()
    result_text: str = RESULT_TEXT
    """How a tool's result is written for a template that takes none: as the user's text."""
    leaks: RawMarkup = RawMarkup()
    blocks: Mapping[str, str] = field(default_factory=dict)
    """The blocks in which it reasons, opener -> closer, where they are blocks."""
    is_from_response_template: bool = False
    """Made of one model's response template, and in no registry; its turns are blocks."""
    markers: frozenset[str] = frozenset()
    """What tells that a text is a turn as it was written, where its turns are blocks."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Markers around answers, opener -> closer, where it has some; an answer without them is read, too."""
    ends: frozenset[str] = frozenset()
    """Control tokens that end its turns, in addition to those that many families use."""
    suffixes: tuple[str, ...] = ()
    """What may stand in its markers after a colon, `<think:…>`: each checkpoint may have its own. (): nothing."""

    @property
    def example(self) -> str:
        """A turn with reasoning and a call, as far as its models write them."""
        reasoning = "I need the weather." if self.has_reasoning else ""
        begun = self.continuation(reasoning, "", closes_reasoning=True)
        call = self.calls.encode("get_weather", {"city": "Paris", "days": 3}) if self.calls else ()
        return "".join(piece.text for piece in (*begun.pieces, *call))
