"""One call while it is read: its text so far, what it calls, and its arguments as they are written.

A closer in an open value may be part of the value, and the next one the call's: it is *doubted*. Where the value is
never closed, the call ends at the first after all. A marker in a string of JSON arguments is part of the string, unless
the string is broken: what is written after its end tells, and until then the marker and what follows it are held. A
call in another notation goes out while it is written (`CallReader`), up to a doubted closer.

A call that has lost its closer may be written again, word for word: that is one call.

Knows neither the states of the reader (`block_reader`) nor events.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.calls.base import first_wrong
from mlx_backend.conversation.dialects.calls.stream import MAX_UNDECIDED
from mlx_backend.conversation.dialects.calls.unwrapped import LoneSpan
from mlx_backend.conversation.json_arguments import JsonArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.conversation.dialects.block_format import CallBlock
    from mlx_backend.conversation.dialects.calls.base import CallPiece, CallReader, DecodedCall
    from mlx_backend.conversation.events import Event
    from mlx_backend.conversation.tools import ToolSet

BLANKS = " \t\r\n\v\f"
MAX_DOUBTS = 64
"""Markers in one call that may be part of a value."""
MAX_BEGINNING = 2048
"""Characters of a call in which its name has to stand, and its arguments to begin if they are put out as they come."""
_MAX_NAME = 256
_BARE_NAME = re.compile(r"\s*([\w.:/-]+)\s*")
_MAX_GAP = 16
"""Blanks between two openers of one call."""
_VISIBLE = re.compile(r"\S")


class OpenCall:
    """One call while it is read: its text so far, and the closers in it that may be part of a value."""

    __slots__ = (
        *("_decoded", "_doubted", "_has_begun", "_lone", "_same", "_span", "_stream", "_tools"),
        *("arguments", "block", "delta", "doubts", "is_begun", "is_read_whole", "must_be_offered"),
        *("opened_by", "outer", "repeated", "text"),
    )

    def __init__(self, block: CallBlock, tools: ToolSet, *, must_be_offered: bool) -> None:
        self.block = block
        self.text = TextBuffer(block.opener if block.is_text else "")
        self.must_be_offered = must_be_offered  # only the name of an offered tool makes it a call
        self.arguments = JsonArguments()  # used once they have begun, if they are JSON
        self.delta: Callable[[str], Event] | None = None  # of the arguments
        self.doubts = 0  # markers so far that may be part of a value
        self.repeated = ""  # the call before it, which has lost its closer, as long as this one is the same
        self._same = self.text.length  # characters of it that are
        self.outer = ""  # a tool whose name was a whole call before it, or the beginning of this one
        self.opened_by = ""  # what was written before the text of a call that is begun
        self.is_begun = False  # a call of this text was put out, though it may go on
        self.is_read_whole = False  # no part of it is put out before its end
        self._stream: CallReader | None = None
        self._tools = tools
        self._doubted: _Doubted | None = None
        self._span = block.span() if block.span is not None else None
        self._lone = LoneSpan() if block.is_alone else None
        self._has_begun = False  # there is more than blanks in the text
        self._decoded: tuple[str, Sequence[DecodedCall]] = ("", ())

    def first_wrong(self, text: str) -> int | None:
        """Return where in the next piece the call stops being one; None: nowhere.

        By what a call may begin with, and one without an opener by its name.
        """
        block, begun = self.block, self.text.length
        head, longest = block.head or block.syntax.head, block.syntax.head_length
        if head is not None and begun < longest and not block.is_text:
            wrong = first_wrong(head, (str(self.text) + text)[:longest])
            if wrong is not None:
                return wrong - begun
        wrong = self._lone.first_wrong(text) if self._lone is not None else None
        if wrong is None and self.must_be_offered and not block.opener and begun < MAX_BEGINNING:
            named = block.syntax.first_name((str(self.text) + text)[:MAX_BEGINNING])
            if named is not None and self.accepted(named[0]) is None:
                return named[1] - begun
        return wrong

    def end(self, text: str) -> int:
        """Return where in the last piece a call without a closer ends, -1 if it does not."""
        if self._span is None:
            return -1
        if not self._has_begun:
            first = text.lstrip(BLANKS)[:1]
            self._has_begun = bool(first)
            if first and first not in ("{", "["):  # it has another shape, and no end but the turn's
                self._span = None
                return -1
        return self._span.end(text)

    @property
    def is_in_object(self) -> bool:
        """Whether the call ends with a bracket that is open around its arguments."""
        return self._span is not None and self._span.is_open

    def is_blank(self) -> bool:
        """Whether nothing but a few blanks was written."""
        return self.text.length <= _MAX_GAP and not str(self.text).strip()

    def bare_name(self) -> str:
        """Return the tool that is called, if the text is no more than its name."""
        named = _BARE_NAME.fullmatch(str(self.text)) if self.text.length <= _MAX_NAME else None
        calls = self.accepted_calls(named[1]) if named else []
        return calls[0][0] if named and [each.name for _, each in calls] == [named[1]] else ""

    def is_open(self) -> bool:
        """Whether the text so far ends within a value."""
        return self.block.syntax.is_open(str(self.text))

    def may_repeat(self, text: str) -> bool:
        """Whether the call may still be the one before it, with this piece of it. Then it is held."""
        if self.repeated:
            text = text if self._same else text.lstrip()
            same = self.repeated[self._same : self._same + len(text)]
            self._same += len(same)
            if not text.startswith(same) or text[len(same) :].strip():
                self.repeated = ""
        return bool(self.repeated)

    def repeats(self) -> bool:
        """Whether the call is the one before it, word for word."""
        return bool(self.repeated) and self._same == len(self.repeated)

    # calls in other notations than JSON, while they are written

    def read(self, text: str) -> list[CallPiece]:
        """Return what is to be put out now that this piece was added to the text."""
        if self.is_read_whole or self._doubted is not None:
            return []
        if self._stream is None:
            text = str(self.text)
            self._stream = self.block.syntax.stream(text, self._tools)
            if self._stream is None:
                self.is_read_whole = len(text) > MAX_UNDECIDED
                return []
        return self._stream.feed(text)

    @property
    def is_in_pieces(self) -> bool:
        """Whether it is known to be in another notation than JSON, and read while it is written."""
        return self._stream is not None

    @property
    def is_only_read(self) -> bool:
        """Whether a piece of the call is nothing but read: all else about it is settled, or for its closer to say."""
        if self._stream is None or self._span is not None or self._lone is not None or self.repeated:
            return False
        is_named = bool(self.block.opener) or not self.must_be_offered
        return is_named and self.text.length >= self.block.syntax.head_length

    @property
    def begun_name(self) -> str:
        """The name of the call that has begun, if it is known and none was put out."""
        return "" if self._stream is None or self.is_begun or self.is_read_whole else self._stream.name

    def finish(self) -> list[CallPiece]:
        """Return what is still to be put out at the end of the text."""
        if self._stream is None:
            return []
        after = "" if self._doubted is None else str(self.text)[self._doubted.start :]
        return [*self._stream.feed(after), *self._stream.finish()]

    def plain_delta(self) -> Callable[[str], Event] | None:
        """Return what makes an event of the next piece, if it needs no reading (see `special`)."""
        make, stream, append = self.delta, self._stream, self.text.append
        if make is None or stream is None or stream.text or not stream.is_plain or self._doubted is not None:
            return None
        if self._span is not None and not self._span.in_string:  # it has to see where its brackets are
            return None

        def delta(text: str) -> Event:
            append(text)
            return make(text)

        return delta

    @property
    def special(self) -> str:
        """Characters of which a piece without any needs no reading."""
        return "" if self._stream is None else self._stream.special

    # what it calls

    def accepted(self, name: str) -> str | None:
        """Return the tool that is called; None if it has to be offered and is not."""
        found = self._tools.offered_name(name)
        if self.must_be_offered and self._tools.are_known and found not in self._tools.names:
            return None
        return found or None

    def accepted_calls(self, text: str) -> list[tuple[str, DecodedCall]]:
        """Return the calls of a text with the names of their tools: all of them, or none."""
        calls: list[tuple[str, DecodedCall]] = []
        for call in self._decode(text):
            name = self.accepted(call.name)
            if name is None:
                return []
            calls.append((name, call))
        return calls

    def may_end_without_closer(self) -> bool:
        """Whether the text is a call as it is: what looks like the next one's opener may be that."""
        self.doubts += 1
        if self.doubts > MAX_DOUBTS:
            return False
        text = str(self.text)
        return bool(text.strip() and self.block.syntax.is_whole(text) and self._decode(text))

    def _decode(self, text: str) -> Sequence[DecodedCall]:
        """Return the calls of a text. The last one's are kept: what another call follows is looked at twice."""
        if self._decoded[0] is not text:
            self._decoded = text, self.block.syntax.decode(text, self._tools)
        return self._decoded[1]

    # doubted closers

    @property
    def has_doubted(self) -> bool:
        """Whether a closer was doubted."""
        return self._doubted is not None

    def doubts_closer(self, length: int, *, ends_section: bool) -> bool:
        """Whether a closer of this length, which comes next, may be part of a value. It is noted."""
        if self.doubts >= MAX_DOUBTS:
            return False
        self.doubts += 1
        if not self.is_open():
            return False
        start = self.text.length
        if self._doubted is None:
            self._doubted = _Doubted(start, start + length, ends_section)
        elif self.ends_with_doubted():
            self._doubted.end, self._doubted.ends_section = start + length, ends_section
        return True

    def ends_with_doubted(self) -> bool:
        """Whether nothing stands after a doubted closer."""
        doubted = self._doubted
        if doubted is None or doubted.is_followed:
            return False
        doubted.is_followed = _VISIBLE.search(str(self.text), doubted.end) is not None
        return not doubted.is_followed

    def cut_at_doubted(self) -> tuple[str, bool, str]:
        """End the text before the doubted closer. Return that closer, whether it ends the section, and what follows."""
        assert self._doubted is not None
        text, doubted = str(self.text), self._doubted
        self.text, self._doubted = TextBuffer(text[: doubted.start]), None
        return text[doubted.start : doubted.end], doubted.ends_section, text[doubted.end :]


@dataclass(slots=True)
class _Doubted:
    """Closers in an open value, with nothing but blanks between them: where they begin and end in the text."""

    start: int
    end: int
    ends_section: bool
    is_followed: bool = False
    """There is more than blanks after them."""


class TextBuffer:
    """Text that comes in pieces, and is looked at as a whole now and then: each look copies it once at most."""

    __slots__ = ("_pieces", "length")

    def __init__(self, text: str = "") -> None:
        self._pieces = [text] if text else []
        self.length = len(text)  # in characters

    def append(self, text: str) -> None:
        """Add a piece."""
        self._pieces.append(text)
        self.length += len(text)

    def drop_end(self, length: int) -> None:
        """Take characters off the end."""
        if length:
            whole = str(self)
            self._pieces = [whole[:-length]]
            self.length = len(self._pieces[0])

    def __str__(self) -> str:
        """Return the text. It is the same object until a piece is added."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]
