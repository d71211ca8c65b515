"""Reads a turn of blocks by the table of its family (`BlockFormat`): reasoning, answer, calls.

Theory of operation
-------------------
    <think>
    REASONING
    </think>

    ANSWER <tool_call>CALL</tool_call> …

The reader is in one state, and looks for the markers that mean something there:

    OPENING    nothing but white space so far, or since a block
                 a reasoning block's opener -> REASONING; a call's or a section's -> CALL, SECTION; other text -> ANSWER
                 a closer is dropped
    REASONING  a turn begins here if the prompt has opened the block
                 the block's closer -> OPENING; a call's or a section's opener that is a control token -> CALL, SECTION
    ANSWER     text is put out at once
                 a call's or a section's opener -> CALL, SECTION; the answer's closer -> OPENING
                 a reasoning block's opener -> REASONING; any other closer is dropped -> OPENING
    SECTION    between the markers around calls: before, between or after them
                 a call's opener -> CALL; the section's closer -> OPENING
    CALL       text is gathered, and decoded by its syntax (`calls/`); in other notations than JSON what is known of
               the call is put out as it comes (`calls/stream`)
                 the call's closer, or its last bracket where it has none -> SECTION or OPENING
                 its name is known, and its arguments are JSON and begin -> ARGUMENTS
    ARGUMENTS  are put out as they come (`open_call`)
                 their last bracket -> REST; a marker in a string that would end them -> STRING
    STRING     until it is known whether that marker is part of the string -> ARGUMENTS, or what the marker means
    REST       what stands between the arguments and the call's closer -> SECTION or OPENING
                 the beginning of another call's arguments, in a list -> ARGUMENTS

Models reason again in the middle of an answer, though they were told not to, and close what is not open: a marker out
of place never is part of the answer, and what stands between an opener and a closer is reasoning. What stood before a
lone `</think>` has been put out already, and remains what it was: only the prompt knows whether a block is open
(`opens_in`). An answer that is about markers has them in code or in quotation marks, or in a string of JSON; there they
are text, and in reasoning, too, where only its closer counts: not in backticks, if it is no control token.

Line breaks at the edges of a block, and before a call, are layout and not part of any text. Between two parts of an
answer they remain. Two blocks of reasoning are set apart by an empty line.

Nothing is lost. What a call needs to be read is kept as it was written until a call has come of it; a call that cannot
be decoded is shown, as answer or as reasoning, whichever it began in. If a part of it went out already, that call is
closed as not complete, and its text is shown after it. After an opener, text that cannot begin a call is let go at its
first wrong character. A pair of markers with no call between them is dropped. A call within reasoning (models forget
the closer) ends it, if it calls an offered tool; else it is reasoning.

A marker is looked for by its spelling where there are no token ids. Where there are, a control token is known by its
id; a marker that is made of several tokens (`<|open|>think<|sep|>`) is found in their texts, and its control tokens
have a mark before them there (`scanner.CONTROL`), so that the same spelling in plain text is text.
"""

from __future__ import annotations

import re
from copy import copy
from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import END_MARKERS, Reader
from mlx_backend.conversation.dialects.block_format import CallBlock, CallsInReasoning
from mlx_backend.conversation.dialects.calls.base import CallName, JsonSpan
from mlx_backend.conversation.dialects.calls.json_object import after_object
from mlx_backend.conversation.dialects.calls.unwrapped import UNWRAPPED
from mlx_backend.conversation.dialects.open_call import (
    BLANKS,
    MAX_BEGINNING,
    MAX_DOUBTS,
    OpenCall,
    TextBuffer,
)
from mlx_backend.conversation.events import Channel, ContentDelta, ReasoningDelta
from mlx_backend.conversation.json_arguments import JsonArguments
from mlx_backend.conversation.quoting import OpenCode, opens_quotation
from mlx_backend.conversation.scanner import CONTROL, MarkerSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_backend.conversation.dialects.block_format import BlockFormat, CallSection
    from mlx_backend.conversation.dialects.calls.base import CallPiece, DecodedCall, StreamedCall
    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

_BRACKET = re.compile(r"[{\[]")
_LAYOUT = "\r\n"

# The ends of turns that are known by their spelling, without ids. `</s>` is not among them: it is HTML too.
_SPELT_ENDS = frozenset({"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>"})

_MAX_LAYOUT = 16
"""Characters of white space that are held, at the end of reasoning or before the first text."""


class _BlockState(Enum):
    OPENING = auto()
    REASONING = auto()
    ANSWER = auto()
    SECTION = auto()
    CALL = auto()
    ARGUMENTS = auto()
    STRING = auto()
    REST = auto()


class BlockReader(Reader):
    """Reads one turn of a model that writes blocks."""

    __slots__ = (
        *("_aliases", "_bare_anywhere", "_blocks", "_breaks", "_call", "_closers", "_code", "_control"),
        *("_drops_breaks", "_expected", "_format", "_has_begun", "_has_calls", "_has_reasoned"),
        *("_in_reasoning", "_json", "_layout", "_may_be_unwrapped", "_openers", "_reasoning_code"),
        *("_section", "_sections"),
        *("_shown", "_state", "_strays", "_tools", "_trims_layout", "_unclosed", "_written", "fragments"),
    )

    def __init__(
        self,
        *,
        form: BlockFormat,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self._format = form
        self._tools = tools
        self._control = frozenset((special_tokens or {}).values())
        self._aliases = form.suffixed_markers(self._control)
        self.fragments = frozenset(
            token
            for token in self._control
            if token and any(token in marker and token != marker for marker in form.markers)
        )
        has_calls = tools.may_be_called
        self._sections = (
            {opener: each for each in form.sections for opener in each.openers} if has_calls else {}
        )
        self._blocks = {each.opener: each for each in form.blocks if each.opener} if has_calls else {}
        self._openers = (*self._sections, *self._blocks)
        self._bare_anywhere = {  # by the character that they begin with
            first: each
            for each in form.blocks
            for first in "{["
            if each.is_anywhere and each.head and each.head.fullmatch(first) and has_calls
        }
        self._strays = self._stray_markers(has_calls=has_calls)
        self._state = _BlockState.OPENING
        self._expected: frozenset[str] = frozenset()  # the markers that are looked for
        self._layout = ""  # white space that is dropped if a marker follows
        self._trims_layout = False  # the next line breaks are layout
        # reasoning and answer
        self._closers: frozenset[str] = frozenset()  # of the block of reasoning that is open
        self._has_reasoned = False
        self._has_begun = False  # there is text of the answer
        self._code = OpenCode()  # of the answer
        self._reasoning_code = OpenCode()
        self._json: JsonSpan | None = None  # of an answer that begins as JSON
        self._shown: set[str] = set()  # closers of what has been shown as text, and was no call
        self._breaks: int | None = None  # line breaks around what has interrupted the answer
        self._drops_breaks = False  # line breaks at the end of the answer are layout
        # calls
        self._may_be_unwrapped = tools.may_be_unwrapped  # nothing was written yet
        self._section: CallSection | None = None
        self._has_calls = False  # in this section, or just before this place
        self._call: OpenCall | None = None  # the one being read; set in CALL and the states after it
        self._written: list[str] = []  # what is shown, with the call's text, if no call comes of it
        self._unclosed = ""  # the text of the last call, if it has lost its closer
        self._in_reasoning = False  # the call being read began in a block of reasoning
        match opens_in:
            case Channel.ANALYSIS if form.reasoning:
                self._enter_reasoning([*form.reasoning.values(), *form.reasoning])
            case None | Channel.ANALYSIS:
                self._enter_opening()
            case _:
                self._enter_answer()

    # what the parser asks

    def is_cut_marker(self, text: str) -> bool:
        """Whether the beginning of a marker cannot be text: it holds a control token, or what is known to be one."""
        return CONTROL in text or (bool(self._format.controls) and text.startswith(self._format.controls))

    @property
    def is_reasoning(self) -> bool:
        return self._state is _BlockState.REASONING

    @property
    def is_answering(self) -> bool:
        """Whether this is the answer or a call."""
        return self._state not in (_BlockState.OPENING, _BlockState.REASONING) and not self._in_reasoning

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

    def text(self, text: str) -> str:
        """Put text out, less the layout around blocks; gather a call's. Return what is to be looked at afresh."""
        if self.fragments and CONTROL in text:
            text = self._without_control_marks(text)
            if not text:
                return ""
        call = self._call
        if call is not None:
            match self._state:
                case _BlockState.CALL:
                    return self._gather(call, text)
                case _BlockState.ARGUMENTS:
                    return self._put_out_arguments(call, text)
                case _BlockState.STRING:
                    return self._judge_string(call, text)
                case _:
                    return self._gather_rest(call, text)
        match self._state:
            case _BlockState.REASONING:
                self._put_out_reasoning(text)
            case _BlockState.OPENING:
                return self._gather_opening(text)
            case _BlockState.ANSWER:
                return self._find_bare_call(text)
            case _:
                return self._gather_section(text)
        return ""

    def marker(self, marker: str) -> None:
        """Open or close a block. What does neither here is text; other control tokens are dropped."""
        written = marker.replace(CONTROL, "")
        marker = self._aliases.get(written, written)
        is_end = marker in END_MARKERS or marker in self._format.ends
        may_be_quoted = written not in self._control if is_end else marker not in self._openers
        if may_be_quoted and self._holds_quoted(written):
            return
        is_text = marker in self._strays and self._state is _BlockState.ANSWER and self._is_text(marker)
        if self._state is _BlockState.REASONING and marker[1:-1] in self._closers:
            self._take_in_backticks(marker)
            return
        if marker in self._expected and not is_text and self._take(marker, written):
            return
        if is_end:
            self.close("stop")
            self.ended = True
        elif is_text or marker in self._format.markers or self._call is not None:
            while written:
                written = self.text(written)

    def close(self, ended_by: EndedBy) -> None:
        """Handle the end: an open block is closed, a cut call is not complete."""
        self._may_be_unwrapped = False
        if self._call is not None:
            self._close_call_at_end(self._call, ended_by)
        elif self._state is _BlockState.SECTION:
            if not self._has_calls and ended_by == "stop":
                self._give_up()
        elif (
            self._layout
            and self._state is not _BlockState.REASONING
            and not (self._drops_breaks or self._trims_layout)
        ):
            self.events.append(ContentDelta(self._layout))
        self._layout = ""
        self.delta = None

    # markers

    def _expect(self, state: _BlockState, markers: Iterable[str], *, watched: str = "") -> None:
        self._state = state
        self._expected = expected = frozenset(markers)
        if self._aliases:
            expected |= {alias for alias, marker in self._aliases.items() if marker in expected}
        self.markers = _marker_set(expected | _SPELT_ENDS | self._format.ends, watched)
        spelt = expected - (self._control - self.fragments)
        if self.fragments:
            spelt = frozenset(_with_control_marks(marker, self.fragments) for marker in spelt)
        self.spelt = _marker_set(spelt, watched)

    def _take(self, marker: str, written: str) -> bool:
        """Take a marker that is looked for in this state. Return whether it means something after all."""
        form = self._format
        if self._call is not None:
            return self._take_in_call(self._call, marker, len(written))
        if self._section is not None:
            self._take_in_section(self._section, marker)
        elif marker in form.reasoning:
            self._leave_block()
            self._enter_reasoning({marker, form.reasoning[marker]})
        elif marker in self._openers:
            self._open_calls(marker)
        elif block := next((each for each in form.answers if each.opener == marker), None):
            self._layout = ""
            self._drops_breaks = block.has_layout
            self._enter_answer()
            self._trims_layout = True
            self.delta = None
        else:  # a closer, of whatever it is
            self._leave_block()
        return True

    def _stray_markers(self, *, has_calls: bool) -> frozenset[str]:
        """Return what is no text in the answer though it opens no call: of reasoning, and of calls."""
        form = self._format
        openers = [opener for opener in form.reasoning if opener not in form.words or opener in self._control]
        closers = form.between_calls.union(*(each.closers for each in form.sections)) if has_calls else ()
        return frozenset(
            {
                *(*openers, *(form.reasoning[opener] for opener in openers)),
                *(closer for closer in closers if not closer.startswith("`")),  # a fence is Markdown, too
            }
        )

    def _without_control_marks(self, text: str) -> str:
        """In a call its control tokens are part of the text; elsewhere they mean nothing."""
        if self._call is None:
            for fragment in self.fragments:
                text = text.replace(CONTROL + fragment, "")
        return text.replace(CONTROL, "")

    def _leave_block(self) -> None:
        if self._state is _BlockState.ANSWER:
            self._breaks = self._layout.count("\n") if self._has_begun else None
        self._layout = ""
        self._drops_breaks = False
        self._trims_layout = True
        self._enter_opening()

    # OPENING

    def _enter_opening(self) -> None:
        self.delta = None
        self.last = self.before_last = ""
        form = self._format
        self._expect(
            _BlockState.OPENING,
            [
                *(*form.reasoning, *(form.reasoning.values() if self._has_reasoned else ())),
                *(*self._openers, *self._strays),
                *(
                    *self._answer_markers(),
                    *(closer for each in self._blocks.values() for closer in each.closers),
                ),
            ],
        )

    def _gather_opening(self, text: str) -> str:
        if self._trims_layout and not self._layout:  # the layout of a block goes, other white space stays
            text = self._without_breaks(text)
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

    def _blanks(self, text: str) -> int:
        """Return how many characters at the beginning of a text mean nothing between calls."""
        separators = self._format.separators if self._has_calls else ""
        return len(text) - len(text.lstrip(BLANKS + separators))

    def _bare_call(self, first: str) -> CallBlock | None:
        """Return the call without an opener that begins with this character, if one does."""
        if first and self._tools.may_be_called:
            for block in self._format.blocks:
                if not block.opener and block.head is not None and block.head.fullmatch(first):
                    return block
        return None

    # REASONING

    def _enter_reasoning(self, markers: Iterable[str]) -> None:
        self._trims_layout = True
        self.delta = None  # until there is more than layout
        markers = [*markers]
        self._closers = frozenset(self._format.reasoning.values()).intersection(markers)
        by_token = [opener for opener, each in self._blocks.items() if not each.is_text]
        answers = [each.opener for each in self._format.answers if each.opener]
        quoted = [f"`{marker}`" for marker in self._closers - self._control]
        self._reasoning_code = OpenCode()
        self._expect(
            _BlockState.REASONING,
            [*markers, *quoted, *self._sections, *by_token, *answers],
            watched=_LAYOUT + OpenCode.SPECIAL,
        )

    def _put_out_reasoning(self, text: str) -> None:
        if self._trims_layout:
            text = text.lstrip(_LAYOUT)
            if not text:
                return
            self._trims_layout = False
            self._expect(
                _BlockState.REASONING,
                self._expected.difference(self._format.reasoning),
                watched=_LAYOUT + OpenCode.SPECIAL,
            )
            if self._has_reasoned:
                text = "\n\n" + text
            self._has_reasoned = True
        self._reasoning_code.add(text)
        self._put_out_but_breaks(text, ReasoningDelta)
        if self._reasoning_code.is_pending:
            self.delta = None  # the next piece has to be seen

    def _take_in_backticks(self, marker: str) -> None:
        """Take a closer in backticks: a quotation, unless the first of them ends code."""
        code = copy(self._reasoning_code)
        code.add("`")
        if code.is_open:
            self._put_out_reasoning(marker)
            return
        self._put_out_reasoning("`")
        self.marker(marker.strip("`"))
        self._read_again("`")

    def _put_out_but_breaks(self, text: str, event: type[ReasoningDelta] | type[ContentDelta]) -> None:
        """Put text out; hold the line breaks at its end, which are layout if a marker follows."""
        text = self._layout + text
        visible = text[: max(len(text.rstrip(_LAYOUT)), len(text) - _MAX_LAYOUT)]
        self._layout = text[len(visible) :]
        self.delta = None if self._layout else event
        if visible:
            self.before_last, self.last = self.last, visible
            self.events.append(event(visible))

    # ANSWER

    def _enter_answer(self) -> None:
        self._open(Channel.FINAL)
        if not self._has_begun:
            self.delta = None
        self._expect_in_answer()

    def _expect_in_answer(self) -> None:
        watched = "".join(self._bare_anywhere)
        if self._holds_breaks:
            watched += _LAYOUT + OpenCode.SPECIAL
        if self._json is not None:
            watched += JsonSpan.SPECIAL
        markers = [*self._openers, *self._answer_markers(), *self._strays]
        self._expect(_BlockState.ANSWER, markers, watched=watched)

    @property
    def _holds_breaks(self) -> bool:
        """Whether a marker may follow that makes line breaks in the answer layout."""
        return self._drops_breaks or bool(self._openers or self._bare_anywhere or self._strays)

    def _is_text(self, marker: str) -> bool:
        """Whether a stray marker that comes next in the answer is quoted, or closes what is shown as text."""
        if marker in self._shown:
            self._shown.discard(marker)
            return True
        if self._code.is_open or (self._json is not None and self._json.in_string):
            return True
        return opens_quotation((self.before_last + self.last + self._layout)[-2:])

    def _answer_markers(self) -> list[str]:
        return [marker for each in self._format.answers for marker in (each.opener, each.closer) if marker]

    def _find_bare_call(self, text: str) -> str:
        """Put out text up to where a call without an opener may begin; return the rest."""
        if self._may_be_unwrapped:
            text, self._layout = self._layout + text, ""
            blanks = self._blanks(text)
            if blanks == len(text) <= _MAX_LAYOUT:
                self._layout = text
                return ""
            self._may_be_unwrapped = False
            first = text[blanks : blanks + 1]
            if blanks <= _MAX_LAYOUT and first in ("{", "[", "`", "<") and first not in self._bare_anywhere:
                self._written = [text[:blanks]]
                self._begin_call(UNWRAPPED)
                return text[blanks:]
        begun = 0
        for bracket in _BRACKET.finditer(text) if self._bare_anywhere else ():
            at, block = bracket.start(), self._bare_anywhere.get(bracket[0])
            if block and block.head and block.head.fullmatch(text, at, at + block.syntax.head_length):
                if at > begun:
                    self._put_out_answer(text[begun:at])
                    begun = at
                if not self._code.is_open:
                    self._written, self._layout = [self._layout], ""
                    self._begin_call(block)
                    return text[at:]
        self._put_out_answer(text[begun:])
        return ""

    def _put_out_answer(self, text: str) -> None:
        if self._trims_layout:
            text = self._without_breaks(text)
            if not text:
                return
            self._trims_layout = False
        if not self._holds_breaks:
            self._open(Channel.FINAL)
            self._emit(text)
            return
        if self._breaks:
            text = "\n" * min(self._breaks, 2) + text
        self._breaks = None
        self._code.add(text)
        if self._json is not None or not self._has_begun:
            self._find_strings(text)
        self._put_out_but_breaks(text, ContentDelta)
        is_escaped = self._json is not None and self._json.is_escaped
        if self._code.is_pending or not self._has_begun or is_escaped:
            self.delta = None  # the next piece has to be seen

    def _find_strings(self, text: str) -> None:
        """Follow the strings of an answer that is JSON."""
        json = self._json
        if not self._has_begun:
            first = text.lstrip()[:1]
            self._has_begun = bool(first)
            self._json = JsonSpan() if first and first in "{[" else None
        if self._json is not None and self._json.end(text) >= 0:
            self._json = None
        if self._json is not json:
            self._expect_in_answer()

    def _without_breaks(self, text: str) -> str:
        """Take the line breaks off the beginning of a text. They count, if they stand between parts of the answer."""
        visible = text.lstrip(_LAYOUT)
        if self._breaks is not None:
            self._breaks += text[: len(text) - len(visible)].count("\n")
        return visible

    # SECTION

    def _open_calls(self, marker: str) -> None:
        """Open a section, or a call outside of one."""
        self._in_reasoning = self._state is _BlockState.REASONING
        self._written = [] if self._state is _BlockState.OPENING else [self._layout]
        self._layout = ""
        if (section := self._sections.get(marker)) is not None:
            self._written.append(marker)
            self._has_calls = self._may_be_unwrapped = False
            self._enter_section(section)
        else:
            self._begin_call(self._blocks[marker])

    def _enter_section(self, section: CallSection) -> None:
        self._section = section
        self.delta = None
        self._expect(
            _BlockState.SECTION,
            [*self._openers, *section.closers, *self._reasoning_closers, *self._format.between_calls],
        )

    @property
    def _reasoning_closers(self) -> Iterable[str]:
        return self._format.reasoning.values() if self._in_reasoning else ()

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

    def _take_in_section(self, section: CallSection, marker: str) -> None:
        """Take a marker between calls."""
        if marker in section.closers:
            if self._has_calls:
                self._section = None
                self._after_call()
            else:
                self._written.append(marker)
                self._give_up()
        elif marker in self._blocks:
            self._begin_call(self._blocks[marker])
        elif self._has_calls and marker in self._format.between_calls:
            pass
        elif marker in self._sections:  # written twice
            if not self._has_calls:
                self._written.append(marker)
            self._enter_section(self._sections[marker])
        else:
            self._give_up()
            self.marker(marker)

    # CALL

    def _begin_call(self, block: CallBlock, *, outer: str = "") -> None:
        self._may_be_unwrapped = False
        is_marked = block.opener and not block.is_text
        must_be_offered = self._in_reasoning or (self._section is None and not is_marked)
        self._call = OpenCall(block, self._tools, must_be_offered=must_be_offered)
        self._call.outer, self._call.repeated, self._unclosed = outer, self._unclosed, ""
        # Without ids, a call within reasoning may be quoted, and reasoning go on after it.
        self._call.is_read_whole = self._in_reasoning and not self._control
        if is_marked:
            self._written.append(block.opener)
        self.delta = None
        section = self._section.closers if self._section is not None else ()
        self._expect(_BlockState.CALL, [*block.closers, *section, *self._openers, *self._reasoning_closers])

    def _gather(self, call: OpenCall, text: str) -> str:
        """Gather a call's text, until it is known to be none, or until its arguments begin."""
        if call.is_only_read:
            call.text.append(text)
            pieces = call.read(text)
            if pieces or self._in_call:
                self._put_out_pieces(call, pieces)
            return ""
        syntax, before = call.block.syntax, call.text.length
        wrong = call.first_wrong(text)
        if wrong is not None and call.block.is_alone:  # what it holds may be the beginning of a marker
            text = "".join([*self._written, str(call.text), text])
            self._call, self._written = None, []
            self._enter_answer()
            return text
        if wrong is not None:
            call.text.append(text[:wrong])
            self._give_up()
            return text[wrong:]
        call.text.append(text)
        if call.may_repeat(text):
            return ""
        written = str(call.text) if before < MAX_BEGINNING and not call.is_in_pieces else ""
        begun = syntax.begin(written[:MAX_BEGINNING]) if written else None
        end = call.end(text[: max(0, begun.arguments_at - before)] if begun else text)
        if begun and end < 0:
            name = call.accepted(begun.name)
            if name is None:
                self._give_up()
                return ""
            self._commit(call)
            self._put_out_outer(call, name)
            self._enter_arguments(call, begun, name)
            return written[begun.arguments_at :]
        if end < 0:
            self._put_out_pieces(call, call.read(text))
            return ""
        call.text.drop_end(len(text) - end)
        self._put_out_pieces(call, call.read(text[:end]))
        self._end_call(call, "")
        return text[end:]

    def _put_out_pieces(self, call: OpenCall, pieces: Sequence[CallPiece]) -> None:
        """Put out what was read of a call in another notation than JSON."""
        self.delta = call.delta
        for piece in pieces:
            match piece:
                case CallName(written):
                    name = call.accepted(written)
                    if name is None and not call.is_begun:
                        call.is_read_whole = True
                        break
                    if not call.is_begun:
                        call.is_begun = True
                        call.opened_by = "".join(self._written)
                        self._commit(call)
                        self._put_out_outer(call, name or written)
                        self._expect(_BlockState.CALL, self._expected, watched=call.special)
                    self._open_call(name or self._tools.offered_name(written))
                    call.delta = self.delta
                case None:
                    self._close_call(complete=True)
                case _:
                    self._emit(piece)
        self.delta = call.plain_delta() if self._in_call else None

    def _take_in_call(self, call: OpenCall, marker: str, length: int) -> bool:
        """Take a marker within a call. Return whether it means something there."""
        section = self._section
        ends_section = section is not None and marker in section.closers
        if marker in call.block.closers or ends_section:
            if self._state is _BlockState.CALL and call.doubts_closer(length, ends_section=ends_section):
                return False
            self._end_call(call, marker)
            if ends_section and section is not None and self._state is _BlockState.SECTION:
                self._take_in_section(section, marker)
            return True
        if marker not in self._openers:  # the reasoning in which it began has gone on, and ends here
            if not call.is_begun:
                self._give_up()
            elif self._in_call:
                self._in_reasoning = True
                self._break_off(call)
            else:
                self._end_call(call, "")
        elif self._state is _BlockState.CALL and marker in self._blocks and call.is_blank():  # written twice
            self._written.append(str(call.text))
            self._begin_call(self._blocks[marker])
            return True
        elif self._state is _BlockState.CALL and (name := call.bare_name()):
            self._put_out_outer(call, name)
            self._commit(call)  # it is one, be it this or the next
            block = self._blocks.get(marker, call.block)
            if not block.opener:
                self._written.append(marker)
            self._begin_call(block, outer=name)
            return True
        elif self._state is _BlockState.CALL and call.ends_with_doubted():
            self._end_at_doubted(call)
        elif self._may_be_next_call(call):
            unclosed = (
                str(call.text).strip() if self._state is _BlockState.CALL and call.block.closers else ""
            )
            self._end_call(call, "")
            self._unclosed = unclosed if self._state is not _BlockState.ANSWER else ""
        else:
            return False
        self.marker(marker)
        return True

    def _may_be_next_call(self, call: OpenCall) -> bool:
        """See whether an opener within a call begins another one, because the first has lost its closer."""
        if self._state is _BlockState.ARGUMENTS:
            return not call.block.closers and not call.arguments.in_string
        return self._state is _BlockState.REST or call.may_end_without_closer()

    def _end_call(self, call: OpenCall, closer: str) -> None:
        """Put a call out, or show what was written if it cannot be decoded."""
        if self._state is not _BlockState.CALL:
            self._end_arguments(call)
        elif call.repeats():
            self._commit(call)
            self._after_call()
        elif call.is_begun:
            self._put_out_pieces(call, call.finish())
            if self._in_call:
                call.text.append(closer)
                self._break_off(call)
            else:
                self._after_call()
        elif calls := call.accepted_calls(str(call.text)):
            self._commit(call)
            self._put_out_outer(call, calls[0][0])
            self._put_out_calls(calls)
            self._after_call()
        else:
            call.text.append(closer)
            self._give_up()

    def _put_out_outer(self, call: OpenCall, name: str) -> None:
        """Put out the call before one of this tool, if it was a name and no more. Of the same tool it was none."""
        outer, call.outer = call.outer, ""
        if outer and outer != name:
            self._open_call(outer)
            self._emit("{}")
            self._close_call(complete=True)

    def _end_at_doubted(self, call: OpenCall) -> str:
        """End the call at a closer in a value that was never closed. Return what follows it."""
        closer, ends_section, rest = call.cut_at_doubted()
        self._end_call(call, closer)
        if ends_section and self._section is not None and self._state is _BlockState.SECTION:
            self._take_in_section(self._section, self._section.closer)
        return rest

    def _commit(self, call: OpenCall) -> None:
        """Note that there is a call: what was written for it is not shown, and reasoning has ended."""
        if self._breaks is None and self._has_begun:
            self._breaks = "".join(self._written[:1]).count("\n")
        self._written = []
        self._has_calls = True
        if self._in_reasoning and self._format.calls_in_reasoning is CallsInReasoning.CLOSE:
            self._in_reasoning = call.must_be_offered = False

    def _put_out_calls(self, calls: Sequence[tuple[str, DecodedCall]], *, is_cut: bool = False) -> None:
        for at, (name, call) in enumerate(calls):
            self._open_call(name, call.id)
            self._emit(call.arguments)
            self._close_call(complete=not is_cut or at < len(calls) - 1)

    def _after_call(self) -> None:
        self._call = None
        self._shown.clear()
        self._layout = ""
        self._trims_layout = True
        if self._section is not None:
            self._enter_section(self._section)
        elif self._in_reasoning:
            self._in_reasoning = False
            self._enter_reasoning(self._format.reasoning.values())
        else:
            self._enter_opening()

    def _break_off(self, call: OpenCall) -> None:
        """Close a call of which a part was put out, and which may not be run; show what was written for it, too."""
        self._close_call(complete=False)
        self._written = [call.opened_by]
        self._give_up()

    def _give_up(self) -> None:
        """Show what was written: no call has come of it."""
        if self._call is not None:
            self._put_out_outer(self._call, "")
        text = "".join([*self._written, str(self._call.text) if self._call is not None else ""])
        if not self._in_reasoning and self._is_empty(text):
            if self._breaks is None and self._has_begun:
                self._breaks = "".join(self._written[:1]).count("\n")
            self._written, self._section = [], None
            self._after_call()
            return
        in_reasoning, self._in_reasoning = self._in_reasoning, False
        self._written = []
        self._shown |= {
            closer
            for each in (self._section, self._call and self._call.block)
            if each
            for closer in each.closers
            if not text.endswith(closer)
        }
        self._call = self._section = None
        if in_reasoning:
            self._enter_reasoning(self._closers)
            self._trims_layout = False
            self._put_out_reasoning(text)
        else:
            self._trims_layout = False
            self._enter_answer()
            self._put_out_answer(text)

    def _is_empty(self, text: str) -> bool:
        """Whether a pair of markers has no call between them, and the answer is not about them."""
        pair = self._section or (self._call.block if self._call is not None else None)
        if pair is None or not text.endswith(tuple(pair.closers)) or self._is_text(""):
            return False
        if len(text) > MAX_BEGINNING:
            return False
        for marker in (*self._openers, *pair.closers):
            text = text.replace(marker, "")
        return not text.strip(BLANKS + "[]")

    def _close_call_at_end(self, call: OpenCall, ended_by: EndedBy) -> None:
        """Handle the end of the output in a call. A cut call is not complete."""
        is_stop = ended_by == "stop"
        if self._state is _BlockState.STRING:
            self._close_after(self._end_string(call, is_part=not is_stop), ended_by)
        elif self._state is not _BlockState.CALL:
            if is_stop:
                self._end_arguments(call)
            else:
                self._close_call(complete=False)
        elif not call.is_open():
            if is_stop:
                self._end_call(call, "")
            else:
                self._put_out_cut_call(call)
        elif call.has_doubted and (is_stop or call.ends_with_doubted()):
            self._close_after(self._end_at_doubted(call), ended_by)
        elif is_stop and self._in_call:
            self._break_off(call)
        elif is_stop:
            self._give_up()  # it ends within a value: what is there may not be all of it
        else:
            self._put_out_cut_call(call)

    def _close_after(self, rest: str, ended_by: EndedBy) -> None:
        """Read what stands after a call that ended at a doubted closer, and close."""
        while rest:
            rest = self.text(rest)
        self.close(ended_by)

    def _put_out_cut_call(self, call: OpenCall) -> None:
        if call.is_begun:
            if self._in_call:
                self._close_call(complete=False)
        elif call.begun_name and (name := call.accepted(call.begun_name)):
            self._put_out_outer(call, name)
            self._open_call(name)
            self._close_call(complete=False)
        elif calls := call.accepted_calls(str(call.text)):
            self._put_out_outer(call, calls[0][0])
            self._put_out_calls(calls, is_cut=True)
        elif call.outer and call.outer.startswith(str(call.text).strip()):
            call.outer = ""
        elif self._section is None and not call.block.opener:
            self._give_up()

    # ARGUMENTS, STRING, REST

    def _enter_arguments(self, call: OpenCall, begun: StreamedCall, name: str) -> None:
        self._open_call(name, begun.id)
        call.delta, self.delta = self.delta, None
        call.arguments = JsonArguments()
        self._expect_arguments(call)

    def _expect_arguments(self, call: OpenCall) -> None:
        section = self._section.closers if self._section is not None else ()
        markers = {*call.block.closers, *section, *self._openers}
        self._expect(_BlockState.ARGUMENTS, markers, watched=call.arguments.SPECIAL)

    def _put_out_arguments(self, call: OpenCall, text: str) -> str:
        self.delta = call.delta
        written, rest = call.arguments.read(text)
        self._emit(written)
        if rest is None:
            if not call.arguments.is_plain:
                self.delta = None
            return ""
        self.delta = None
        if call.block.closers or call.is_in_object:
            call.text = TextBuffer()
            self._expect(_BlockState.REST, self._expected)
        else:
            self._close_call(complete=True)
            self._after_call()
        return rest

    def _gather_rest(self, call: OpenCall, text: str) -> str:
        """Gather what follows JSON arguments: the rest of their object, or of a list with more calls."""
        before = call.text.length
        call.text.append(text)
        written = str(call.text) if before < MAX_BEGINNING else ""
        begun = call.block.syntax.begin(written[:MAX_BEGINNING])
        end = call.end(text[: begun.arguments_at - before] if begun else text)
        if end >= 0:  # the bracket around them, where the call has no closer
            call.text.drop_end(len(text) - end)
            self._end_call(call, "")
            return text[end:]
        if begun:
            self._close_call(complete=True)
            self._enter_arguments(call, begun, self._tools.offered_name(begun.name))
            return written[begun.arguments_at :]
        return ""

    def _end_arguments(self, call: OpenCall) -> None:
        """Close a call whose arguments were put out already. More calls may stand after them, in a list."""
        rest = "" if self._state is _BlockState.ARGUMENTS else after_object(str(call.text))
        self.delta = call.delta
        self._emit(call.arguments.finish())
        self._close_call(complete=True)
        if calls := call.accepted_calls(rest):
            self._put_out_calls(calls)
            rest = ""
        if not rest:
            self._after_call()
            return
        call.text = TextBuffer(rest)
        self._give_up()

    def _holds_quoted(self, written: str) -> bool:
        """Hold a marker that ends a call, or a spelt one that ends the turn, if it stands in a string."""
        call = self._call
        if call is None or self._state is not _BlockState.ARGUMENTS or not call.arguments.in_string:
            return False
        if call.doubts >= MAX_DOUBTS:
            return False
        call.doubts += 1
        call.arguments.hold(written)
        self.delta = None
        self._expect(_BlockState.STRING, ())
        return True

    def _judge_string(self, call: OpenCall, text: str) -> str:
        is_part, rest = call.arguments.judge(text)
        return "" if is_part is None else self._end_string(call, is_part=is_part) + rest

    def _end_string(self, call: OpenCall, *, is_part: bool) -> str:
        """Put out what was held, or take its marker. Return what is to be looked at afresh."""
        marker, text = call.arguments.release()
        self._expect_arguments(call)
        if is_part:
            return self._put_out_arguments(call, marker + text)
        call.doubts = MAX_DOUBTS
        self.marker(marker)
        self._read_again(text)
        return ""

    def _read_again(self, text: str) -> None:
        """Read text that was held as part of a string: its markers are some after all, whatever token they were."""
        while text and not self.ended:
            markers = self.markers
            before, marker, after = markers.cut(text)
            rest = self.text(before) if before else ""
            if rest or self.markers is not markers:
                text = rest + marker + after
            elif marker:
                self.marker(marker)
                text = after
            else:
                text = self.text(after)


@lru_cache(maxsize=1024)
def _marker_set(markers: frozenset[str], watched: str) -> MarkerSet:
    return MarkerSet(markers, watched=watched)


def _with_control_marks(marker: str, fragments: Iterable[str]) -> str:
    for fragment in fragments:
        marker = marker.replace(fragment, CONTROL + fragment)
    return marker
