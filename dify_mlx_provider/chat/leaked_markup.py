"""One text field of a server's stream, read by the shared grammars from where a model's own markup leaks into it.

A server that knows its model separates reasoning, answer and calls. Others pass on what the model wrote: raw Harmony,
a `<think>` block, a `</think>` whose opening stood in the prompt, `<tool_call>` blocks, an end marker. Markup at the
beginning of a field is always read. Further on an answer may merely talk about markup: there it is read only outside
code and quotation marks, and not at all from a server that is known to separate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.think import THINK
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.conversation.quoting import PrecedingText
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dify_mlx_provider.chat.tool_calls import ToolCall, ToolCallAssembler
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Event

_LEAKS = [dialect.leaks for dialect in DIALECTS.values()]
_CLOSERS = frozenset(closer for leaks in _LEAKS for closer in leaks.reasoning_closers)
_ENDS = frozenset(end for leaks in _LEAKS for end in leaks.end_markers)
_CALLS = {opener: dialect for dialect in DIALECTS.values() for opener in dialect.leaks.call_openers}
_MESSAGES = {opener: dialect for dialect in DIALECTS.values() for opener in dialect.leaks.message_openers}
# Openers of the dialects whose reasoning stands in a block: where one is spelt, a closer is spelt too.
_BLOCK_OPENERS = tuple(opener for leaks in _LEAKS if leaks.reasoning_closers for opener in leaks.openers)
# An end marker counts at the end of the text alone. To be held back until then it has to begin a longer marker.
_HELD_ENDS = [end + leaks.message_openers[0] for end in _ENDS for leaks in _LEAKS if leaks.message_openers]
_LATER = MarkerSet([*_MESSAGES, *_CLOSERS, *_CALLS, *_HELD_ENDS])


class LeakyText:
    """Reads one field: `feed` and `close` give events of text; calls go to `calls`.

    `plain` is what the field's text is where nothing leaks. `inside` says that the text begins inside a block of
    reasoning, since the prompt has opened it; where it was not so, `begins_inside` is what the answer has shown.
    """

    def __init__(
        self,
        plain: type[ContentDelta] | type[ReasoningDelta],
        calls: ToolCallAssembler,
        *,
        tools: Collection[str] = (),
        watch: bool = True,
        inside: bool = False,
    ) -> None:
        self.begins_inside: bool | None = None
        self._plain = plain
        self._calls = calls
        self._tools = tools
        self._watches = watch
        self._held = ""
        self._begun = False  # whether the beginning has been looked at
        self._separates = False
        self._before = PrecedingText()
        self._spells_opener = False  # a block of reasoning was opened, or spelt, in what was put out
        self._parser: ChannelParser | None = None
        self._open: dict[int, ToolCall] = {}
        self._unclosed: list[str] | None = None  # what was read as reasoning because of `inside` alone
        if inside:
            self._parser = self._parser_of(THINK, Channel.ANALYSIS)
            self._unclosed = []

    def separates(self) -> list[Event]:
        """Take note that reasoning comes in a field of its own; what was held goes before it."""
        self._separates = True
        if self._unclosed == []:
            self._parser = self._unclosed = None
        if not self._held.strip():
            self._begun = True
            return []
        events: list[Event] = []
        held, self._held = self._held, ""
        self._begun = True
        self._say(held, events)
        return events

    def feed(self, text: str) -> list[Event]:
        """Read a piece."""
        if self._parser is not None:
            return self._read(self._parser.feed(text))
        text, self._held = self._held + text, ""
        if not self._begun:
            start = text.lstrip()
            begins = [(dialect.leaks.begins(start), dialect) for dialect in DIALECTS.values()]
            if dialect := next((dialect for leaked, dialect in begins if leaked), None):
                self._begun = True
                return self._parse(dialect, start)
            if any(leaked is None for leaked, _ in begins):
                self._held = text
                return []
            self._begun = True
        if not self._watches:
            return [self._plain(text)] if text else []
        return self._watched(text)

    def close(self, *, cut: bool) -> list[Event]:
        """Read the end; `cut` says that the token limit was reached."""
        if self._parser is not None:
            events = self._read(self._parser.close("length" if cut else "stop"))
            if self._unclosed and not cut:  # it never closed a block: it was an answer all the time
                self.begins_inside = False
                events.append(ContentDelta("".join(self._unclosed)))
            return events
        held, self._held = self._held, ""
        if self._watches and self._begun:
            held = next(("" for end in _ENDS if held.startswith(end)), held)
        return [self._plain(held)] if held else []

    # -- later in the text -------------------------------------------------------------------------

    def _watched(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            before, marker, after = _LATER.cut(text)
            if marker and not self._leaks(before, marker):
                before, marker = before + marker, ""
                self._say(before, events)
                text = after
                continue
            self._say(before, events)
            if not marker:
                self._held = after
                break
            text = after
            if marker in _CLOSERS:
                self.begins_inside = True
                continue
            if dialect := _CALLS.get(marker):
                return events + self._parse(dialect, marker + after, Channel.FINAL)
            end = next((end for end in _ENDS if marker.startswith(end)), "")
            opener = marker.removeprefix(end)
            return events + self._parse(_MESSAGES[opener], opener + after)
        return events

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            self._spells_opener = self._spells_opener or _spells_opener(self._before.tail + text)
            self._before.add(text)
            events.append(self._plain(text))

    def _leaks(self, before: str, marker: str) -> bool:
        preceding = self._before.followed_by(before)
        if preceding.is_in_code or preceding.opens_quotation:
            return False
        if marker in _CLOSERS:
            opened = self._spells_opener or _spells_opener(self._before.tail + before)
            return not (self.begins_inside or self._separates or opened)
        if marker in _CALLS:
            return bool(self._tools)
        return not preceding.is_mid_sentence

    # -- parsing -----------------------------------------------------------------------------------

    def _parser_of(self, dialect: Dialect, opens_in: Channel | None = None) -> ChannelParser:
        return ChannelParser(dialect, tools=self._tools or None, opens_in=opens_in)

    def _parse(self, dialect: Dialect, text: str, opens_in: Channel | None = None) -> list[Event]:
        self._parser = self._parser_of(dialect, opens_in)
        return self._read(self._parser.feed(text))

    def _read(self, events: Iterable[Event]) -> list[Event]:
        """Keep the text of parsed events; put calls aside."""
        texts: list[Event] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    texts.append(event)
                    if self._unclosed is not None:
                        self._unclosed.append(text)
                case ContentDelta():
                    texts.append(event)
                    self._unclosed = None
                case ToolCallStart(index, name):
                    self._open[index] = self._calls.begin(name)
                    self._unclosed = None
                case ToolCallDelta(index, arguments):
                    self._open[index].arguments += arguments
                case ToolCallEnd(index, complete):
                    if not complete:  # cut by the token limit: it must not be run
                        self._calls.drop(self._open[index])
                case StreamEnd():
                    pass
        return texts


def _spells_opener(text: str) -> bool:
    return any(opener in text for opener in _BLOCK_OPENERS)
