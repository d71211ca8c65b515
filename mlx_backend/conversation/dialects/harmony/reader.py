"""Harmony, the format of gpt-oss: messages on channels, with or without a recipient.

Theory of operation
-------------------
A turn is a row of messages, and a message is a header and a body:

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>BODY<|call|>

The prompt ends with `<|start|>assistant`, so a turn begins inside a header. The reader is always in one
place:

    OPENING   the turn's beginning: a header without its `<|start|>`, or an answer without any header
    HEADER    behind `<|start|>`, `<|channel|>` or `<|constrain|>`: text is gathered until it is clear
    BODY      text is put out at once, on the channel or as the call that the header named
    BETWEEN   behind `<|end|>`: noise, a header whose first markers were forgotten, or text without one
    STRIPPED  `analysis…`: a server upstream may have removed the markers, as `assistantfinal` would tell

Models break headers in every way, so a header is read once as a whole and anything can be read
(`header.py`). These moves repair all the rest:

- `<|start|>` and `<|channel|>` open a new header wherever they stand; an open body ends there, complete.
- `<|message|>` opens the body. Where it was forgotten the body begins as soon as that is plain: at a brace
  behind a complete header, after more prose than a header holds, or at the end marker (what is left of the
  header is the body).
- `<|call|>`, `<|return|>` and `<|endoftext|>` end the turn; what follows is a run-on. So does a message of
  another role once the assistant has spoken; before that it is skipped, as an echo of the prompt.
- Noise between messages and junk headers without a body are put aside. They are shown only if the turn ends
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
    Beginning,
    Header,
    beginning,
    has_letters,
    is_prose,
    parse_header,
)
from mlx_backend.conversation.dialects.harmony.markers import (
    CALL,
    CHANNEL,
    END,
    HARMONY_TOKENS,
    MESSAGE,
    RETURN,
    START,
)
from mlx_backend.conversation.events import Channel, ContentDelta, ReasoningDelta
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

HEADER_LIMIT = 256  # characters; the longest sound header (a name of 128) has some 190
PROSE_LIMIT = 64  # characters behind a complete header: more than a content type and noise
STRIPPED_LIMIT = 65_536  # characters of reasoning that may wait for `assistantfinal`

_MARKERS = MarkerSet(HARMONY_TOKENS.values())
_CHANNEL_WORDS = tuple(Channel)
_STRIPPED_TURN = re.compile(r"assistant(?=final|commentary\s{1,2}to=|\s{1,2}to=)")
_STRIPPED_MESSAGE = re.compile(r"assistant(?=analysis|commentary)")
_STRIPPED_HOLD = len("assistantcommentary  to=")


class _Place(Enum):
    OPENING = auto()
    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()
    STRIPPED = auto()


class HarmonyReader(Reader):
    """Reads one Harmony turn."""

    __slots__ = (
        "_by_spelling",
        "_gathered",
        "_look_at",
        "_place",
        "_put_aside",
        "_reasoning_tail",
        "_resumes",
        "_searched",
        "_separator",
        "_tools",
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
        self._gathered = ""  # text that is not understood yet, markers spelt out
        self._look_at = PROSE_LIMIT  # length of `_gathered` at which its length may decide something
        self._searched = 0  # how far STRIPPED text has been looked through
        self._put_aside = ""
        self._separator = ""  # goes before the next text of reasoning
        self._reasoning_tail = ""  # of the last analysis message, while no other message has followed it
        self._resumes: Channel | None = None  # channel of a body that the header being read has interrupted
        self.markers = self.spelt = _MARKERS
        self._place = _Place.OPENING
        if opens_in is not None:
            self._begin(opens_in)

    @property
    def is_reasoning(self) -> bool:
        """Whether this is the body of an analysis message."""
        return self._place is _Place.BODY and (self.delta is ReasoningDelta or bool(self._separator))

    @property
    def is_answering(self) -> bool:
        """Whether this is the body of a final message."""
        return self._place is _Place.BODY and self.delta is ContentDelta

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """End the message, begin another, and make it the final one."""
        return END, f"{START}assistant", f"{CHANNEL}{Channel.FINAL}{MESSAGE}"

    # text

    def text(self, text: str) -> None:
        """Put a body's text out; gather any other until it can be told what it is."""
        if self._place is _Place.BODY:
            self._emit(text)
        elif self._place is _Place.STRIPPED:
            self._gathered += text
            self._look_for_stripped_markers()
        else:
            self._gather(text)

    def _gather(self, text: str) -> None:
        """Gather character by character, so that no decision depends on how the text was cut."""
        for at, character in enumerate(text):
            self._gathered += character
            if self._place is _Place.HEADER:
                if character in "{[" or len(self._gathered) > self._look_at:
                    self._look_for_body()
            elif self._place is _Place.OPENING:
                self._look_at_opening()
            else:
                self._look_between()
            if self.ended:
                return
            if self._place in (_Place.BODY, _Place.STRIPPED):
                if text[at + 1 :]:
                    self.text(text[at + 1 :])
                return

    def _look_at_opening(self) -> None:
        text = self._gathered
        match beginning(text, of_turn=True):
            case Beginning.HEADER:
                self._place = _Place.HEADER
                self._look_for_body()
            case Beginning.STRIPPED:
                self._place = _Place.STRIPPED
            case Beginning.STRIPPED_ANSWER:
                self._begin(Channel.FINAL)
                self._emit(text[text.index(Channel.FINAL) + len(Channel.FINAL) :])
            case Beginning.TEXT:
                self._show(text)
            case _ if len(text) > HEADER_LIMIT:
                self._show(text)

    def _look_between(self) -> None:
        text = self._gathered
        if text.lstrip()[:1] in ("{", "["):
            self._show(text)
        elif beginning(text, of_turn=False) is Beginning.HEADER:
            self._place = _Place.HEADER
            self._look_for_body()
        elif len(text) > HEADER_LIMIT:
            self._show(text)

    def _look_for_body(self) -> None:
        """See whether the header being gathered has run over into a body without a `<|message|>`."""
        header = parse_header(self._gathered, self._tools)
        overlong = len(self._gathered) > HEADER_LIMIT
        named = header.channel is not None and header.recipient is None and not header.constrained
        if header.foreign:
            if overlong:
                self._open_header(header)
        elif header.rest[:1] in ("{", "[") or (named and len(header.rest) > PROSE_LIMIT):
            self._open_header(header)
            self._emit(header.rest)
        elif overlong:
            self._open_overlong(header)
        # Reading a header for every character would be slow, so it is read again when its length may decide.
        more = PROSE_LIMIT - len(header.rest) if named else HEADER_LIMIT
        self._look_at = min(len(self._gathered) + more, HEADER_LIMIT)

    def _open_overlong(self, header: Header) -> None:
        """Give up on a header that never ends: a thought spilled into it, or text that quotes a marker."""
        if header.recipient is not None or (header.constrained and header.channel is not Channel.FINAL):
            self._begin(Channel.ANALYSIS)
        else:
            self._begin(header.channel or self._resumes or Channel.FINAL)
        self._emit(header.rest)

    def _look_for_stripped_markers(self) -> None:
        text = self._gathered
        if found := _STRIPPED_TURN.search(text, self._searched):
            opening = text.index(Channel.ANALYSIS)
            for message in _STRIPPED_MESSAGE.split(text[opening : found.start()]):
                channel = next(channel for channel in _CHANNEL_WORDS if message.startswith(channel))
                self._begin(channel)
                self._emit(message.removeprefix(channel))
            self._leave_body(_Place.HEADER)
            behind = text[found.end() :]
            if behind.startswith(Channel.FINAL):
                self._begin(Channel.FINAL)
                behind = behind.removeprefix(Channel.FINAL)
            if behind:
                self.text(behind)
        elif len(text) > STRIPPED_LIMIT:
            self._show(text)
        else:
            self._searched = max(0, len(text) - _STRIPPED_HOLD)

    # markers

    def marker(self, marker: str) -> None:
        """Open or close a header or a body. Markers that mean nothing in a turn are dropped."""
        match marker:
            case "<|start|>" | "<|channel|>":
                self._open_new_header(marker)
            case "<|constrain|>" if self._place is not _Place.BODY:
                self._place = _Place.HEADER
                self._gathered += marker
                self._look_at = PROSE_LIMIT
            case "<|message|>" if self._place is not _Place.BODY:
                self._open_header(parse_header(self._gathered, self._tools))
            case "<|end|>" | "<|call|>" | "<|return|>" | "<|endoftext|>":
                self._end_message(marker)
                if marker == END:
                    self._leave_body(_Place.BETWEEN)
                else:
                    self._end_turn()

    def _open_new_header(self, marker: str) -> None:
        if self._place is _Place.BODY:
            self._leave_body(_Place.HEADER, interrupted=True)
        elif self._place is _Place.BETWEEN:
            self._put_aside = self._gathered
            self._gathered = ""
        elif self._place in (_Place.HEADER, _Place.STRIPPED):
            header = parse_header(self._gathered, self._tools)
            if is_prose(header.rest) and header.recipient is None and not header.foreign:
                self._open_rest(header, END)
                self._leave_body(_Place.HEADER)
        if marker == START:
            self._gathered = ""
        self._place = _Place.HEADER
        self._gathered += marker
        self._look_at = PROSE_LIMIT
        if len(self._gathered) > HEADER_LIMIT:  # a header of nothing but markers and noise
            self._gathered = marker

    def _open_header(self, header: Header) -> None:
        """Open the body that a header announces."""
        if header.foreign:
            if self._has_spoken:
                self._end_turn()
            else:
                self._enter_body()
        elif header.recipient is not None and self._tools.may_be_called:
            self._enter_body()
            self._open_call(header.recipient)
        else:
            self._begin(header.channel or Channel.FINAL)

    def _end_message(self, marker: str) -> None:
        match self._place:
            case _Place.HEADER:
                self._open_rest(parse_header(self._gathered, self._tools), marker)
            case _Place.STRIPPED if marker == END:
                self._open_rest(parse_header(self._gathered, self._tools), marker)
            case _Place.OPENING | _Place.STRIPPED:
                if self._gathered:
                    self._show(self._gathered)
            case _Place.BETWEEN:
                self._show_if_text()

    def _open_rest(self, header: Header, marker: str) -> None:
        """Make a message of a header whose body never began."""
        rest = header.rest
        if header.foreign:
            self._open_header(header)
        elif header.recipient is not None and (not rest or marker == CALL or rest[0] in "{["):
            self._open_header(header)
            self._emit(rest)
        elif header.recipient is not None or (header.constrained and header.channel is not Channel.FINAL):
            if rest:  # a thought spilled into the header of a call that was never made
                self._begin(Channel.ANALYSIS)
                self._emit(rest)
        elif header.channel is None and self._resumes is not None and is_prose(rest):
            self._begin(self._resumes)  # text that quotes a marker
            self._emit(rest)
        elif header.channel is None or header.is_junk:
            self._put_aside = rest
        else:
            self._open_header(header)
            self._emit(rest)

    def _show_if_text(self) -> None:
        """Show what stands between two messages if it says something, else put it aside."""
        text = self._gathered.strip()
        if has_letters(text.removeprefix("assistant")):
            self._show(text)
        elif text:
            self._put_aside = text

    # bodies

    def _show(self, text: str) -> None:
        self._begin(Channel.FINAL)
        self._emit(text)

    def _begin(self, channel: Channel) -> None:
        self._enter_body()
        self._open(channel)
        self._resumes = channel
        if channel is not Channel.ANALYSIS:
            self._reasoning_tail = ""
        self._separator = _paragraph_break(self._reasoning_tail)
        if self._separator:
            self.delta = None  # until there is text to set apart: an empty message adds nothing
        self.last = self.before_last = ""

    def _emit(self, text: str) -> None:
        if text and self._separator:
            self.last = text
            self.events.append(ReasoningDelta(self._separator + text))
            self.delta = ReasoningDelta
            self._separator = ""
        else:
            super()._emit(text)

    def _enter_body(self) -> None:
        if self._place is _Place.BODY:
            self._leave_body(_Place.HEADER)
        self._place = _Place.BODY
        self._gathered = self._put_aside = ""
        self._resumes = None
        self.spelt = self._by_spelling

    def _leave_body(self, place: _Place, *, complete: bool = True, interrupted: bool = False) -> None:
        if self._in_call:
            self._close_call(complete=complete)
            self._reasoning_tail = ""
        elif self.is_reasoning:
            self._reasoning_tail = (self.before_last + self.last)[-2:] or self._reasoning_tail
            self._separator = ""
        self.delta = None
        self.spelt = _MARKERS
        self._place = place
        self._gathered = ""
        self._look_at = PROSE_LIMIT
        if not interrupted:
            self._resumes = None

    def _end_turn(self) -> None:
        self._leave_body(_Place.BETWEEN)
        self._recall()
        self.ended = True

    def _recall(self) -> None:
        """Show what was put aside if nothing followed it and the turn has said nothing."""
        if self._put_aside.strip() and not self._has_spoken:
            self._show(self._put_aside)
            self._leave_body(_Place.BETWEEN)

    def close(self, ended_by: EndedBy) -> None:
        """Read the end. A cut header is never shown, a cut call is not complete."""
        if ended_by == "stop":
            self._end_message(RETURN)
            self._leave_body(_Place.BETWEEN)
            self._recall()
        else:
            self._cut()

    def _cut(self) -> None:
        match self._place:
            case _Place.HEADER:
                header = parse_header(self._gathered, self._tools)
                if is_prose(header.rest) and header.recipient is None:
                    self._open_rest(header, END)
            case _Place.OPENING | _Place.STRIPPED:
                if self._gathered:
                    self._show(self._gathered)
            case _Place.BETWEEN:
                if is_prose(self._gathered):
                    self._show(self._gathered.strip())
        self._leave_body(_Place.BETWEEN, complete=False)


def _paragraph_break(before: str) -> str:
    """Return what is missing between a text with this end and a new paragraph; nothing behind a blank."""
    if not before or (before[-1].isspace() and before[-1] != "\n"):
        return ""
    return "\n\n"[len(before) - len(before.rstrip("\n")) :]
