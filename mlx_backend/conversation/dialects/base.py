"""What a dialect is: a reader of a model's output, and the few words the dialect can write.

A reader is a machine over text and markers. It knows no tokens and no chunks: the parser tells text from
markers and hands over both in order. What all readers share, how events are put out and counted, stands
here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

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
    from collections.abc import Callable, Collection, Mapping

    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.scanner import MarkerSet


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: a control token's own text, or plain text that must be tokenised as plain text."""

    text: str
    marker: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """What goes behind the generation prompt so that the model goes on with a begun answer."""

    pieces: tuple[Piece, ...]
    opens_in: Channel | None


class Reader:
    """One turn being read: the part that is the same in every dialect.

    `markers` are what the parser is to look for in text now, `spelt` what it is to look for in the text of
    plain tokens, where token ids say what is a marker. Both may change with every piece read. `delta` is
    the fast path: while it is set, text without markers is no more than `delta(text)`.
    """

    __slots__ = ("_calls", "_complete", "_in_call", "_said", "delta", "ended", "events", "markers", "spelt")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.delta: Callable[[str], Event] | None = None
        self.markers: MarkerSet = NO_MARKERS
        self.spelt: MarkerSet = NO_MARKERS
        self.ended = False
        self._calls = 0
        self._complete = 0
        self._in_call = False
        self._said = False  # a message for the user or for a tool has begun

    @property
    def reasons(self) -> bool:
        """Whether text that came next would be reasoning."""
        return False

    @property
    def answers(self) -> bool:
        """Whether the answer has begun, and text that came next would be part of it."""
        return False

    def closing(self, opened_by: str) -> tuple[str, ...]:
        """Return what closes the open reasoning and begins the answer: texts that are tokenised one by one.

        `opened_by` ends with what opened it, where that was the prompt.
        """
        return ()

    def text(self, text: str) -> None:
        """Read plain text, which is never empty."""
        raise NotImplementedError

    def marker(self, marker: str) -> None:
        """Read a marker."""
        raise NotImplementedError

    def close(self, ended_by: EndedBy) -> None:
        """Read the end of the output."""
        raise NotImplementedError

    def finish(self, ended_by: EndedBy) -> None:
        """Put out the StreamEnd. A turn that had ended by itself is not cut, whatever stopped the model."""
        if ended_by == "length" and not self.ended:
            self.events.append(StreamEnd("length"))
        else:
            self.events.append(StreamEnd("tool_calls" if self._complete else "stop"))

    def _open(self, channel: Channel) -> None:
        self._said = self._said or channel is not Channel.ANALYSIS
        match channel:
            case Channel.ANALYSIS:
                self.delta = ReasoningDelta
            case Channel.COMMENTARY:
                self.delta = partial(ContentDelta, channel=Channel.COMMENTARY)
            case Channel.FINAL:
                self.delta = ContentDelta

    def _open_call(self, name: str) -> None:
        self.events.append(ToolCallStart(self._calls, name))
        self.delta = partial(ToolCallDelta, self._calls)
        self._said = self._in_call = True

    def _close_call(self, *, complete: bool) -> None:
        self.events.append(ToolCallEnd(self._calls, complete))
        self.delta = None
        self._in_call = False
        self._calls += 1
        self._complete += complete

    def _emit(self, text: str) -> None:
        if text and self.delta is not None:
            self.events.append(self.delta(text))


class ReaderFactory(Protocol):
    """Makes the reader of one turn; the arguments are ChannelParser's."""

    def __call__(
        self, *, tools: Collection[str] | None, opens_in: Channel | None, special_tokens: Mapping[int, str]
    ) -> Reader:
        """Make a reader."""
        ...


class Continue(Protocol):
    """Writes the beginning of an answer; `opened` is the channel the generation prompt has already opened."""

    def __call__(self, reasoning: str, content: str, *, opened: Channel | None = None) -> Continuation:
        """Write it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A model family's output grammar.

    `tokens` are the control tokens a family is known to use, for callers that have ids but no tokenizer.
    `opens_in` tells from the end of a rendered prompt which channel the model will be writing on at once.
    """

    name: str
    reader: ReaderFactory
    continuation: Continue
    opens_in: Callable[[str], Channel | None]
    tokens: Mapping[int, str]
