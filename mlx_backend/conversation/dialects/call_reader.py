"""Reads the calls in a turn of blocks: the states SECTION, CALL, ARGUMENTS and REST of `block_reader`, which says more.

What a call needs to be read is kept as it was written (`_written`, `_body`) until a call has come of it, and shown if
none has. Knows nothing of answers, and of reasoning only that a call may begin in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_format import CallBlock, CallsInReasoning
from mlx_backend.conversation.dialects.block_states import MarkerReader, State
from mlx_backend.conversation.dialects.calls.base import JsonSpan, first_wrong
from mlx_backend.conversation.dialects.calls.json_object import is_end_of_object
from mlx_backend.conversation.dialects.text_buffer import TextBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mlx_backend.conversation.dialects.block_format import BlockFormat, CallSection
    from mlx_backend.conversation.dialects.calls.base import DecodedCall, Span
    from mlx_backend.conversation.events import EndedBy, Event
    from mlx_backend.conversation.tools import ToolSet

_BLANKS = " \t\r\n\v\f"
_MAX_BEGINNING = 2048  # characters of a call in which its arguments have to begin to be put out as they come
_MAX_DOUBTS = 64  # markers in one call that may be part of a value


class CallReader(MarkerReader):
    """The part of a reader of blocks that reads calls."""

    __slots__ = (
        *("_block", "_blocks", "_body", "_call_delta", "_doubts", "_has_begun", "_has_calls"),
        *("_in_reasoning", "_last_decoded", "_layout", "_lost_opener", "_must_be_offered", "_openers"),
        *("_section", "_sections", "_span", "_trims_layout", "_was_cut_short", "_written"),
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
        self._doubts = 0
        self._last_decoded: tuple[str, Sequence[DecodedCall]] | None = None
        self._span: Span | None = None
        self._call_delta: Callable[[str], Event] | None = None
        self._layout = ""  # white space that is dropped if a marker follows
        self._trims_layout = False  # the next line breaks are layout

    # what the rest of the reader does

    def _enter_opening(self) -> None:
        raise NotImplementedError

    def _enter_answer(self) -> None:
        raise NotImplementedError

    def _enter_reasoning(self, markers: Iterable[str]) -> None:
        raise NotImplementedError

    def _resume_reasoning(self, text: str) -> None:
        """Go on with the reasoning in which what looked like a call began, with this text."""
        raise NotImplementedError

    @property
    def _reasoning_closers(self) -> Iterable[str]:
        return self._format.reasoning.values() if self._in_reasoning else ()

    def _blanks(self, text: str) -> int:
        """Return how many characters at the beginning of a text mean nothing between calls."""
        separators = self._format.separators if self._has_calls else ""
        return len(text) - len(text.lstrip(_BLANKS + separators))

    # sections

    def _open_calls(self, marker: str) -> None:
        """Open a section, or a call outside of one."""
        self._in_reasoning = self._state is State.REASONING
        self._written = [] if self._state is State.OPENING else [self._layout]
        self._layout = ""
        if (section := self._sections.get(marker)) is not None:
            self._written.append(marker)
            self._has_calls = False
            self._enter_section(section)
        else:
            self._begin_call(self._blocks[marker])

    def _enter_section(self, section: CallSection) -> None:
        self._section = section
        self.delta = None
        self._expect(State.SECTION, [*self._openers, *section.closers, *self._reasoning_closers])

    def _gather_section(self, text: str) -> str:
        """Find the beginning of a call that has no opener of its own."""
        assert self._section is not None
        blanks = self._blanks(text)
        if not self._has_calls:
            self._written.append(text[:blanks])
        if blanks == len(text):
            return ""
        if self._section.syntax is not None:
            self._begin_call(CallBlock(closers=self._section.closers, syntax=self._section.syntax))
        else:
            self._give_up()
        return text[blanks:]

    def _mark_section(self, marker: str) -> None:
        """Take a marker between calls."""
        assert self._section is not None
        if marker in self._section.closers:
            if self._has_calls:
                self._section = None
                self._after_call()
            else:
                self._written.append(marker)
                self._give_up()
        elif marker in self._blocks:
            self._begin_call(self._blocks[marker])
        elif marker in self._sections:  # written twice
            if not self._has_calls:
                self._written.append(marker)
            self._enter_section(self._sections[marker])
        else:
            self._give_up()
            self.marker(marker)

    def marker(self, marker: str) -> None:
        """Take a marker."""
        raise NotImplementedError

    # a call

    def _begin_call(self, block: CallBlock) -> None:
        self._block = block
        self._must_be_offered = self._in_reasoning or (
            self._section is None and (block.is_text or not block.opener)
        )
        self._body = TextBuffer(block.opener if block.is_text else "")
        self._doubts, self._has_begun = 0, False
        self._span = block.span() if block.span is not None else None
        if block.opener and not block.is_text:
            self._written.append(block.opener)
        self.delta = None
        section = self._section.closers if self._section is not None else ()
        self._expect(State.CALL, [*block.closers, *section, *self._openers, *self._reasoning_closers])

    def _gather(self, text: str) -> str:
        """Gather a call's text, until it is known to be none, or until its arguments begin."""
        block = self._block
        assert block is not None
        head, longest = block.head or block.syntax.head, block.syntax.head_length
        if head is not None and self._body.length < longest and not block.is_text:
            written = str(self._body)
            wrong = first_wrong(head, (written + text)[:longest])
            if wrong is not None:
                wrong -= len(written)
                self._body.append(text[:wrong])
                self._give_up()
                return text[wrong:]
        before = self._body.length
        self._body.append(text)
        if before < _MAX_BEGINNING:
            written = str(self._body)
            if call := block.syntax.begin(written[:_MAX_BEGINNING]):
                return self._begin_arguments(call.name, call.id, written[call.arguments_at :])
        if self._span is None:
            return ""
        if not self._has_begun:
            first = text.lstrip(_BLANKS)[:1]
            self._has_begun = bool(first)
            if first and first not in ("{", "["):  # it has another shape, and no end but the turn's
                self._span = None
                return ""
        end = self._span.end(text)
        if end < 0:
            return ""
        self._body.drop_end(len(text) - end)
        self._end_call("")
        return text[end:]

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
        if before < _MAX_BEGINNING:
            written = str(self._body)
            call = self._block.syntax.begin(written[:_MAX_BEGINNING])
            if call is not None:
                self._close_call(complete=True)
                self._open_call(self._tools.offered_name(call.name), call.id)
                self._enter_arguments()
                return written[call.arguments_at :]
        return ""

    def _mark_call(self, marker: str) -> bool:
        """Take a marker within a call. Return whether it means something there."""
        section, block = self._section, self._block
        assert block is not None
        ends_section = section is not None and marker in section.closers
        if marker in block.closers or ends_section:
            if not ends_section and self._is_part_of_value():
                return False
            self._end_call(marker)
            if ends_section and self._state is State.SECTION:
                self._mark_section(marker)
            return True
        if marker in self._openers:
            if not self._may_be_next_call():
                return False
            self._end_call("")
            self.marker(marker)
            return True
        self._give_up()  # the reasoning in which it began has gone on, and ends here
        self.marker(marker)
        return True

    def _is_part_of_value(self) -> bool:
        assert self._block is not None
        if self._state is not State.CALL or self._doubts >= _MAX_DOUBTS:
            return False
        self._doubts += 1
        return self._block.syntax.is_open(str(self._body))

    def _may_be_next_call(self) -> bool:
        """See whether an opener within a call begins another one, because the first has lost its closer."""
        assert self._block is not None
        if self._state is State.ARGUMENTS:
            return not self._block.closers and not (isinstance(self._span, JsonSpan) and self._span.in_string)
        if self._state is State.REST:
            return True
        self._doubts += 1
        if self._doubts > _MAX_DOUBTS:
            return False
        body = str(self._body)
        return bool(body.strip() and self._block.syntax.is_whole(body) and self._decode(body))

    def _end_call(self, closer: str) -> None:
        """Put a call out, or show what was written if it cannot be decoded."""
        if self._state is not State.CALL:
            self._end_arguments()
        elif calls := self._decoded(str(self._body)):
            self._commit()
            self._put_out(calls)
            self._after_call()
        else:
            self._body.append(closer)
            self._give_up()

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

    def _decode(self, body: str) -> Sequence[DecodedCall]:
        """Return the calls of a body. The last one's are kept: what another call follows is looked at twice."""
        assert self._block is not None
        if self._last_decoded is None or self._last_decoded[0] is not body:
            self._last_decoded = body, self._block.syntax.decode(body, self._tools)
        return self._last_decoded[1]

    def _decoded(self, body: str) -> list[tuple[str, DecodedCall]]:
        """Return the calls of a body with the names of their tools: all of them, or none."""
        calls: list[tuple[str, DecodedCall]] = []
        for call in self._decode(body):
            name = self._accepted(call.name)
            if name is None:
                return []
            calls.append((name, call))
        return calls

    def _accepted(self, name: str) -> str | None:
        """Return the tool that is called; None if it has to be offered and is not."""
        found = self._tools.offered_name(name)
        if self._must_be_offered and self._tools.are_known and found not in self._tools.names:
            return None
        return found or None

    def _put_out(self, calls: Sequence[tuple[str, DecodedCall]], *, is_cut: bool = False) -> None:
        for at, (name, call) in enumerate(calls):
            self._open_call(name, call.id)
            self._emit(call.arguments)
            self._close_call(complete=not is_cut or at < len(calls) - 1)

    def _commit(self) -> None:
        """Note that there is a call: what was written for it is not shown, and reasoning has ended."""
        self._written = []
        self._has_calls = True
        if self._in_reasoning and self._format.calls_in_reasoning is CallsInReasoning.CLOSE:
            self._in_reasoning = self._must_be_offered = False
            self._was_cut_short = True

    def _after_call(self) -> None:
        if self._block is not None:
            self._lost_opener = self._block.is_text and self._section is None
        self._body = TextBuffer()
        self._block = self._span = self._last_decoded = None
        self._layout = ""
        self._trims_layout = True
        if self._section is not None:
            self._enter_section(self._section)
        elif self._in_reasoning:
            self._in_reasoning = False
            self._enter_reasoning(self._format.reasoning.values())
        else:
            self._enter_opening()

    def _give_up(self) -> None:
        """Show what was written: no call has come of it."""
        text = "".join([*self._written, str(self._body)])
        in_reasoning, self._in_reasoning = self._in_reasoning, False
        self._written, self._body = [], TextBuffer()
        self._block = self._section = self._span = self._last_decoded = None
        self._trims_layout = False
        if in_reasoning:
            self._resume_reasoning(text)
        else:
            self._enter_answer()
            self._emit(text)

    def _close_calls(self, ended_by: EndedBy) -> None:
        """Handle the end of the output in a call or a section. A cut call is not complete."""
        if self._state is State.SECTION:
            if not self._has_calls and ended_by == "stop":
                self._give_up()
        elif ended_by == "stop":
            block = self._block
            if self._state is State.CALL and block is not None and block.syntax.is_open(str(self._body)):
                self._give_up()  # it ends within a value: what is there may not be all of it
            else:
                self._end_call("")
        elif self._state is not State.CALL:
            self._close_call(complete=False)
        elif calls := self._decoded(str(self._body)):
            self._put_out(calls, is_cut=True)
        elif self._block is not None and self._section is None and not self._block.opener:
            self._give_up()
