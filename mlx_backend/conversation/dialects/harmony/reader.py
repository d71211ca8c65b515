"""Harmony, the format of gpt-oss: messages on channels, with or without a recipient.

Theory of operation
-------------------
A turn is a row of messages, and a message is a header and a body:

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>BODY<|call|>

The prompt ends with `<|start|>assistant`, so a turn begins inside a header. The reader is in one state:

    OPENING   the turn's beginning: a header without its `<|start|>`, or an answer without any header
    HEADER    after `<|start|>`, `<|channel|>` or `<|constrain|>`: text is gathered until it is clear
    BODY      text is put out at once, on the channel or as the arguments of the call that the header named
    BETWEEN   after `<|end|>`: noise, a header whose first markers were forgotten, or text without one
    STRIPPED  `analysis…`: a server upstream may have removed the markers, as `assistantfinal` would tell

Models break headers in every way, so a header is parsed once as a whole, and anything parses (`header.py`).
The rest is repaired like this:

- `<|start|>` and `<|channel|>` open a new header wherever they stand; an open body ends there, complete.
- `<|message|>` opens the body. Where it was forgotten the body begins as soon as that is plain: at a brace
  after a complete header, after more prose than a header holds, or at the end marker (what is left of the
  header is the body).
- `<|call|>`, `<|return|>` and `<|endoftext|>` end the turn; what follows is a run-on. So does a message of
  another role once the assistant has spoken; before that it is skipped, as an echo of the prompt.
- Noise between messages and junk headers without a body are set aside. They are shown only if the turn ends
  with nothing else to show: an answer is never lost because its header was broken.

Two analysis messages in a row are set apart by an empty line.

Where token ids are known, a marker spelt in a body is text. In a header it still counts: models copy
markers into names, and a header holds no text of its own. Hold-back is bounded: see the three limits below.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Reader
from mlx_backend.conversation.dialects.harmony.header import (
    CALL,
    CHANNEL,
    END,
    HARMONY_TOKENS,
    MESSAGE,
    RETURN,
    START,
    Beginning,
    Header,
    classify_beginning,
    has_letters,
    is_prose,
    paragraph_break,
    parse_header,
    split_stripped,
)
from mlx_backend.conversation.events import Channel, ContentDelta, ReasoningDelta
from mlx_backend.conversation.json_arguments import JsonArguments
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.tools import ToolSet

MAX_HEADER = 256
"""Characters; the longest sound header (a name of 128) has some 190."""
MAX_CONTENT_TYPE = 64
"""Characters after a complete header: more than a content type and noise."""
MAX_STRIPPED = 65_536
"""Characters of reasoning that may wait for `assistantfinal`."""

_MARKERS = MarkerSet(HARMONY_TOKENS.values())
_MARKERS_IN_CALL = MarkerSet(HARMONY_TOKENS.values(), watched=JsonArguments.SPECIAL)
_STRIPPED_TURN = re.compile(r"assistant(?=final|commentary\s{1,2}to=|\s{1,2}to=)")
_STRIPPED_HOLD = len("assistantcommentary  to=")


class _HarmonyState(Enum):
    OPENING = auto()
    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()
    STRIPPED = auto()


class HarmonyReader(Reader):
    """Reads one Harmony turn."""

    __slots__ = (
        *("_arguments", "_by_spelling", "_check_length", "_gathered", "_put_out", "_reasoning_tail"),
        *("_resumes", "_searched", "_separator", "_set_aside", "_state", "_tools"),
    )

    def __init__(
        self,
        *,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] = HARMONY_TOKENS,
    ) -> None:
        super().__init__()
        self._tools = tools
        self._by_spelling = _MARKERS.without(special_tokens.values())
        self._gathered = ""  # text whose meaning is not known yet, with markers spelt out
        self._check_length = MAX_CONTENT_TYPE  # of `_gathered`: from here on its length may decide something
        self._searched = 0  # how much of STRIPPED text has been searched
        self._set_aside = ""
        self._separator = ""  # goes before the next text of reasoning
        self._reasoning_tail = ""  # of the last analysis message, while no other message has followed it
        self._arguments = JsonArguments()  # of the open call
        self._put_out: Callable[[str], Event] | None = None  # the delta of its arguments
        self._resumes: Channel | None = None  # channel of a body that the header being read has interrupted
        self.markers = self.spelt = _MARKERS
        self._state = _HarmonyState.OPENING
        if opens_in is not None:
            self._open_body(opens_in)

    @property
    def is_reasoning(self) -> bool:
        """Whether this is the body of an analysis message."""
        return self._state is _HarmonyState.BODY and (self.delta is ReasoningDelta or bool(self._separator))

    @property
    def is_answering(self) -> bool:
        """Whether this is the body of a final message."""
        return self._state is _HarmonyState.BODY and self.delta is ContentDelta

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """End the message, begin another, and make it the final one."""
        return END, f"{START}assistant", f"{CHANNEL}{Channel.FINAL}{MESSAGE}"

    # text

    def text(self, text: str) -> None:
        """Put a body's text out; gather any other text until its meaning is known."""
        if self._state is _HarmonyState.BODY:
            self._emit(text)
        elif self._state is _HarmonyState.STRIPPED:
            self._gathered += text
            self._find_stripped_markers()
        else:
            self._gather(text)

    def _gather(self, text: str) -> None:
        """Gather character by character, so that no decision depends on how the text was cut."""
        for at, character in enumerate(text):
            self._gathered += character
            if self._state is _HarmonyState.HEADER:
                if character in "{[" or len(self._gathered) > self._check_length:
                    self._check_for_body()
            elif self._state is _HarmonyState.OPENING:
                self._gather_opening()
            else:
                self._gather_between()
            if self.ended:
                return
            if self._state in (_HarmonyState.BODY, _HarmonyState.STRIPPED):
                if text[at + 1 :]:
                    self.text(text[at + 1 :])
                return

    def _gather_opening(self) -> None:
        text = self._gathered
        match classify_beginning(text, of_turn=True):
            case Beginning.HEADER:
                self._state = _HarmonyState.HEADER
                self._check_for_body()
            case Beginning.STRIPPED:
                self._state = _HarmonyState.STRIPPED
            case Beginning.STRIPPED_ANSWER:
                self._open_body(Channel.FINAL)
                self._emit(text[text.index(Channel.FINAL) + len(Channel.FINAL) :])
            case Beginning.TEXT:
                self._show(text)
            case _ if len(text) > MAX_HEADER:
                self._show(text)

    def _gather_between(self) -> None:
        text = self._gathered
        if text.lstrip()[:1] in ("{", "["):
            self._show(text)
        elif classify_beginning(text, of_turn=False) is Beginning.HEADER:
            self._state = _HarmonyState.HEADER
            self._check_for_body()
        elif len(text) > MAX_HEADER:
            self._show(text)

    def _check_for_body(self) -> None:
        """Check whether the header being gathered has run into a body without a `<|message|>`."""
        header = parse_header(self._gathered, self._tools)
        overlong = len(self._gathered) > MAX_HEADER
        named = header.channel is not None and header.recipient is None and not header.is_constrained
        if header.is_foreign:
            if overlong:
                self._open_header(header)
        elif header.rest[:1] in ("{", "[") or (named and len(header.rest) > MAX_CONTENT_TYPE):
            self._open_header(header)
            self._emit(header.rest)
        elif overlong:
            self._open_overlong(header)
        # Parsing the header at every character would be slow: it is parsed again when its length may decide.
        more = MAX_CONTENT_TYPE - len(header.rest) if named else MAX_HEADER
        self._check_length = min(len(self._gathered) + more, MAX_HEADER)

    def _open_overlong(self, header: Header) -> None:
        """Give up on a header that never ends: a thought spilled into it, or text that quotes a marker."""
        if header.recipient is not None or (header.is_constrained and header.channel is not Channel.FINAL):
            self._open_body(Channel.ANALYSIS)
        else:
            self._open_body(header.channel or self._resumes or Channel.FINAL)
        self._emit(header.rest)

    def _find_stripped_markers(self) -> None:
        text = self._gathered
        if found := _STRIPPED_TURN.search(text, self._searched):
            for channel, message in split_stripped(text[text.index(Channel.ANALYSIS) : found.start()]):
                self._open_body(channel)
                self._emit(message)
            self._leave_body(_HarmonyState.HEADER)
            after = text[found.end() :]
            if after.startswith(Channel.FINAL):
                self._open_body(Channel.FINAL)
            if after := after.removeprefix(Channel.FINAL):
                self.text(after)
        elif len(text) > MAX_STRIPPED:
            self._show(text)
        else:
            self._searched = max(0, len(text) - _STRIPPED_HOLD)

    # markers

    def marker(self, marker: str) -> None:
        """Open or close a header or a body. Markers that mean nothing in a turn are dropped."""
        match marker:
            case "<|start|>" | "<|channel|>":
                self._open_new_header(marker)
            case "<|constrain|>" if self._state is not _HarmonyState.BODY:
                self._state = _HarmonyState.HEADER
                self._gathered += marker
                self._check_length = MAX_CONTENT_TYPE
            case "<|message|>" if self._state is not _HarmonyState.BODY:
                self._open_header(parse_header(self._gathered, self._tools))
            case "<|end|>" | "<|call|>" | "<|return|>" | "<|endoftext|>":
                self._end_message(marker)
                self._leave_body(_HarmonyState.BETWEEN) if marker == END else self._end_turn()

    def _open_new_header(self, marker: str) -> None:
        if self._state is _HarmonyState.BODY:
            self._leave_body(_HarmonyState.HEADER, interrupted=True)
        elif self._state is _HarmonyState.BETWEEN:
            self._set_aside = self._gathered
            self._gathered = ""
        elif self._state in (_HarmonyState.HEADER, _HarmonyState.STRIPPED):
            header = parse_header(self._gathered, self._tools)
            if is_prose(header.rest) and header.recipient is None and not header.is_foreign:
                self._open_rest(header, END)
                self._leave_body(_HarmonyState.HEADER)
        if marker == START:
            self._gathered = ""
        self._state = _HarmonyState.HEADER
        self._gathered += marker
        self._check_length = MAX_CONTENT_TYPE
        if len(self._gathered) > MAX_HEADER:  # a header of nothing but markers and noise
            self._gathered = marker

    def _open_header(self, header: Header) -> None:
        """Open the body that a header announces."""
        if header.is_foreign:
            if self._has_spoken:
                self._end_turn()
            else:
                self._enter_body()
        elif header.recipient is not None and self._tools.may_be_called:
            self._enter_body()
            self._open_call(header.recipient)
            self._arguments = JsonArguments()
            self._put_out, self.delta = self.delta, None
            self.markers = _MARKERS_IN_CALL
            self.spelt = MarkerSet(self._by_spelling.markers, watched=JsonArguments.SPECIAL)
        else:
            self._open_body(header.channel or Channel.FINAL)

    def _end_message(self, marker: str) -> None:
        match self._state:
            case _HarmonyState.HEADER:
                self._open_rest(parse_header(self._gathered, self._tools), marker)
            case _HarmonyState.STRIPPED if marker == END:
                self._open_rest(parse_header(self._gathered, self._tools), marker)
            case _HarmonyState.OPENING | _HarmonyState.STRIPPED:
                if self._gathered:
                    self._show(self._gathered)
            case _HarmonyState.BETWEEN:
                self._show_if_text()

    def _open_rest(self, header: Header, marker: str) -> None:
        """Make a message of what is left of a header whose body never began."""
        rest = header.rest
        if header.is_foreign:
            self._open_header(header)
        elif header.recipient is not None and (not rest or marker == CALL or rest[0] in "{["):
            self._open_header(header)
            self._emit(rest)
        elif header.recipient is not None or (header.is_constrained and header.channel is not Channel.FINAL):
            if rest:  # a thought spilled into the header of a call that was never made
                self._open_body(Channel.ANALYSIS)
                self._emit(rest)
        elif header.channel is None and self._resumes is not None and is_prose(rest):
            self._open_body(self._resumes)  # text that quotes a marker
            self._emit(rest)
        elif header.channel is None or header.is_junk:
            self._set_aside = rest
        else:
            self._open_header(header)
            self._emit(rest)

    def _show_if_text(self) -> None:
        """Show what stands between two messages if it has letters, else set it aside."""
        text = self._gathered.strip()
        if has_letters(text.removeprefix("assistant")):
            self._show(text)
        elif text:
            self._set_aside = text

    # bodies

    def _show(self, text: str) -> None:
        self._open_body(Channel.FINAL)
        self._emit(text)

    def _open_body(self, channel: Channel) -> None:
        self._enter_body()
        self._open(channel)
        self._resumes = channel
        self._reasoning_tail = self._reasoning_tail if channel is Channel.ANALYSIS else ""
        self._separator = paragraph_break(self._reasoning_tail)
        if self._separator:
            self.delta = None  # until there is text to set apart: an empty message adds nothing
        self.last = self.before_last = ""

    def _emit(self, text: str) -> None:
        if text and self._separator:
            self.last = text
            self.events.append(ReasoningDelta(self._separator + text))
            self.delta = ReasoningDelta
            self._separator = ""
        elif text and self._in_call:
            self.delta = self._put_out
            super()._emit(self._arguments.feed(text))
            self.delta = self._put_out if self._arguments.is_plain else None
        else:
            super()._emit(text)

    def _enter_body(self) -> None:
        if self._state is _HarmonyState.BODY:
            self._leave_body(_HarmonyState.HEADER)
        self._state = _HarmonyState.BODY
        self._gathered = self._set_aside = ""
        self._resumes = None
        self.spelt = self._by_spelling

    def _leave_body(self, place: _HarmonyState, *, complete: bool = True, interrupted: bool = False) -> None:
        if self._in_call:
            if complete:
                self.delta = self._put_out
                super()._emit(self._arguments.finish())
            self._close_call(complete=complete)
            self._reasoning_tail = ""
        elif self.is_reasoning:
            self._reasoning_tail = (self.before_last + self.last)[-2:] or self._reasoning_tail
            self._separator = ""
        self.delta = None
        self.markers = self.spelt = _MARKERS
        self._state = place
        self._gathered = ""
        self._check_length = MAX_CONTENT_TYPE
        if not interrupted:
            self._resumes = None

    def _end_turn(self) -> None:
        self._leave_body(_HarmonyState.BETWEEN)
        self._show_set_aside()
        self.ended = True

    def _show_set_aside(self) -> None:
        """Show what was set aside if nothing followed it and the turn has shown nothing."""
        if self._set_aside.strip() and not self._has_spoken:
            self._show(self._set_aside)
            self._leave_body(_HarmonyState.BETWEEN)

    def close(self, ended_by: EndedBy) -> None:
        """Handle the end. A cut header is never shown, a cut call is not complete."""
        if ended_by == "stop":
            self._end_message(RETURN)
            self._leave_body(_HarmonyState.BETWEEN)
            self._show_set_aside()
        else:
            self._close_cut()

    def _close_cut(self) -> None:
        match self._state:
            case _HarmonyState.HEADER:
                header = parse_header(self._gathered, self._tools)
                if is_prose(header.rest) and header.recipient is None:
                    self._open_rest(header, END)
            case _HarmonyState.OPENING | _HarmonyState.STRIPPED:
                if self._gathered:
                    self._show(self._gathered)
            case _HarmonyState.BETWEEN:
                if is_prose(self._gathered):
                    self._show(self._gathered.strip())
        self._leave_body(_HarmonyState.BETWEEN, complete=False)
