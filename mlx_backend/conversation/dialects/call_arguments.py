"""Puts out JSON arguments while they are written: the states ARGUMENTS, REST and STRING of `block_reader`.

A closer within a string of the arguments is part of it, unless the string is broken: what is written behind the
string's end tells. Until then nothing is put out (STRING).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_states import MarkerReader, State
from mlx_backend.conversation.dialects.calls.base import JsonSpan, StringSpan
from mlx_backend.conversation.dialects.calls.json_object import is_end_of_object
from mlx_backend.conversation.dialects.text_buffer import TextBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.conversation.dialects.block_format import BlockFormat, CallBlock, CallSection
    from mlx_backend.conversation.dialects.calls.base import DecodedCall, Span
    from mlx_backend.conversation.events import Event
    from mlx_backend.conversation.tools import ToolSet

MAX_BEGINNING = 2048  # characters of a call in which its arguments have to begin to be put out as they come
MAX_DOUBTS = 64  # markers in one call that may be part of a value


@dataclass(slots=True)
class DoubtedCloser:
    """Closers in an open value, with nothing but blanks between them: where they begin and end in the body."""

    start: int
    end: int
    ends_section: bool
    is_followed: bool = False
    """There is more than blanks behind them."""


class ArgumentReader(MarkerReader):
    """The state of a reader of calls, and the part of it that reads arguments that are JSON."""

    __slots__ = (
        *("_block", "_blocks", "_body", "_call_delta", "_doubted", "_doubts", "_has_begun", "_has_calls"),
        *("_in_reasoning", "_last_decoded", "_layout", "_lost_opener", "_must_be_offered", "_openers"),
        *(
            "_section",
            "_sections",
            "_span",
            "_spelling",
            "_string",
            "_trims_layout",
            "_was_cut_short",
            "_written",
        ),
    )

    def __init__(self, form: BlockFormat, tools: ToolSet, special_tokens: Mapping[int, str] | None) -> None:
        super().__init__(form, tools, special_tokens)
        has_calls = tools.may_be_called
        self._sections = (
            {opener: each for each in form.sections for opener in each.openers} if has_calls else {}
        )
        self._blocks = {each.opener: each for each in form.blocks if each.opener} if has_calls else {}
        self._openers: tuple[str, ...] = (*self._sections, *self._blocks)
        self._section: CallSection | None = None
        self._has_calls = False  # in this section, or just before this place
        self._block: CallBlock | None = None
        self._body = TextBuffer()  # of a call
        self._has_begun = False  # there is more than blanks in the body
        self._written: list[str] = []  # what is shown, with the body, if no call comes of it
        self._in_reasoning = False  # the call being read began in a block of reasoning
        self._must_be_offered = False  # there, and without a marker, only an offered tool's name makes a call
        self._was_cut_short = False  # reasoning ended without its closer, which may still come
        self._lost_opener = False  # the last call stood outside of a section, whose closer may still come
        self._doubts = 0  # markers so far that may be part of a value
        self._doubted: DoubtedCloser | None = None  # in a value that is open
        self._spelling = ""  # of the marker that is being taken
        self._string = StringSpan()  # from a doubted closer in a string of JSON
        self._last_decoded: tuple[str, Sequence[DecodedCall]] | None = None
        self._span: Span | None = None
        self._call_delta: Callable[[str], Event] | None = None
        self._layout = ""  # white space that is dropped if a marker follows
        self._trims_layout = False  # the next line breaks are layout

    # what the rest of the reader does

    def marker(self, marker: str) -> None:
        """Take a marker."""
        raise NotImplementedError

    def _accepted(self, name: str) -> str | None:
        raise NotImplementedError

    def _commit(self) -> None:
        raise NotImplementedError

    def _after_call(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> None:
        raise NotImplementedError

    def _decoded(self, body: str) -> list[tuple[str, DecodedCall]]:
        raise NotImplementedError

    def _put_out(self, calls: Sequence[tuple[str, DecodedCall]], *, is_cut: bool = False) -> None:
        raise NotImplementedError

    # arguments

    def _begin_arguments(self, name: str, own_id: str, text: str) -> str:
        found = self._accepted(name)
        if found is None:
            self._give_up()
            return ""
        self._commit()
        self._open_call(found, own_id)
        self._enter_arguments()
        return text

    def _enter_arguments(self) -> None:
        """Put out what comes, until it is a whole JSON value."""
        self._call_delta = self.delta
        self._span = JsonSpan()
        self._expect_arguments()

    def _expect_arguments(self) -> None:
        section = self._section.closers if self._section is not None else ()
        closers = self._block.closers if self._block is not None else ()
        self._expect(State.ARGUMENTS, {*closers, *section, *self._openers}, watched=JsonSpan.SPECIAL)

    def _stream(self, text: str) -> str:
        span = self._span
        assert isinstance(span, JsonSpan)
        assert self._block is not None
        self.delta = self._call_delta
        end = span.end(text)
        if end < 0:
            self._emit(text)
            if span.is_escaped:
                self.delta = None  # the next character has to be seen
            return ""
        self._emit(text[:end])
        self.delta = None
        if self._block.closers:
            self._body = TextBuffer()
            self._expect(State.REST, self._expected)
        else:
            self._close_call(complete=True)
            self._after_call()
        return text[end:]

    def _gather_rest(self, text: str) -> str:
        """Gather what follows JSON arguments: the rest of their object, or of a list with more calls."""
        assert self._block is not None
        before = self._body.length
        self._body.append(text)
        if before < MAX_BEGINNING:
            written = str(self._body)
            call = self._block.syntax.begin(written[:MAX_BEGINNING])
            if call is not None:
                self._close_call(complete=True)
                self._open_call(self._tools.offered_name(call.name), call.id)
                self._enter_arguments()
                return written[call.arguments_at :]
        return ""

    def _end_arguments(self) -> None:
        """Close a call whose arguments were put out already. More calls may stand behind them, in a list."""
        rest = "" if self._state is State.ARGUMENTS else str(self._body)
        self._close_call(complete=True)
        if is_end_of_object(rest):
            rest = ""
        elif calls := self._decoded(rest):
            self._put_out(calls)
            rest = ""
        if not rest.strip():
            self._after_call()
            return
        self._body = TextBuffer(rest.strip())
        self._give_up()

    # a closer in a string

    def _doubts_closer(self, written: str) -> bool:
        """Take a marker that ends a call, or a spelt one that ends the turn, if it stands in a string."""
        span = self._span
        if self._state is not State.ARGUMENTS or not isinstance(span, JsonSpan) or not span.in_string:
            return False
        if self._doubts >= MAX_DOUBTS:
            return False
        self._doubts += 1
        self._body, self._string = TextBuffer(written), StringSpan(is_escaped=span.is_escaped)
        self._doubted = DoubtedCloser(0, len(written), ends_section=False)
        self.delta = None
        self._expect(State.STRING, ())
        return True

    def _gather_string(self, text: str) -> str:
        """Gather what follows such a marker, until it is known what it was."""
        end = self._string.end(text)
        if end < 0:
            self._body.append(text)
            return ""
        self._body.append(text[:end])
        return self._end_doubt(is_part=self._string.ends_well) + text[end:]

    def _end_doubt(self, *, is_part: bool) -> str:
        """Put out what was gathered, or take its marker. Return what is to be looked at afresh."""
        assert self._doubted is not None
        text, closer = str(self._body), self._doubted.end
        self._body, self._doubted = TextBuffer(), None
        self._expect_arguments()
        if is_part:
            return self._stream(text)
        self._doubts = MAX_DOUBTS
        self.marker(text[:closer])
        self._read_again(text[closer:])
        return ""

    def _read_again(self, text: str) -> None:
        """Read text that was gathered as part of a string: its markers are some after all, whatever token they were."""
        while text and not self.ended:
            markers = self.markers
            before, marker, after = markers.cut(text)
            rest = self.text(before) if before else ""
            if rest or self.markers is not markers:
                text = (rest or "") + marker + after
            elif marker:
                self.marker(marker)
                text = after
            else:
                text = self.text(after) or ""
