"""ChannelParser: a model's output in, events out, as early as they are certain.

Tells markers from text, by token id where there are ids and by spelling where there are none, and hands both
to a dialect's reader (`dialects/`), which knows what they mean. Nothing raises, whatever the model wrote, and
the events do not depend on how the output was cut into pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import (
    ContentDelta,
    Message,
    ReasoningDelta,
    StreamEnd,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.conversation.scanner import CONTROL
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel, EndedBy, Event, FinishReason
    from mlx_backend.conversation.tools import ToolDefinition


_SLICE = 4096
"""Characters looked at at once: cutting a marker off copies what is after it."""


class ChannelParser:
    """Parses one assistant turn, written in a dialect (or in the one of that name).

    `tools` are the request's tools (definitions or names): calls are matched against them. None means they are
    not known, and any call is one; an empty collection means there are none, and what is written to a tool is
    shown on its channel. `opens_in` is the channel the prompt has already opened. `special_tokens` are the
    tokenizer's control tokens, id -> text; by default the ids the dialect is known for.
    """

    __slots__ = ("_by_ids", "_closed", "_held", "_reader", "_special_tokens")

    def __init__(
        self,
        dialect: Dialect | str = "harmony",
        *,
        tools: ToolSet | Collection[ToolDefinition] | None = None,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        if isinstance(dialect, str):
            dialect = DIALECTS[dialect]
        self._special_tokens = dialect.tokens if special_tokens is None else special_tokens
        self._reader = dialect.reader(
            tools=tools if isinstance(tools, ToolSet) else ToolSet(tools),
            opens_in=opens_in,
            special_tokens=self._special_tokens,
        )
        self._by_ids = False
        self._held = ""  # the end of the text so far: it may still become a marker
        self._closed = False

    @property
    def ended(self) -> bool:
        """The turn is over: an end marker was read, and whatever follows is ignored. Generation may stop."""
        return self._reader.ended

    @property
    def is_reasoning(self) -> bool:
        """Reasoning is open: text that came next would be part of it."""
        return self._reader.is_reasoning

    @property
    def is_answering(self) -> bool:
        """The answer is open: text that came next would be part of it."""
        return self._reader.is_answering

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """Return what closes open reasoning (see `Reader.reasoning_closer`)."""
        return self._reader.reasoning_closer(prompt_tail)

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Read a piece of output: any piece of text, or one token's text together with its id."""
        reader = self._reader
        if token is None:
            markers = reader.markers
        elif token not in self._special_tokens:
            markers = reader.spelt
        else:
            return self._feed_control(self._special_tokens[token])
        delta = reader.delta
        if delta is not None and not self._held and not markers.touches(text):
            if not text:
                return []
            reader.before_last, reader.last = reader.last, text
            return [delta(text)]
        if self._closed or not text:
            return []
        self._by_ids = token is not None
        for at in range(0, len(text), _SLICE):  # a whole transcript at once costs no more than its pieces
            self._feed_text(self._held + text[at : at + _SLICE], by_ids=token is not None)
        return self._events()

    def close(self, ended_by: EndedBy = "stop") -> list[Event]:
        """Read the end of the output. The last event is the StreamEnd; a second call returns nothing."""
        if self._closed:
            return []
        self._closed = True
        self._flush()
        if not self._reader.ended:
            self._reader.close(ended_by)
        self._reader.finish(ended_by)
        self._reader.delta = None
        return self._events()

    def _feed_control(self, marker: str) -> list[Event]:
        if self._closed:
            return []
        if marker in self._reader.fragments:
            self._feed_text(f"{self._held}{CONTROL}{marker}", by_ids=True)
            return self._events()
        self._by_ids = True
        self._flush()
        if not self._reader.ended:
            self._reader.marker(marker)
        return self._events()

    def _feed_text(self, text: str, *, by_ids: bool) -> None:
        """Cut text at markers. Reading a piece may change what is one; the rest is then looked at afresh."""
        reader = self._reader
        while text and not reader.ended:
            markers = reader.spelt if by_ids else reader.markers
            before, marker, after = markers.cut(text)
            if before:
                if rest := reader.text(before):
                    text = rest + marker + after
                    continue
                if (reader.spelt if by_ids else reader.markers) is not markers:
                    text = marker + after
                    continue
            if not marker:
                self._held = after
                return
            reader.marker(marker)
            text = after
        self._held = ""

    def _flush(self) -> None:
        reader, held = self._reader, self._held
        self._held = ""
        if self._closed and reader.is_cut_marker(held):
            return
        while held and not reader.ended:
            before, marker, after = (reader.spelt if self._by_ids else reader.markers).cut(held, is_end=True)
            if before:
                held = (reader.text(before) or "") + marker + after
            else:
                reader.marker(marker)
                held = after

    def _events(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events


def fold(events: Iterable[Event]) -> Message:
    """Join events to the message they mean. A list without its StreamEnd is a turn so far."""
    reasoning: list[str] = []
    content: list[str] = []
    names: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    finish: FinishReason = "stop"
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, name, own_id):
                names.append((name, own_id))
                arguments.append([])
                complete.append(False)
            case ToolCallDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index, whole):
                complete[index] = whole
            case StreamEnd(reason):
                finish = reason
    calls = tuple(
        ToolCall(name, "".join(parts), whole, own_id)
        for (name, own_id), parts, whole in zip(names, arguments, complete, strict=True)
    )
    return Message("".join(reasoning), "".join(content), calls, finish)


def parse_text(
    text: str,
    dialect: Dialect | str = "harmony",
    *,
    tools: ToolSet | Collection[ToolDefinition] | None = None,
    ended_by: EndedBy = "stop",
) -> Message:
    """Parse a whole turn at once: the fold of its stream."""
    parser = ChannelParser(dialect, tools=tools)
    return fold([*parser.feed(text), *parser.close(ended_by)])
