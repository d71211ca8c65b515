"""Calls that a model writes without its family's markers: the whole answer is JSON, as Qwen2.5-Coder often has it.

    {"name": "f", "arguments": {…}}                     one, several, or a list, on one line or on many
    ```json … ```   <tools> … </tools>   <function> … </function>      with such JSON inside

Only a call to an offered tool is one, and only where nothing but white space is around: so nothing of it can be put
out before the answer ends, and all of it is text from the first character that does not fit.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.block_format import CallBlock
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, JsonSpan, beginnings
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx_backend.conversation.dialects.base import Piece
    from mlx_backend.conversation.tools import ToolSet

MAX_LENGTH = 2**18
"""Characters that are held. What is longer is text."""

_TAGS = ("tools", "tool", "function", "functions", "function_call", "tool_call", "tool_calls")
_KEYS = ("name", "type", "function", "parameters", "arguments", "id")
_JSON = rf"\s*(?:\[\s*)?(?:\{{\s*(?:\"(?:{'|'.join(beginnings(key, '(?:".*)?') for key in _KEYS)})?)?)?"
_HEAD = re.compile(
    "|".join(
        [
            _JSON,
            beginnings("```", f"(?:{beginnings('json', _JSON)}|{_JSON})"),
            *(beginnings(f"<{tag}>", _JSON) for tag in _TAGS),
        ]
    ),
    re.DOTALL,
)
_BETWEEN = re.compile(r"(?:[\s,;\]}]|```(?:json|(?=[^j]))|</?\w{1,32}>)*")
_UNFINISHED = re.compile(r"`{1,3}|```j(?:so?)?|</?\w{0,32}")
_OBJECTS = JsonObjects(needs_arguments=True)
_CALL_KEYS = {*_KEYS, "tool_call_id", "index"}


class LoneSpan:
    """Follows a text of JSON values and what may stand around them; the head is the syntax's to check."""

    __slots__ = ("_length", "_unfinished", "_value", "values")

    def __init__(self) -> None:
        self.values: list[tuple[int, int]] = []
        """Where the values begin and end; an open one ends at -1."""
        self._value = JsonSpan()  # the open one
        self._length = 0  # of all text so far
        self._unfinished = ""  # between values: the beginning of what may stand there

    @property
    def is_open(self) -> bool:
        """Whether the text ends within a value."""
        return bool(self.values) and self.values[-1][1] < 0

    def first_wrong(self, text: str) -> int | None:
        """Take a piece; return the first character of it that has no place, None if there is none."""
        at = 0
        while at < len(text):
            if self.is_open:
                end = self._value.end(text[at:])
                if end < 0:
                    break
                at += end
                self.values[-1] = self.values[-1][0], self._length + at
            else:
                held = self._unfinished
                between = held + text[at:]
                match = _BETWEEN.match(between)
                rest = match.end() if match else 0
                self._unfinished = ""
                at += rest - len(held)
                if between[rest : rest + 1] in ("{", "["):
                    self.values.append((self._length + at, -1))
                elif _UNFINISHED.fullmatch(between, rest):
                    self._unfinished = between[rest:]
                    break
                elif rest < len(between):
                    return max(at, 0)
        self._length += len(text)
        return 0 if self._length > MAX_LENGTH else None


class UnwrappedCalls(CallSyntax):
    """Reads such calls. Nothing writes them."""

    head = _HEAD

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return _OBJECTS.encode(name, arguments)

    def first_name(self, body: str) -> tuple[str, int] | None:
        """Return the name, if it is the first or, after a type, the second key."""
        begins = _begin(body)
        named = _OBJECTS.first_name(body[begins:])
        return (named[0], named[1] + begins) if named else None

    def is_open(self, body: str) -> bool:
        """Whether a value is open that cannot be read as it is."""
        span = _spanned(body)
        return span.is_open and not _closed(body[span.values[-1][0] :])

    def is_whole(self, body: str) -> bool:
        """Whether no value is open, and there is one."""
        span = _spanned(body)
        return bool(span.values) and not span.is_open

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls: of all values, or none."""
        calls: list[DecodedCall] = []
        for start, end in _spanned(body).values:
            value = body[start:end] if end >= 0 else _closed(body[start:]) or body[start:]
            found = _OBJECTS.decode(value, tools) if _is_call(value) else []
            if not found:
                return []
            calls += found
        return calls


UNWRAPPED = CallBlock(syntax=UnwrappedCalls(), is_alone=True)


def _spanned(body: str) -> LoneSpan:
    span = LoneSpan()
    span.first_wrong(body)
    return span


def _begin(body: str) -> int:
    match = _BETWEEN.match(body)
    return match.end() if match else 0


def _closed(text: str) -> str:
    """Close the brackets around whole calls; return "" if more is missing."""
    for missing in ("}", "]", "}]"):
        try:
            json.loads(text + missing, strict=False)
        except (ValueError, RecursionError):
            continue
        return text + missing
    return ""


def _is_call(text: str) -> bool:
    """Whether a value has the keys of calls and no others, as a tool's definition that is shown has."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return True  # what is cut, or is to be repaired
    return all(isinstance(each, dict) and set(each) <= _CALL_KEYS for each in _objects(value))


def _objects(value: Any) -> Iterator[Any]:
    for each in value if isinstance(value, list) else [value]:
        yield each
        if isinstance(each, dict) and isinstance(each.get("function"), dict):
            yield each["function"]
