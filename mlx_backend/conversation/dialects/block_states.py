"""What both halves of the reader of blocks stand on: its states, and which markers are looked for in each.

A marker is looked for by its spelling where there are no token ids. Where there are, a control token is known by its
id; a marker that is made of several tokens (`<|open|>think<|sep|>`) is found in their texts, and its control tokens
have a mark before them there (`scanner.CONTROL`), so that the same spelling in plain text is text.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Reader
from mlx_backend.conversation.dialects.block_format import suffixed
from mlx_backend.conversation.scanner import CONTROL, MarkerSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mlx_backend.conversation.dialects.block_format import BlockFormat
    from mlx_backend.conversation.tools import ToolSet

# Where there are no ids. `</s>` is not among them: it is HTML too.
_SPELT_ENDS = frozenset({"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>"})


class State(Enum):
    """Where in a turn the reader is (see `block_reader`)."""

    OPENING = auto()
    REASONING = auto()
    ANSWER = auto()
    SECTION = auto()
    CALL = auto()
    ARGUMENTS = auto()
    STRING = auto()
    REST = auto()


IN_CALL = (State.CALL, State.ARGUMENTS, State.STRING, State.REST)


@lru_cache(maxsize=1024)
def _marker_set(markers: frozenset[str], watched: str) -> MarkerSet:
    return MarkerSet(markers, watched=watched)


class MarkerReader(Reader):
    """A reader that is in a state, and looks for its markers."""

    __slots__ = ("_aliases", "_control", "_expected", "_format", "_state", "_tools", "fragments")

    def __init__(self, form: BlockFormat, tools: ToolSet, special_tokens: Mapping[int, str] | None) -> None:
        super().__init__()
        self._format = form
        self._tools = tools
        self._control = frozenset((special_tokens or {}).values())
        self._aliases = _suffixed_markers(form, self._control) if form.suffixes else {}
        self._expected: frozenset[str] = frozenset()
        self._state = State.OPENING
        self.fragments = frozenset(
            token
            for token in self._control
            if token and token not in form.markers and any(token in marker for marker in form.markers)
        )

    def is_cut_marker(self, text: str) -> bool:
        """Whether the beginning of a marker cannot be text: it holds a control token, or what is known to be one."""
        return CONTROL in text or (bool(self._format.controls) and text.startswith(self._format.controls))

    def _expect(self, state: State, markers: Iterable[str], *, watched: str = "") -> None:
        self._state = state
        self._expected = expected = frozenset(markers)
        if self._aliases:
            expected |= {alias for alias, marker in self._aliases.items() if marker in expected}
        self.markers = _marker_set(expected | _SPELT_ENDS | self._format.ends, watched)
        spelt = expected - self._control
        if self.fragments:
            spelt = frozenset(_with_control_marks(marker, self.fragments) for marker in spelt)
        self.spelt = _marker_set(spelt, watched)


def _with_control_marks(marker: str, fragments: Iterable[str]) -> str:
    for fragment in fragments:
        if fragment != marker:
            marker = marker.replace(fragment, CONTROL + fragment)
    return marker


def _suffixed_markers(form: BlockFormat, control: frozenset[str]) -> dict[str, str]:
    """Return the markers that have a suffix, with those they stand for."""
    spelt = {
        token[1:-1].rpartition(":")[2]
        for token in control
        if token[:1] == "<" and token[-1:] == ">" and ":" in token
    }
    return {
        suffixed(marker, f":{suffix}"): marker
        for marker in form.markers
        for suffix in {*form.suffixes, *spelt}
        if suffixed(marker, f":{suffix}") != marker
    }
