"""What a syntax of calls is: how the text of a call block is read, and how it is written."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.dialects.base import Piece
    from mlx_backend.conversation.tools import ToolSet


@dataclass(frozen=True, slots=True)
class DecodedCall:
    """A call that was read. `id` is the model's own, if it writes one."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """The beginning of a call whose arguments are JSON: they begin at `arguments_at` of the text so far."""

    name: str
    arguments_at: int
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallName:
    """A call begins."""

    name: str


type CallPiece = CallName | str | None
"""The beginning of a call, a part of its arguments, or its end."""


class CallReader(Protocol):
    """Reads the calls in one body that comes in pieces."""

    name: str
    """Of the call that is being read, if it is known."""
    text: str
    """What has come and is not used yet."""
    is_plain: bool
    """Whether the next piece is part of an open text, if `text` is empty and it has no character of `special`."""
    special: str

    def feed(self, text: str) -> list[CallPiece]:
        """Take a piece of the body; return what is to be put out now."""
        ...

    def finish(self) -> list[CallPiece]:
        """Return what is still to be put out at the end of the body. A call that has no end then is not complete."""
        ...


class CallSyntax(ABC):
    """How calls are written between the markers that open and close a block."""

    head: re.Pattern[str] | None = None
    """What a body may begin with, as a pattern that every beginning of such a body matches as a whole. None: anything.

    Text after an opener that cannot be a call's is known at once to be text."""
    head_length = 160
    """Characters of a body that are held against `head`."""
    in_list = False
    """Several calls are written as one list."""
    counters: Mapping[str, str] = MappingProxyType({})
    """What of a written call differs from call to call, and a pattern of what may stand there."""
    reserved = ""
    """A pattern of what may end a value that is written as bare text. "": nothing but the marker after it."""

    @abstractmethod
    def decode(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls in a body, none if it holds none. A body may be cut anywhere; nothing raises.

        `tools` has the schemas of the parameters, for syntaxes that write values without their types.
        """

    @abstractmethod
    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call, without the markers of its block."""

    def begin(self, body: str) -> StreamedCall | None:
        """Find where arguments begin that can be put out while they are written."""
        return None

    def stream(self, body: str, tools: ToolSet) -> CallReader | None:
        """Return what reads a body that begins so, if that is in pieces; None if it is not known yet, or is not."""
        return None

    def first_name(self, body: str) -> tuple[str, int] | None:
        """Return the name of the tool that a body begins to call, if it is known yet, and where that is known."""
        return None

    def is_open(self, body: str) -> bool:
        """Whether a body ends within a value, where what looks like the call's closer may be part of the value."""
        return False

    def is_whole(self, body: str) -> bool:
        """Whether a body may end here: then an opener after it begins another call."""
        return True


def first_wrong(head: re.Pattern[str], text: str) -> int | None:
    """Return the first character with which a text stops being a beginning; `head` matches every beginning."""
    if head.fullmatch(text):
        return None
    low, high = 0, len(text)  # text[:low] is a beginning, text[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if head.fullmatch(text, 0, middle) else (low, middle)
    return low


def beginnings(text: str, then: str = "") -> str:
    """Return a pattern that matches every beginning of a text, and all of it with what `then` matches after it."""
    pattern = then
    for character in reversed(text):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


def to_json(value: Any) -> str:
    """Write a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


_JSON_CHARACTERS = re.compile(r'["\\{}\[\]]')


class JsonSpan:
    """Finds the end of a JSON object or list that comes in pieces.

    `is_escaped`: the last piece ended with a backslash in a string.
    """

    SPECIAL = '"\\{}[]'
    """A piece without these changes nothing, unless `is_escaped`."""

    __slots__ = ("_depth", "in_string", "is_escaped")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self.is_escaped = False

    @property
    def is_open(self) -> bool:
        """Whether a bracket is open."""
        return self._depth > 0

    def end(self, text: str) -> int:
        """Take a piece; return where in it the value ends, -1 if it does not."""
        escaped_at = 0 if self.is_escaped else -1
        self.is_escaped = False
        for match in _JSON_CHARACTERS.finditer(text):
            at, character = match.start(), match[0]
            if at == escaped_at:
                continue
            if self.in_string:
                if character == "\\":
                    escaped_at = at + 1
                    self.is_escaped = escaped_at == len(text)
                elif character == '"':
                    self.in_string = False
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return match.end()
        return -1


class PythonSpan:
    """Finds the end of a Python list or call that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def in_string(self) -> bool:
        """Whether a string is open."""
        return bool(self._quote)

    @property
    def is_open(self) -> bool:
        """Whether a bracket is open."""
        return self._depth > 0

    def end(self, text: str) -> int:
        """Take a piece; return where in it the value ends, -1 if it does not."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                if character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return -1
