"""Think: reasoning in a block at the beginning of the answer, tool calls as JSON in `<tool_call>` blocks.

Theory of operation
-------------------
    <think>
    REASONING
    </think>

    ANSWER <tool_call>{"name": "f", "arguments": {…}}</tool_call> …

Qwen, DeepSeek, GLM and many others write this, some with another word than `think`. The reader is in one
state:

    OPENING    nothing but white space so far: a block may begin, and only here; behind it another one may
    REASONING  until the marker that closes the block; a turn begins here if the prompt has opened the block
    ANSWER     text is put out at once; `<tool_call>` begins a call
    CALL       text is gathered until `</tool_call>`, and decoded by the family's codec (`json_calls.py`)

A `<think>` anywhere else is text, and so is a lone `</think>`: only the prompt knows whether what stands
before it was reasoning (`opens_in`). Line breaks at the edges of a block are layout and not part of any
text. A call that cannot be decoded is not lost: it is shown as it was written.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Continuation, Dialect, Piece, RawMarkup, Reader
from mlx_backend.conversation.dialects.json_calls import JSON_CALLS
from mlx_backend.conversation.dialects.plain import END_MARKERS
from mlx_backend.conversation.events import Channel, ReasoningDelta
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from mlx_backend.conversation.dialects.base import BlockCalls
    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

OPENERS: Mapping[str, str] = {
    **{
        f"<{word}>": f"</{word}>"
        for word in ("think", "thinking", "thought", "Thought", "reason", "reasoning")
    },
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "[THINK]": "[/THINK]",
}
"""Every way to open a block of reasoning, with the marker that closes it."""

_CLOSERS = frozenset(OPENERS.values())
# The other words are tags that people use too.
_LEAKED_OPENERS = ("<think>", "<thinking>", "<seed:think>", "<|begin_of_thought|>", "◁think▷", "[THINK]")
# Where there are no ids. `</s>` is not among them: it is HTML too.
_SPELT_ENDS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>"})
_LAYOUT = "\r\n"
_MAX_LAYOUT = 16  # line breaks that are held at the end of reasoning


class _State(Enum):
    OPENING = auto()
    REASONING = auto()
    ANSWER = auto()
    CALL = auto()


@lru_cache(maxsize=64)
def _marker_set(markers: frozenset[str], watched: str) -> MarkerSet:
    return MarkerSet(markers, watched=watched)


class ThinkReader(Reader):
    """Reads one turn of a model that reasons in a block."""

    __slots__ = (
        "_call_markers",
        "_codec",
        "_control",
        "_gathered",
        "_layout",
        "_state",
        "_tools",
        "_trims_layout",
    )

    def __init__(
        self,
        *,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] | None = None,
        calls: BlockCalls = JSON_CALLS,
    ) -> None:
        super().__init__()
        self._tools = tools
        self._codec = calls
        self._call_markers = (calls.opener,) if tools.may_be_called else ()
        self._control = frozenset((special_tokens or {}).values())
        self._gathered: list[str] = []  # the pieces of a call
        self._layout = ""  # white space that is dropped if a marker follows
        self._trims_layout = False  # the next line breaks are layout
        match opens_in:
            case None:
                self._enter_opening()
            case Channel.ANALYSIS:
                self._enter_reasoning([*_CLOSERS, *OPENERS])
            case _:
                self._enter_answer()

    def _expect(self, state: _State, markers: Iterable[str], *, watched: str = "") -> None:
        self._state = state
        expected = frozenset(markers)
        self.markers = _marker_set(expected | _SPELT_ENDS, watched)
        self.spelt = _marker_set(expected - self._control, watched)

    def _enter_opening(self) -> None:
        self.delta = None
        self._expect(_State.OPENING, [*OPENERS, *self._call_markers])

    def _enter_reasoning(self, markers: Iterable[str]) -> None:
        self._trims_layout = True
        self.delta = None  # until there is more than layout
        self._expect(_State.REASONING, markers, watched=_LAYOUT)

    def _enter_answer(self) -> None:
        self._expect(_State.ANSWER, self._call_markers)
        self._open(Channel.FINAL)

    @property
    def is_reasoning(self) -> bool:
        """Whether a block is open."""
        return self._state is _State.REASONING

    @property
    def is_answering(self) -> bool:
        """Whether the answer or a call has begun: a block can no longer be opened."""
        return self._state in (_State.ANSWER, _State.CALL)

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """Close the block on a line of its own. If the prompt has opened it, its last opener tells which it is."""
        closers = _CLOSERS & self.markers.markers
        if len(closers) == 1:
            [closer] = closers
        else:
            opener = max(OPENERS, key=prompt_tail.rfind)
            known = opener in prompt_tail
            closer = OPENERS[opener] if known else min(_CLOSERS & self._control, default=OPENERS["<think>"])
        return "\n", closer, "\n\n"

    # text

    def text(self, text: str) -> None:
        """Put text out, less the layout around blocks; gather a call's."""
        match self._state:
            case _State.REASONING:
                self._reason(text)
            case _State.CALL:
                self._gathered.append(text)
            case _State.OPENING:
                self._gather_opening(text)
            case _State.ANSWER:
                self._answer(text)

    def _gather_opening(self, text: str) -> None:
        if self._trims_layout:  # behind a block: its layout goes, other white space stays
            text = text if self._layout else text.lstrip(_LAYOUT)
        self._layout += text
        if self._layout.strip() or len(self._layout) > _MAX_LAYOUT:
            text, self._layout = self._layout, ""
            self._trims_layout = False
            self._enter_answer()
            self._emit(text)

    def _reason(self, text: str) -> None:
        if self._trims_layout:
            text = text.lstrip(_LAYOUT)
            if not text:
                return
            self._trims_layout = False
            self._expect(_State.REASONING, _CLOSERS & self.markers.markers, watched=_LAYOUT)
        text = self._layout + text
        visible = text[: max(len(text.rstrip(_LAYOUT)), len(text) - _MAX_LAYOUT)]
        self._layout = text[len(visible) :]
        self.delta = None if self._layout else ReasoningDelta
        if visible:
            self.events.append(ReasoningDelta(visible))

    def _answer(self, text: str) -> None:
        if self._trims_layout:
            text = text.lstrip(_LAYOUT)
            self._trims_layout = not text
            if not self._trims_layout:
                self._open(Channel.FINAL)
        self._emit(text)

    # markers

    def marker(self, marker: str) -> None:
        """Open or close a block. What does neither here is text; other control tokens are dropped."""
        if self._opens_or_closes(marker):
            return
        if marker in END_MARKERS:
            self.close("stop")
            self.ended = True
        elif marker in OPENERS or marker in _CLOSERS or marker in (self._codec.opener, self._codec.closer):
            self.text(marker)

    def _opens_or_closes(self, marker: str) -> bool:
        if marker not in self.markers.markers:
            return False
        match self._state:
            case _State.OPENING | _State.REASONING if marker in OPENERS:
                self._layout = ""
                self._enter_reasoning({OPENERS[marker]})
            case _State.REASONING if marker in _CLOSERS:
                self._layout = ""
                self._trims_layout = True
                self._enter_opening()
            case _State.OPENING | _State.ANSWER if marker == self._codec.opener:
                self._layout = ""
                self._gathered = []
                self.delta = None
                self._expect(_State.CALL, {self._codec.closer})
            case _State.CALL if marker == self._codec.closer:
                self._end_call(closed=True)
            case _:
                return False
        return True

    # calls

    def _end_call(self, *, closed: bool) -> None:
        written = "".join(self._gathered)
        self._gathered = []
        name, arguments = self._codec.decode(written, self._tools)
        if name:
            self._call(name, arguments, complete=True)
        else:
            self._enter_answer()
            self._trims_layout = False
            self._emit(f"{self._codec.opener}{written}{self._codec.closer if closed else ''}")
        if name:
            self._enter_answer()
            self._trims_layout = True
            self.delta = None

    def _call(self, name: str, arguments: str, *, complete: bool) -> None:
        self._open_call(name)
        self._emit(arguments)
        self._close_call(complete=complete)

    # the end

    def close(self, ended_by: EndedBy) -> None:
        """Handle the end: an open block is closed, a cut call is not complete."""
        if self._state is _State.CALL:
            if ended_by == "stop":
                self._end_call(closed=False)
            else:
                name, arguments = self._codec.decode("".join(self._gathered), self._tools)
                if name:
                    self._call(name, arguments, complete=False)
        elif self._state is _State.OPENING and self._layout and not self._trims_layout:
            self._enter_answer()
            self._emit(self._layout)
        self._layout = ""
        self.delta = None


def recognises(template: str, control_tokens: Set[str]) -> bool:
    """Whether a marker of a block, of reasoning or of a call, is a control token or stands in the template."""
    openers = (*OPENERS, JSON_CALLS.opener)
    return any(opener in control_tokens or opener in template for opener in openers)


def continuation(reasoning: str, content: str, *, opened: Channel | None = None) -> Continuation:
    """Write a begun answer behind the generation prompt, or behind the block that the prompt has opened."""
    pieces: list[Piece] = []
    if reasoning:
        if opened is not Channel.ANALYSIS:
            pieces += [Piece("<think>", marker=True), Piece("\n")]
        pieces.append(Piece(reasoning))
        opened = Channel.ANALYSIS
    if content:
        if opened is Channel.ANALYSIS:
            pieces += [Piece("\n"), Piece("</think>", marker=True), Piece("\n\n")]
        pieces.append(Piece(content))
        opened = Channel.FINAL
    return Continuation(tuple(pieces), opened)


def opens_in(prompt_tail: str) -> Channel | None:
    """Return ANALYSIS if the prompt ends with an opened block, FINAL if it ends with a closed one."""
    text = prompt_tail.rstrip()
    if text.endswith(tuple(OPENERS)):
        return Channel.ANALYSIS
    if text.endswith(tuple(_CLOSERS)):
        return Channel.FINAL
    return None


THINK = Dialect(
    name="think",
    recognises=recognises,
    reader=ThinkReader,
    continuation=continuation,
    opens_in=opens_in,
    calls=JSON_CALLS,
    reasoning_markers=(*OPENERS, *OPENERS.values()),
    leaks=RawMarkup(
        openers=_LEAKED_OPENERS,
        call_openers=(JSON_CALLS.opener,),
        reasoning_closers=tuple(OPENERS[opener] for opener in _LEAKED_OPENERS),
        end_markers=("<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
    ),
)
