"""Reads a turn of blocks by the table of its family (`BlockFormat`): reasoning, answer, calls.

Theory of operation
-------------------
    <think>
    REASONING
    </think>

    ANSWER <tool_call>CALL</tool_call> …

The reader is in one state:

    OPENING    nothing but white space so far, or since a block: reasoning, a call or the answer may begin
    REASONING  until the marker that closes the block; a turn begins here if the prompt has opened the block
    ANSWER     text is put out at once; a marker begins a call
    SECTION    between the markers around calls: before, between or behind them
    CALL       text is gathered until the call is closed, and decoded by its syntax (`calls/`)
    ARGUMENTS  of a call whose name is known, and whose arguments are JSON: they are put out as they come
    STRING     from a marker in a string of such arguments that would end them, until it is known whether it does
    REST       what stands between such arguments and the call's closer

A marker that means nothing in a state is text there: only the prompt knows whether what stands before a lone
`</think>` was reasoning (`opens_in`). Line breaks at the edges of a block, and before a call, are layout and not part
of any text.

Nothing is lost: a call that cannot be decoded is shown as it was written. Behind an opener, text that cannot begin a
call is let go at its first wrong character. A call within reasoning (models forget the closer) ends it, if it calls an
offered tool; else it is reasoning. The last five states are in `call_reader` and `call_arguments`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_states import IN_CALL, State
from mlx_backend.conversation.dialects.call_reader import CallReader
from mlx_backend.conversation.dialects.end_markers import END_MARKERS
from mlx_backend.conversation.events import Channel, ContentDelta, ReasoningDelta
from mlx_backend.conversation.scanner import CONTROL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlx_backend.conversation.dialects.block_format import BlockFormat, CallBlock
    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

_BRACKET = re.compile(r"[{\[]")
_FENCE = "```"
_LAYOUT = "\r\n"
_MAX_LAYOUT = 16  # white space that is held, at the end of reasoning or before the first text


class BlockReader(CallReader):
    """Reads one turn of a model that writes blocks."""

    __slots__ = ("_bare_anywhere", "_closers", "_drops_breaks", "_in_code")

    def __init__(
        self,
        *,
        form: BlockFormat,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(form, tools, special_tokens)
        self._closers: frozenset[str] = frozenset()  # of the block that is open
        self._in_code = False  # the answer is in a fenced block of code
        self._bare_anywhere = {  # by the character that they begin with
            first: each
            for each in form.blocks
            for first in "{["
            if each.is_anywhere and each.head and each.head.fullmatch(first) and tools.may_be_called
        }
        self._drops_breaks = False  # line breaks at the end of the answer are layout
        match opens_in:
            case Channel.ANALYSIS if form.reasoning:
                self._enter_reasoning([*form.reasoning.values(), *form.reasoning])
            case None | Channel.ANALYSIS:
                self._enter_opening()
            case _:
                self._enter_answer()

    # states

    def _enter_opening(self) -> None:
        self.delta = None
        form = self._format
        closers = [closer for each in form.sections for closer in each.closers] if self._lost_opener else []
        self._expect(
            State.OPENING,
            [
                *(*form.reasoning, *form.reasoning.values(), *self._openers),
                *(*self._answer_markers(), *closers, *([_FENCE] if self._bare_anywhere else ())),
            ],
        )

    def _enter_reasoning(self, markers: Iterable[str]) -> None:
        self._trims_layout = True
        self.delta = None  # until there is more than layout
        markers = [*markers]
        self._closers = frozenset(self._format.reasoning.values()).intersection(markers)
        by_token = [opener for opener, each in self._blocks.items() if not each.is_text]
        answers = [each.opener for each in self._format.answers if each.opener]
        self._expect(State.REASONING, [*markers, *self._sections, *by_token, *answers], watched=_LAYOUT)

    def _resume_reasoning(self, text: str) -> None:
        self._enter_reasoning(self._closers)
        self._trims_layout = False
        self._reason(text)

    def _enter_answer(self) -> None:
        form = self._format
        more = [*form.reasoning] if form.is_anywhere else []
        if self._was_cut_short:
            more += form.reasoning.values()
        more += [_FENCE] if self._bare_anywhere else []
        watched = "" if self._in_code else "".join(self._bare_anywhere)
        watched += _LAYOUT if self._holds_breaks else ""
        self._expect(State.ANSWER, [*self._openers, *self._answer_markers(), *more], watched=watched)
        self._open(Channel.FINAL)

    @property
    def _holds_breaks(self) -> bool:
        """Whether a marker may follow that makes line breaks in the answer layout."""
        return self._drops_breaks or bool(self._openers) or bool(self._bare_anywhere)

    def _answer_markers(self) -> list[str]:
        return [marker for each in self._format.answers for marker in (each.opener, each.closer) if marker]

    @property
    def is_reasoning(self) -> bool:
        """Whether a block is open."""
        return self._state is State.REASONING

    @property
    def is_answering(self) -> bool:
        """Whether the answer or a call has begun: a block can no longer be opened."""
        return self._state not in (State.OPENING, State.REASONING) and not self._in_reasoning

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """Close the block on a line of its own. If the prompt has opened it, its last opener tells which it is."""
        reasoning = self._format.reasoning
        if not reasoning:
            return ()
        if len(self._closers) == 1:
            [closer] = self._closers
        else:
            opener = max(reasoning, key=prompt_tail.rfind)
            known = opener in prompt_tail
            by_token = {*reasoning.values()} & self._control
            closer = reasoning[opener] if known else min(by_token, default=next(iter(reasoning.values())))
        aliases = [alias for alias, marker in self._aliases.items() if marker == closer]
        return "\n", next((alias for alias in aliases if alias in self._control), closer), "\n\n"

    # text

    def text(self, text: str) -> str:
        """Put text out, less the layout around blocks; gather a call's. Return what is to be looked at afresh."""
        if self.fragments and CONTROL in text:
            text = self._without_control_marks(text)
            if not text:
                return ""
        match self._state:
            case State.REASONING:
                self._reason(text)
            case State.OPENING:
                return self._gather_opening(text)
            case State.ANSWER:
                return self._answer(text)
            case State.SECTION:
                return self._gather_section(text)
            case State.CALL:
                return self._gather(text)
            case State.ARGUMENTS:
                return self._stream(text)
            case State.STRING:
                return self._gather_string(text)
            case State.REST:
                return self._gather_rest(text)
        return ""

    def _without_control_marks(self, text: str) -> str:
        """In a call its control tokens are part of the text; elsewhere they mean nothing."""
        if self._state not in IN_CALL:
            for fragment in self.fragments:
                text = text.replace(CONTROL + fragment, "")
        return text.replace(CONTROL, "")

    def _gather_opening(self, text: str) -> str:
        if (
            self._trims_layout and not self._layout
        ):  # behind a block: its layout goes, other white space stays
            text = text.lstrip(_LAYOUT)
        blanks = self._blanks(text)
        bare = self._bare_call(text[blanks : blanks + 1])
        if bare is not None and len(self._layout) + blanks <= _MAX_LAYOUT:
            self._written = [self._layout + text[:blanks]]
            self._layout = ""
            self._begin_call(bare)
            return text[blanks:]
        self._layout += text
        if blanks < len(text) or len(self._layout) > _MAX_LAYOUT:
            text, self._layout = self._layout, ""
            self._trims_layout = False
            self._enter_answer()
            return text
        return ""

    def _bare_call(self, first: str) -> CallBlock | None:
        """Return the call without an opener that begins with this character, if one does."""
        if first and self._tools.may_be_called:
            for block in self._format.blocks:
                if not block.opener and block.head is not None and block.head.fullmatch(first):
                    return block
        return None

    def _reason(self, text: str) -> None:
        if self._trims_layout:
            text = text.lstrip(_LAYOUT)
            if not text:
                return
            self._trims_layout = False
            self._expect(State.REASONING, self._expected.difference(self._format.reasoning), watched=_LAYOUT)
        self._put_out_but_breaks(text, ReasoningDelta)

    def _put_out_but_breaks(self, text: str, event: type[ReasoningDelta] | type[ContentDelta]) -> None:
        """Put text out; hold the line breaks at its end, which are layout if a marker follows."""
        text = self._layout + text
        visible = text[: max(len(text.rstrip(_LAYOUT)), len(text) - _MAX_LAYOUT)]
        self._layout = text[len(visible) :]
        self.delta = None if self._layout else event
        if visible:
            self.events.append(event(visible))

    def _answer(self, text: str) -> str:
        """Put out text up to where a call without an opener may begin; return the rest."""
        if self._bare_anywhere and not self._in_code:
            for bracket in _BRACKET.finditer(text):
                at, block = bracket.start(), self._bare_anywhere.get(bracket[0])
                if block and block.head and block.head.fullmatch(text, at, at + block.syntax.head_length):
                    if at:
                        self._put_out_answer(text[:at])
                    self._written, self._layout = [self._layout], ""
                    self._begin_call(block)
                    return text[at:]
        self._put_out_answer(text)
        return ""

    def _put_out_answer(self, text: str) -> None:
        if self._trims_layout:
            text = text.lstrip(_LAYOUT)
            self._trims_layout = not text
            if not self._trims_layout:
                self._open(Channel.FINAL)
        if self._holds_breaks and text:
            self._put_out_but_breaks(text, ContentDelta)
        else:
            self._emit(text)

    # markers

    def marker(self, marker: str) -> None:
        """Open or close a block. What does neither here is text; other control tokens are dropped."""
        self._spelling = written = marker.replace(CONTROL, "")
        marker = self._aliases.get(written, written)
        is_end = marker in END_MARKERS or marker in self._format.ends
        may_be_quoted = written not in self._control if is_end else marker not in self._openers
        if may_be_quoted and self._doubts_closer(written):
            return
        if marker in self._expected and self._mark(marker):
            return
        if is_end:
            self.close("stop")
            self.ended = True
        elif marker in self._format.markers or self._state in IN_CALL:
            while written:
                written = self.text(written)

    def _mark(self, marker: str) -> bool:
        """Take a marker that is looked for in this state. Return whether it means something after all."""
        form = self._format
        if self._state is State.SECTION:
            self._mark_section(marker)
        elif self._state in IN_CALL:
            return self._mark_call(marker)
        elif marker in form.reasoning:
            self._layout = ""
            self._enter_reasoning({marker, form.reasoning[marker]})
        elif marker in form.reasoning.values():
            self._was_cut_short = False
            if self._state is State.ANSWER:
                self._enter_answer()
            else:
                self._leave_block()
        elif marker in self._openers:
            self._open_calls(marker)
        elif marker == _FENCE:
            self._in_code = not self._in_code
            self._enter_answer()
            self._put_out_answer(marker)
        elif block := next((each for each in form.answers if each.opener == marker), None):
            self._layout = ""
            self._drops_breaks = block.has_layout
            self._enter_answer()
            self._trims_layout = True
            self.delta = None
        else:  # the closer of an answer or of a section
            self._leave_block()
        return True

    def _leave_block(self) -> None:
        self._layout = ""
        self._drops_breaks = False
        self._trims_layout = True
        self._enter_opening()

    # the end

    def close(self, ended_by: EndedBy) -> None:
        """Handle the end: an open block is closed, a cut call is not complete."""
        if self._state is State.SECTION or self._state in IN_CALL:
            self._close_calls(ended_by)
        elif self._state is State.OPENING and self._layout and not self._trims_layout:
            self._enter_answer()
            self._emit(self._layout)
        elif self._state is State.ANSWER and self._layout and not self._drops_breaks:
            self.events.append(ContentDelta(self._layout))
        self._layout = ""
        self.delta = None
