"""Reads calls while the model writes them: their text comes in pieces, and names and JSON arguments go out.

For notations that are not JSON. A text goes out as it comes; a value whose type has to be known first, and what may
still be the beginning of a tag, waits for its own end only. A whole call is read by the same class, in one piece
(`StreamedSyntax.decode`), so that there is no second grammar of any notation.

`read` is a generator over `text`, which is what has come and is not used yet: it yields when it needs more, and puts
out by `begin_call`, `put`, `open_text`, `end_call`. After the end of the body (`is_at_end`) it must not yield.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.conversation.argument_values import is_text, property_schema
from mlx_backend.conversation.dialects.calls.base import CallName, CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mlx_backend.conversation.argument_values import Untyped
    from mlx_backend.conversation.dialects.calls.base import CallPiece
    from mlx_backend.conversation.tools import ToolSet

ESCAPED = '"\\' + "".join(map(chr, range(32)))
"""Characters that are written otherwise in JSON."""
_PIECE = 4096
"""Characters that are read at a time. Each thing that is read copies what follows it in the piece."""
MAX_UNDECIDED = 256
"""Characters of a value after which it is no longer asked whether it is a text."""

OBJECTS = JsonObjects()

type Reading = Generator[None]
type NextTag = Generator[None, None, re.Match[str] | None]
"""Both yield when more text is needed."""


type Breaks = Literal["text", "layout", "pair", "first"]
"""What line breaks at the ends of a value are: part of it, or layout; that if both are there, or if the first is."""


class CallStream(ABC):
    """Implements `CallReader`; `read` is what a notation adds."""

    special = ESCAPED + "<"

    tag_start = "<"
    tag: re.Pattern[str]
    """A tag of the notation; it begins with `tag_start`."""
    begun_tag: re.Pattern[str]
    """The end of a text that may become one."""

    __slots__ = (
        *("_coming", "_count", "_is_finished", "_out", "_run", "is_at_end", "is_begun", "is_plain"),
        *("name", "parameters", "text", "tools"),
    )

    def __init__(self, tools: ToolSet) -> None:
        self.tools = tools
        self.text = ""
        self.is_at_end = False
        self.is_plain = False
        self.name = ""  # of the call that is being read
        self.parameters: Mapping[str, Any] = {}
        self.is_begun = False  # its name was put out
        self._coming: deque[str] = deque()  # what comes after `text`, in pieces
        self._is_finished = False  # and nothing after that
        self._count = 0  # of its arguments
        self._out: list[CallPiece] = []
        self._run = self.read()

    def feed(self, text: str) -> list[CallPiece]:
        if self._coming or len(text) > _PIECE:
            self._coming.extend(_pieces(text))
            text = self._coming.popleft()
        while True:
            self.text += text
            self.is_at_end = self._is_finished and not self._coming
            if next(self._run, self) is self:  # it has ended, and reads no more
                self.text = ""
                self._coming.clear()
            if not self._coming:
                break
            text = self._coming.popleft()
        out = self._out
        if not out:
            return []
        self._out = []
        return out

    def finish(self) -> list[CallPiece]:
        """Return what is still to be put out at the end of the body."""
        self._is_finished = True
        return self.feed("")

    def read_again(self, text: str) -> None:
        """Have a text read that was read already, and then what follows it."""
        self._coming.extendleft(reversed(_pieces(text + self.text)))
        self.text = self._coming.popleft() if self._coming else ""
        self.is_at_end = self._is_finished and not self._coming

    @abstractmethod
    def read(self) -> Reading:
        """Read the body."""

    def next_tag(self, put: Callable[[str], object] | None = None) -> NextTag:
        """Return the next tag, None at the end of the body; `put` takes the text before it, as it comes."""
        while True:
            found = begun = None
            if self.tag_start in self.text:
                found = self.tag.search(self.text)
                begun = None if found or self.is_at_end else self.begun_tag.search(self.text)
            at = found.start() if found else begun.start() if begun else len(self.text)
            if put is not None:
                put(self.text[:at])
            self.text = self.text[found.end() if found else at :]
            if found or self.is_at_end:
                return found
            yield

    def skip(self, blanks: re.Pattern[str]) -> Generator[None, None, str]:
        """Skip characters; return the next one, "" at the end of the body."""
        while True:
            found = blanks.match(self.text)
            self.text = self.text[found.end() if found else 0 :]
            if self.text or self.is_at_end:
                return self.text[:1]
            yield

    def scan(self, marks: re.Pattern[str], put: Callable[[str], object]) -> Generator[None, None, str]:
        """Return the next of some characters, "" at the end of the body; `put` takes the text before it as it comes."""
        while True:
            found = marks.search(self.text)
            at = found.start() if found else len(self.text)
            put(self.text[:at])
            self.text = self.text[at:]
            if found or self.is_at_end:
                return self.text[:1]
            yield

    # what `read` puts out

    def begin_call(self, name: str) -> None:
        """Begin a call. It is put out with its first argument, or at its end."""
        self.name, self.is_begun, self._count = name, False, 0
        self.parameters = self.tools.parameters(self.tools.offered_name(name))

    def end_call(self, arguments: Mapping[str, Any] | None = None) -> None:
        """End a call, if one is open. `arguments`: more, and all of them where none was put out."""
        for key, value in (arguments or {}).items():
            self.put(key, value)
        if self.name:
            self._begin()
            self.write("}" if self._count else "{}")
            self._out.append(None)
            self.name = ""

    def put(self, key: str, value: Any) -> None:
        """Put out an argument."""
        self.open_value(key)
        self.write(to_json(value))

    def open_value(self, key: str) -> None:
        """Put out an argument's key."""
        self._begin()
        self.write(f"{', ' if self._count else '{'}{to_json(key)}: ")
        self._count += 1

    def write(self, json: str) -> None:
        """Put out a part of the arguments."""
        out = self._out
        if out and isinstance(out[-1], str):
            out[-1] += json
        elif json:
            out.append(json)

    def _begin(self) -> None:
        if not self.is_begun:
            self.is_begun = True
            self._out.append(CallName(self.name))


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


class OpenValue:
    """The value of one argument, written as bare text: put out as it comes once it is known to be a text."""

    __slots__ = (
        *("_breaks", "_key", "_parts", "_rest", "_schema", "_stream", "_untyped", "is_begun", "is_text"),
    )

    def __init__(
        self,
        stream: CallStream,
        key: str,
        *,
        untyped: Untyped,
        breaks: Breaks = "text",
        may_be_text: bool = True,
        is_text: bool = False,
    ) -> None:
        self._stream, self._key, self._untyped = stream, key, untyped
        self._schema = property_schema(stream.parameters, key)
        self._breaks = breaks
        self._parts: list[str] = []
        self._rest = ""  # line break at the end so far
        self.is_begun = False  # a part was put out
        self.is_text: bool | None = (True if is_text else None) if may_be_text else False

    def add(self, text: str) -> None:
        """Take more of the value."""
        if not text:
            return
        if not self.is_begun:
            self._parts.append(text)
            if self.is_text is False or not self._is_known_text():
                return
            self.is_begun = True
            self._stream.open_value(self._key)
            self._stream.write('"')
            text = self._without_break("".join(self._parts))
        if self._breaks == "layout":
            text = self._rest + text
            end = len(text.removesuffix("\n").removesuffix("\r"))
            text, self._rest = text[:end], text[end:]
        self._stream.write(to_json(text)[1:-1])
        self._stream.is_plain = not self._rest

    def may_be_cdata(self) -> None:
        """Note that a CDATA section begins here: if it is all of the value, its content is the text."""
        if self.is_text is not False and not self.is_begun and not "".join(self._parts).strip():
            self.is_text = False

    def taken(self) -> str:
        """Return what has come of a value that is not put out, and forget it."""
        text, self._parts = "".join(self._parts), []
        return text

    def end(self) -> str | None:
        """End the value. Return its text if it was not put out; it is to be converted."""
        self._stream.is_plain = False
        if self.is_begun:
            self._stream.write('"')
            return None
        text = self._without_break("".join(self._parts))
        if self._breaks == "pair" and len(text) > 1 and text[0] == text[-1] == "\n":
            return text[1:-1]
        return text.removesuffix("\n").removesuffix("\r") if self._breaks == "layout" else text

    def _without_break(self, text: str) -> str:
        if self._breaks == "layout" or (self._breaks == "first" and text[:1] in ("\r", "\n")):
            self._breaks = "layout"
            text = text.removeprefix("\r").removeprefix("\n")
        return text

    def _is_known_text(self) -> bool:
        begun = "".join(self._parts)
        if (self._breaks == "pair" and begun[0] == "\n") or (
            self.is_text is None and len(begun) > MAX_UNDECIDED
        ):  # what is at its end tells
            self.is_text = False
        elif self.is_text is None and begun.strip():
            schema, root = self._schema, self._stream.parameters
            self.is_text = is_text(begun, schema, root, untyped=self._untyped) or None
        self._parts = [begun]
        return self.is_text is True and (bool(begun.strip()) or len(begun) > MAX_UNDECIDED)


class StreamedSyntax(CallSyntax):
    """A notation that is read by a `CallStream`; what begins as JSON is read as JSON."""

    @abstractmethod
    def reader(self, tools: ToolSet) -> CallStream:
        """Make what reads one body."""

    def stream(self, body: str, tools: ToolSet) -> CallStream | None:
        return self.reader(tools) if body.lstrip()[:1] not in ("", "{", "[") else None

    def decode_other(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls of a body in another notation than the family's own."""
        return OBJECTS.decode(body, tools) if body.lstrip()[:1] in ("{", "[") else ()

    def decode(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        stream = self.stream(body, tools)
        calls = [] if stream is None else folded([*stream.feed(body), *stream.finish()])
        return calls or self.decode_other(body, tools)


def folded(pieces: Iterable[CallPiece]) -> list[DecodedCall]:
    """Return the calls that were put out and have ended."""
    calls: list[DecodedCall] = []
    name, arguments = "", list[str]()
    for piece in pieces:
        match piece:
            case CallName(name):
                arguments = []
            case None:
                calls.append(DecodedCall(name, "".join(arguments)))
            case str():
                arguments.append(piece)
    return calls
