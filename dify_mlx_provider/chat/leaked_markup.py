"""Finds a model's own markup in one text field of a server's stream, and hands it to the shared parser.

A server that knows its model separates reasoning, answer and calls. Others pass on what the model wrote: raw Harmony,
also without its markers, a `<think>` block, a `</think>` whose opening stood in the prompt, `<tool_call>` blocks, an
end marker. At the beginning of a field markup is always parsed. Later the answer may only be talking about markup:
there it is parsed outside code and quotation marks only, and not at all for a server that is known to separate.

An answer that is nothing but the JSON of a call to one of the request's tools is that call, whoever sends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.calls.unwrapped import UNWRAPPED
from mlx_backend.conversation.dialects.families.shared import WORDS
from mlx_backend.conversation.dialects.open_call import OpenCall
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
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from dify_mlx_provider.chat.tool_calls import ServerToolCall, ToolCallAssembler
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Event
    from mlx_backend.conversation.tools import ToolDefinition

_LEAKS = [dialect.leaks for dialect in DIALECTS.values()]
_CLOSERS = frozenset(closer for leaks in _LEAKS for closer in leaks.reasoning_closers)
_ENDS = frozenset(end for leaks in _LEAKS for end in leaks.end_markers)
_CALLS = {opener: dialect for dialect in DIALECTS.values() for opener in dialect.leaks.call_openers}
_MESSAGES = {opener: dialect for dialect in DIALECTS.values() for opener in dialect.leaks.message_openers}
# Openers of the dialects whose reasoning stands in a block: where one is spelt, a closer is spelt too.
_BLOCKS = {
    opener: dialect
    for dialect in DIALECTS.values()
    if dialect.leaks.reasoning_closers
    for opener in dialect.leaks.openers
}
# An end marker counts only at the end of the text. To be held back until then it must start a longer marker.
_HELD_ENDS = [end + leaks.message_openers[0] for end in _ENDS for leaks in _LEAKS if leaks.message_openers]
_STRIPPED_CALLS = {
    opener: dialect for dialect in DIALECTS.values() for opener in dialect.leaks.stripped_call_openers
}
_LATER = MarkerSet([*_MESSAGES, *_CLOSERS, *_CALLS, *_STRIPPED_CALLS, *_HELD_ENDS, *(_BLOCKS.keys() - WORDS)])


class LeakedMarkupParser:
    """Parses one field: `feed` and `close` return events of text; calls go to `calls`.

    `plain` is the event of text without markup. `tools` are the request's tools, whose names and schemas decide what a
    call is and of which types its arguments are. With `scan`, markup is looked for after the beginning too, and with
    `unwrapped` the answer may be a call without any.
    `starts_in_reasoning` says that the text starts inside a block that the prompt opened; if the answer shows
    otherwise, `started_in_reasoning` says so.
    """

    def __init__(
        self,
        plain: type[ContentDelta] | type[ReasoningDelta],
        calls: ToolCallAssembler,
        *,
        tools: Collection[ToolDefinition] = (),
        scan: bool = True,
        starts_in_reasoning: bool = False,
        unwrapped: bool = False,
    ) -> None:
        self.started_in_reasoning: bool | None = None
        self._plain = plain
        self._calls = calls
        self._tools = tools
        self._tool_set = ToolSet(tools, unwrapped=unwrapped) if tools else None
        # The answer so far, where all of it may be a call without markup.
        self._unwrapped: OpenCall | None = None
        if self._tool_set is not None and self._tool_set.may_be_unwrapped:
            self._unwrapped = OpenCall(UNWRAPPED, self._tool_set, must_be_offered=True)
        self._scans = scan
        self._pending = ""
        # Whether the beginning was checked for markup; whether reasoning comes in a field of its own; and whether the
        # opener of a block was spelt in the text so far.
        self._looked_at_start = self._has_separate_reasoning = self._spells_opener = False
        self._header_due = scan and bool(tools)
        self._before = PrecedingText()
        # What reads markup, and what reads the answer that follows a block of reasoning.
        self._parser: ChannelParser | None = None
        self._answer: LeakedMarkupParser | None = None
        self._open: dict[int, ServerToolCall] = {}
        # What is taken for reasoning only because of `starts_in_reasoning`.
        self._assumed_reasoning: list[str] | None = None
        if starts_in_reasoning:
            self._parser = self._new_parser(THINK, Channel.ANALYSIS)
            self._assumed_reasoning = []

    def separate_reasoning_begins(self) -> list[Event]:
        """Note that reasoning comes in a field of its own; return the text that was held back before it."""
        self._has_separate_reasoning = True
        if self._assumed_reasoning == []:
            self._parser = self._assumed_reasoning = self._answer = None
        self._looked_at_start = True
        events: list[Event] = []
        if self._pending.strip():
            pending, self._pending = self._pending, ""
            self._emit(pending, events)
        return events

    def feed(self, text: str) -> list[Event]:
        """Return the events of a piece of text."""
        if self._parser is not None:
            return self._collect_text(self._parser.feed(text))
        if self._unwrapped is not None:
            if self._unwrapped.first_wrong(text) is None:
                self._unwrapped.text.append(text)
                return []
            text, self._unwrapped = f"{self._unwrapped.text}{text}", None
        text, self._pending = self._pending + text, ""
        if not self._looked_at_start:
            start = text.lstrip()
            begins = [(dialect.leaks.begins(start), dialect) for dialect in DIALECTS.values()]
            if dialect := next((dialect for leaked, dialect in begins if leaked), None):
                self._looked_at_start = True
                return self._start_parser(dialect, start)
            if any(leaked is None for leaked, _ in begins):
                self._pending = text
                return []
            self._looked_at_start = True
        if not self._scans:
            return [self._plain(text)] if text else []
        if self._header_due and text.strip():
            start = text.lstrip()
            bodies = [leaks.without_header(start) for leaks in _LEAKS]
            if None in bodies:
                self._pending = text
                return []
            self._header_due = False
            text = next((body for body in bodies if body != start), None) or text
        return self._scan_rest(text)

    def close(self, *, cut: bool) -> list[Event]:
        """Return the last events; `cut` says that the token limit was reached."""
        if self._parser is not None:
            events = self._collect_text(self._parser.close("length" if cut else "stop"))
            if self._answer is not None:
                events += self._answer.close(cut=cut)
            if self._assumed_reasoning and not cut:  # the block never closed: all of it was the answer
                self.started_in_reasoning = False
                events.append(ContentDelta("".join(self._assumed_reasoning)))
            return events
        if self._unwrapped is not None:
            text, self._unwrapped = self._close_unwrapped(self._unwrapped, cut=cut), None
            return [*self.feed(text), *self.close(cut=cut)]
        pending, self._pending = self._pending, ""
        if self._scans and self._looked_at_start:
            pending = next(("" for end in _ENDS if pending.startswith(end)), pending)
        return [self._plain(pending)] if pending else []

    def _close_unwrapped(self, held: OpenCall, *, cut: bool) -> str:
        """Hand on the calls that are all of the answer, or return it as text."""
        calls, is_open = held.accepted_calls(str(held.text)), held.is_open()
        if not calls or self._calls.has_any or (is_open and not cut):
            return str(held.text)
        for name, call in calls[: len(calls) - is_open]:
            self._calls.start_call(name).arguments = call.arguments
        return ""

    # -- later in the text -------------------------------------------------------------------------

    def _scan_rest(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            before, marker, after = _LATER.cut(text)
            if not marker:
                self._emit(before, events)
                self._pending = after
                break
            text = after
            if not self._is_leaked(before, marker):
                self._emit(before + marker, events)
                continue
            self._emit(before, events)
            if marker in _CLOSERS:
                self.started_in_reasoning = True
                continue
            if dialect := _BLOCKS.get(marker):
                return events + self._start_parser(dialect, marker + after)
            if dialect := _STRIPPED_CALLS.get(marker):
                return events + self._start_parser(dialect, marker + after)
            if dialect := _CALLS.get(marker):
                return events + self._start_parser(dialect, marker + after, Channel.FINAL)
            end = next((end for end in _ENDS if marker.startswith(end)), "")
            opener = marker.removeprefix(end)
            return events + self._start_parser(_MESSAGES[opener], opener + after)
        return events

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            self._spells_opener = self._spells_opener or _spells_opener(self._before.tail + text)
            self._before.add(text)
            events.append(self._plain(text))

    def _is_leaked(self, before: str, marker: str) -> bool:
        preceding = self._before.followed_by(before)
        if preceding.is_in_code or preceding.opens_quotation:
            return False
        if marker in _CLOSERS:
            opened = self._spells_opener or _spells_opener(self._before.tail + before)
            return not (self._has_separate_reasoning or opened)
        if marker in _CALLS or marker in _STRIPPED_CALLS:
            return bool(self._tools)
        return not preceding.is_mid_sentence

    # -- parsing -----------------------------------------------------------------------------------

    def _new_parser(self, dialect: Dialect, opens_in: Channel | None = None) -> ChannelParser:
        if dialect.blocks and opens_in is not Channel.FINAL and self._scans:
            # The block may be common to many families, and the calls after it another one's.
            self._answer = LeakedMarkupParser(ContentDelta, self._calls, tools=self._tools)
            self._answer._looked_at_start = self._answer._has_separate_reasoning = True
        return ChannelParser(dialect, tools=self._tool_set, opens_in=opens_in)

    def _start_parser(self, dialect: Dialect, text: str, opens_in: Channel | None = None) -> list[Event]:
        self._parser = self._new_parser(dialect, opens_in)
        return self._collect_text(self._parser.feed(text))

    def _collect_text(self, events: Iterable[Event]) -> list[Event]:
        """Return the text among parsed events; hand on the calls."""
        texts: list[Event] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    texts.append(event)
                    if self._assumed_reasoning is not None:
                        self._assumed_reasoning.append(text)
                case ContentDelta(text):
                    texts += [event] if self._answer is None else self._answer.feed(text)
                    self._assumed_reasoning = None
                case ToolCallStart(index, name):
                    self._open[index] = self._calls.start_call(name)
                    self._assumed_reasoning = None
                case ToolCallDelta(index, arguments):
                    self._open[index].arguments += arguments
                case ToolCallEnd(index, complete):
                    if not complete:  # the token limit cut it: it must not be run
                        self._calls.discard(self._open[index])
                case StreamEnd():
                    pass
        return texts


def _spells_opener(text: str) -> bool:
    return any(opener in text for opener in _BLOCKS)
