"""One text field of a server's stream, read by the shared grammars from where a model's own markup leaks into it.

A server that knows its model separates reasoning, answer and calls. Others pass on what the model wrote: raw Harmony,
a `<think>` block, a `</think>` whose opening stood in the prompt, `<tool_call>` blocks, an end marker. Markup at the
beginning of a field is always read. Further on an answer may merely talk about markup: there it is read only outside
code and quotation marks, and not at all from a server that is known to separate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.think import OPENERS, TOOL_CALL
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

    from dify_mlx_provider.chat.tool_calls import Call, Calls
    from mlx_backend.conversation.events import Event

_THINK = ("<think>", "<thinking>", "<seed:think>", "<|begin_of_thought|>", "◁think▷", "[THINK]")
_HARMONY = ("<|channel|>", "<|start|>", "<|message|>")
_STRIPPED = "analysis"  # raw Harmony whose markers were removed: `analysisWe need … assistantfinalHi`
_CLOSERS = tuple(OPENERS[opener] for opener in _THINK)
_TURN = ("<|start|>assistant", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final")
_ENDS = ("<|end|>", "<|return|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>")

# An end marker counts at the end of the text alone. To be held back until then it has to begin a longer marker.
_LATER = MarkerSet([*_TURN, *_CLOSERS, TOOL_CALL, *(end + _TURN[0] for end in _ENDS)])


class LeakyText:
    """Reads one field: `feed` and `close` give events of text; calls go to `calls`.

    `plain` is what the field's text is where nothing leaks. `inside` says that the text begins inside a block of
    reasoning, since the prompt has opened it; where it was not so, `begins_inside` is what the answer has shown.
    """

    def __init__(
        self,
        plain: type[ContentDelta] | type[ReasoningDelta],
        calls: Calls,
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
        self._open: dict[int, Call] = {}
        self._unclosed: list[str] | None = None  # what was read as reasoning because of `inside` alone
        if inside:
            self._parser = self._parser_of("think", Channel.ANALYSIS)
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
            dialect = _dialect(text.lstrip())
            if dialect is None:
                self._held = text
                return []
            self._begun = True
            if dialect:
                return self._parse(dialect, text.lstrip())
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
            if marker == TOOL_CALL:
                return events + self._parse("think", marker + after, Channel.FINAL)
            return events + self._parse("harmony", marker[marker.rindex("<|") :] + after)
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
        if marker == TOOL_CALL:
            return bool(self._tools)
        return not preceding.is_mid_sentence

    # -- parsing -----------------------------------------------------------------------------------

    def _parser_of(self, dialect: str, opens_in: Channel | None = None) -> ChannelParser:
        return ChannelParser(dialect, tools=self._tools or None, opens_in=opens_in)

    def _parse(self, dialect: str, text: str, opens_in: Channel | None = None) -> list[Event]:
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
    return any(opener in text for opener in _THINK)


def _dialect(start: str) -> str | None:
    """The dialect a text begins in: "" for none, None while it may still be one."""
    if start.startswith(_HARMONY):
        return "harmony"
    if start.startswith(_THINK):
        return "think"
    if start.startswith(_STRIPPED) and len(start) > len(_STRIPPED):
        return "harmony" if start[len(_STRIPPED)].isupper() else ""
    if any(opener.startswith(start) for opener in (*_HARMONY, *_THINK, _STRIPPED)):
        return None
    return ""
