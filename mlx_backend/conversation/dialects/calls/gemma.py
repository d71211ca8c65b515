"""Gemma 4's calls: `call:f{a:<|"|>text<|"|>,n:1,l:[true,null]}`. FunctionGemma's are the same with `<escape>`.

Keys are bare and texts stand between delimiters of their own, so that nothing in them has to be escaped. Models also
write JSON's quotation marks there; both are read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import convert, is_json_type, property_schema, types_of
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.json_values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx_backend.conversation.tools import ToolSet

_CALL = re.compile(r"\s*(?:call:\s*)?([\w.:/-]{1,256})\s*(?=\{)")
_BLANKS = re.compile(r"[\s,]*")
_KEY = re.compile(r"\s*([^:{}\[\]<>\",]{1,256}?)\s*:")
_QUOTED_KEY = re.compile(r'\s*"((?:[^"\\]|\\.)*)"\s*:')
_BARE = re.compile(r"[^,{}\[\]<]*")
_JSON_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_OBJECTS = JsonObjects()


class GemmaCalls(CallSyntax):
    """`delimiter` stands at both ends of a text."""

    def __init__(self, delimiter: str) -> None:
        self.head = re.compile(r"\s*(?:(?:call:\s*)?[\w.:/-]{0,128}\s*(?:\{.*)?|\[.*)?", re.DOTALL)
        self.delimiter = delimiter

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call."""
        return Piece(f"call:{name}"), *_joined(self._encode(dict(arguments)))

    def is_open(self, body: str) -> bool:
        """Whether the last bracket is open."""
        return not body.rstrip().endswith(("}", "]"))

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls. A value without delimiters that is no JSON is a text."""
        calls: list[DecodedCall] = []
        at = 0
        while match := _CALL.match(body, at):
            reader = _Reader(body, match.end(), self.delimiter)
            try:
                value = reader.value(0)
            except _TooDeep:
                return []
            name = match[1]
            parameters = tools.parameters(tools.offered_name(name))
            typed = {
                key: _fitted(item, property_schema(parameters, key), parameters)
                for key, item in (value if isinstance(value, dict) else {}).items()
            }
            calls.append(DecodedCall(name, to_json(typed)))
            at = reader.at
            separator = _BLANKS.match(body, at)
            at = separator.end() if separator else at
        if not calls and body.lstrip()[:1] in ("{", "["):
            return _OBJECTS.decode(body, tools)
        return calls

    def _encode(self, value: Any) -> Iterator[Piece]:
        match value:
            case str():
                yield Piece(self.delimiter, marker=True)
                yield Piece(value)
                yield Piece(self.delimiter, marker=True)
            case dict():
                yield Piece("{")
                for at, (key, item) in enumerate(value.items()):
                    yield Piece(f"{',' if at else ''}{key}:")
                    yield from self._encode(item)
                yield Piece("}")
            case list():
                yield Piece("[")
                for at, item in enumerate(value):
                    if at:
                        yield Piece(",")
                    yield from self._encode(item)
                yield Piece("]")
            case _:
                yield Piece(to_json(value))


class _TooDeep(Exception):
    pass


class _Bare(str):
    """A value without delimiters."""


class _Reader:
    """Reads a value; what is cut or broken ends where the text does."""

    def __init__(self, text: str, at: int, delimiter: str) -> None:
        self._text, self.at, self._delimiter = text, at, delimiter

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _TooDeep
        text = self._text
        while self.at < len(text) and text[self.at].isspace():
            self.at += 1
        if text.startswith(self._delimiter, self.at):
            start = self.at + len(self._delimiter)
            end = text.find(self._delimiter, start)
            end = len(text) if end < 0 else end
            self.at = min(end + len(self._delimiter), len(text))
            return text[start:end]
        if text[self.at : self.at + 1] == "{":
            return self._object(depth)
        if text[self.at : self.at + 1] == "[":
            return self._list(depth)
        if quoted := _JSON_TEXT.match(text, self.at):
            self.at = quoted.end()
            return _unescaped(quoted)
        bare = _BARE.match(text, self.at)
        end = bare.end() if bare else self.at
        if end < len(text) and text[end] == "<":  # not a delimiter: part of a bare text
            end = min((i for c in ",}]" if (i := text.find(c, end, end + 4096)) >= 0), default=len(text))
        found, self.at = _Bare(text[self.at : end].strip()), end
        return found

    def _object(self, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.at += 1
        while (key := self._key()) is not None:
            result[key] = _plain(self.value(depth + 1)) if depth else self.value(depth + 1)
        return result

    def _key(self) -> str | None:
        text = self._text
        separator = _BLANKS.match(text, self.at)
        self.at = separator.end() if separator else self.at
        if self.at >= len(text) or text[self.at] in "}]":
            self.at += 1
            return None
        if text.startswith(self._delimiter, self.at):
            key = self.value(MAX_DEPTH)
            colon = text.find(":", self.at)
            self.at = len(text) if colon < 0 else colon + 1
            return str(key)
        if quoted := _QUOTED_KEY.match(text, self.at):
            self.at = quoted.end()
            return _unescaped(quoted)
        if bare := _KEY.match(text, self.at):
            self.at = bare.end()
            return bare[1]
        self.at = len(text)
        return None

    def _list(self, depth: int) -> list[Any]:
        result: list[Any] = []
        self.at += 1
        while True:
            separator = _BLANKS.match(self._text, self.at)
            self.at = separator.end() if separator else self.at
            if self.at >= len(self._text) or self._text[self.at] in "]}":
                self.at += 1
                return result
            before = self.at
            result.append(_plain(self.value(depth + 1)))
            if self.at == before:
                self.at = len(self._text)


def _plain(value: Any) -> Any:
    return convert(str(value), {}, untyped="json") if isinstance(value, _Bare) else value


def _fitted(value: Any, schema: Any, root: Any) -> Any:
    if isinstance(value, _Bare):
        return convert(str(value), schema, root, untyped="json")
    types = types_of(schema, root)
    if isinstance(value, str) and types and "string" not in types:
        converted = convert(value, schema, root)
        return converted if any(is_json_type(converted, name) for name in types) else value
    return value


def _unescaped(match: re.Match[str]) -> str:
    try:
        text = convert(f'["{match[1]}"]', {"type": "array"})
    except ValueError:
        return match[1]
    return text[0] if isinstance(text, list) else match[1]


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join neighbouring pieces of plain text."""
    text = ""
    for piece in pieces:
        if piece.marker:
            if text:
                yield Piece(text)
            text = ""
            yield piece
        else:
            text += piece.text
    if text:
        yield Piece(text)
