"""Reads the calls in a turn of blocks: the states SECTION and CALL of `block_reader`, which says more.

A closer in an open value may be part of the value, and the next one the call's; where the value is never closed, the
call ends at the first after all. What a call needs to be read is kept as it was written (`_written`, `_body`) until a
call has come of it, and shown if none has. Knows nothing of answers, and of reasoning only that a call may begin in it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_format import CallBlock, CallsInReasoning
from mlx_backend.conversation.dialects.block_states import State
from mlx_backend.conversation.dialects.call_arguments import (
    MAX_BEGINNING,
    MAX_DOUBTS,
    ArgumentReader,
    DoubtedCloser,
)
from mlx_backend.conversation.dialects.calls.base import JsonSpan, first_wrong
from mlx_backend.conversation.dialects.text_buffer import TextBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_backend.conversation.dialects.block_format import CallSection
    from mlx_backend.conversation.dialects.calls.base import DecodedCall
    from mlx_backend.conversation.events import EndedBy

_BLANKS = " \t\r\n\v\f"
_VISIBLE = re.compile(r"\S")
_MAX_GAP = 16  # blanks between two openers of one call


class CallReader(ArgumentReader):
    """The part of a reader of blocks that reads calls."""

    __slots__ = ()

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

    # a call

    def _begin_call(self, block: CallBlock) -> None:
        self._block = block
        self._must_be_offered = self._in_reasoning or (
            self._section is None and (block.is_text or not block.opener)
        )
        self._body = TextBuffer(block.opener if block.is_text else "")
        self._doubts, self._doubted, self._has_begun = 0, None, False
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
        if self._must_be_offered and not block.opener and before < MAX_BEGINNING:
            written = str(self._body)
            named = block.syntax.first_name(written[:MAX_BEGINNING])
            if named is not None and self._accepted(named[0]) is None:
                self._body = TextBuffer(written[: named[1]])
                self._give_up()
                return written[named[1] :]
        if before < MAX_BEGINNING:
            written = str(self._body)
            if call := block.syntax.begin(written[:MAX_BEGINNING]):
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

    def _mark_call(self, marker: str) -> bool:
        """Take a marker within a call. Return whether it means something there."""
        section, block = self._section, self._block
        assert block is not None
        ends_section = section is not None and marker in section.closers
        if marker in block.closers or ends_section:
            if self._is_part_of_value():
                self._doubt(ends_section=ends_section)
                return False
            self._end_call(marker)
            if ends_section and self._state is State.SECTION:
                self._mark_section(marker)
            return True
        if marker in self._openers:
            is_call = self._state is State.CALL and marker in self._blocks and self._body.length <= _MAX_GAP
            if is_call and not (body := str(self._body)).strip():  # written twice
                self._written.append(body)
                self._begin_call(self._blocks[marker])
                return True
            if self._state is State.CALL and self._has_doubted_end():
                self._end_at_doubt()
            elif not self._may_be_next_call():
                return False
            else:
                self._end_call("")
            self.marker(marker)
            return True
        self._give_up()  # the reasoning in which it began has gone on, and ends here
        self.marker(marker)
        return True

    def _is_part_of_value(self) -> bool:
        if self._doubts >= MAX_DOUBTS:
            return False
        self._doubts += 1
        return self._is_open()

    def _is_open(self) -> bool:
        """Whether a call's text, so far, ends within a value."""
        assert self._block is not None
        return self._state is State.CALL and self._block.syntax.is_open(str(self._body))

    def _doubt(self, *, ends_section: bool) -> None:
        """Note a closer in an open value: the call ends there if the value is never closed."""
        start = self._body.length
        end = start + len(self._spelling)
        if self._doubted is None:
            self._doubted = DoubtedCloser(start, end, ends_section)
        elif self._has_doubted_end():
            self._doubted.end, self._doubted.ends_section = end, ends_section

    def _has_doubted_end(self) -> bool:
        """Whether nothing stands behind a closer in an open value."""
        doubted = self._doubted
        if doubted is None or doubted.is_followed:
            return False
        doubted.is_followed = _VISIBLE.search(str(self._body), doubted.end) is not None
        return not doubted.is_followed

    def _end_at_doubt(self) -> str:
        """End the call at a closer in a value that was never closed. Return what follows it."""
        assert self._doubted is not None
        body, doubted = str(self._body), self._doubted
        self._body, self._doubted = TextBuffer(body[: doubted.start]), None
        self._end_call(body[doubted.start : doubted.end])
        if doubted.ends_section and self._section is not None and self._state is State.SECTION:
            self._mark_section(self._section.closer)
        return body[doubted.end :]

    def _may_be_next_call(self) -> bool:
        """See whether an opener within a call begins another one, because the first has lost its closer."""
        assert self._block is not None
        if self._state is State.ARGUMENTS:
            return not self._block.closers and not (isinstance(self._span, JsonSpan) and self._span.in_string)
        if self._state is State.REST:
            return True
        self._doubts += 1
        if self._doubts > MAX_DOUBTS:
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
        elif self._state is State.STRING:
            self._close_behind(self._end_doubt(is_part=ended_by != "stop"), ended_by)
        elif self._is_open():
            if self._doubted is not None and (ended_by == "stop" or self._has_doubted_end()):
                self._close_behind(self._end_at_doubt(), ended_by)
            elif ended_by == "stop":
                self._give_up()  # it ends within a value: what is there may not be all of it
            else:
                self._close_cut_call()
        elif ended_by == "stop":
            self._end_call("")
        else:
            self._close_cut_call()

    def _close_behind(self, rest: str, ended_by: EndedBy) -> None:
        """Read what stands behind a call that ended at a doubted closer, and close."""
        while rest:
            rest = self.text(rest) or ""
        self.close(ended_by)

    def _close_cut_call(self) -> None:
        if self._state is not State.CALL:
            self._close_call(complete=False)
        elif calls := self._decoded(str(self._body)):
            self._put_out(calls, is_cut=True)
        elif self._block is not None and self._section is None and not self._block.opener:
            self._give_up()
