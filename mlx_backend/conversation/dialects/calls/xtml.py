"""Kimi K3's calls: elements of control tokens, an argument with its type in each.

    <|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
    <|close|>call<|sep|>

Texts are raw; other types are JSON. In attributes `&` and `"` are escaped.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import parse_json
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import to_json
from mlx_backend.conversation.dialects.calls.stream import CallStream, OpenValue, StreamedSyntax

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.dialects.calls.stream import Reading
    from mlx_backend.conversation.tools import ToolSet

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
CALL_OPENER, CALL_CLOSER = f"{OPEN}call", f"{CLOSE}call{SEPARATOR}"

_TAG = re.compile(
    r"<\|(?P<kind>open|close)\|>\s?(?P<element>call|argument|json)\b(?P<attributes>[^<]{0,1024}?)\s?<\|sep\|>"
)
# What may become one.
_BEGUN = re.compile(
    r"<(?:\|[a-z]{0,5}|\|(?:open|close)\||\|(?:open|close)\|>\s?[a-z]{0,8}"
    r"|\|(?:open|close)\|>\s?(?:call|argument|json)\b[^<]{0,1024}(?:<(?:\|[a-z]{0,3}\|?)?)?)?\Z"
)
_ATTRIBUTE = re.compile(r'(\w{1,32})\s*=\s*"([^"]*)"')


class XtmlCalls(StreamedSyntax):
    """Typed arguments; or all of them as one JSON object."""

    counters: Mapping[str, str] = MappingProxyType({'index="1"': 'index="[0-9]{1,3}"'})

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        pieces = [*_tag(f'call tool="{_escaped(name)}" index="1"')]
        for key, value in arguments.items():
            kind = _type_of(value)
            pieces += _tag(f'argument key="{_escaped(key)}" type="{kind}"')
            pieces.append(Piece(value if isinstance(value, str) else to_json(value)))
            pieces += _tag("argument", CLOSE)
        return tuple(piece for piece in (*pieces, *_tag("call", CLOSE)) if piece.text)

    def is_open(self, body: str) -> bool:
        """Whether an argument is open."""
        return body.rfind(f"{OPEN}argument") > body.rfind(f"{CLOSE}argument")

    def reader(self, tools: ToolSet) -> CallStream:
        return _XtmlStream(tools)


class _XtmlStream(CallStream):
    """Reads elements. An argument ends at its closing tag, or with the call."""

    tag, begun_tag = _TAG, _BEGUN

    __slots__ = ()

    def read(self) -> Reading:
        while tag := (yield from self.next_tag()):
            element, closes, attributes = (
                tag["element"],
                tag["kind"] == "close",
                _attributes(tag["attributes"]),
            )
            if element == "call":
                self.end_call()
                if not closes and (name := attributes.get("tool", "")):
                    self.begin_call(name)
            elif not closes and self.name:
                yield from self._read_value(
                    element, attributes.get("key", ""), attributes.get("type", "string")
                )
        self.end_call()

    def _read_value(self, element: str, key: str, kind: str) -> Reading:
        is_text = element == "argument" and kind == "string" and bool(key)
        value = OpenValue(self, key, untyped="text", may_be_text=is_text, is_text=is_text)
        while tag := (yield from self.next_tag(value.add)):
            if tag["element"] == "call":
                self.text = tag[0] + self.text
                break
            if tag["kind"] == "close" and tag["element"] == element:
                break
            value.add(tag[0])
        text = value.end()
        if text is None:
            return
        found: Any = text
        if not is_text:
            try:
                found = parse_json(text)
            except ValueError:
                found = text
        if element == "json" and isinstance(found, dict):
            for name, item in found.items():
                self.put(name, item)
        elif key:
            self.put(key, found)


def _tag(content: str, kind: str = OPEN) -> list[Piece]:
    return [Piece(kind, marker=True), Piece(content), Piece(SEPARATOR, marker=True)]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "number"


def _attributes(text: str) -> dict[str, str]:
    found = _ATTRIBUTE.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
