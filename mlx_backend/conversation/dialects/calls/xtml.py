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
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.tools import ToolSet

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
CALL_OPENER, CALL_CLOSER = f"{OPEN}call", f"{CLOSE}call{SEPARATOR}"

_TAG = re.compile(
    r"<\|(?P<kind>open|close)\|>\s?(?P<element>call|argument|json)\b(?P<attributes>[^<]{0,1024}?)\s?<\|sep\|>"
)
_ATTRIBUTE = re.compile(r'(\w{1,32})\s*=\s*"([^"]*)"')


class XtmlCalls(CallSyntax):
    """Typed arguments; or all of them as one JSON object."""

    counters: Mapping[str, str] = MappingProxyType({'index="1"': 'index="[0-9]{1,3}"'})

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call."""
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

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls."""
        calls: list[DecodedCall] = []
        name = ""
        arguments: dict[str, Any] = {}
        opened: tuple[str, str, str, int] | None = None  # element, key, type, where its text begins
        for tag in [*_TAG.finditer(body), None]:
            element, closes = (tag["element"], tag["kind"] == "close") if tag else ("call", True)
            if opened is not None and (element == "call" or (closes and element == opened[0])):
                _put(arguments, opened, body[opened[3] : tag.start() if tag else len(body)])
                opened = None
            attributes = _attributes(tag["attributes"]) if tag else {}
            if element == "call":
                if name:
                    calls.append(DecodedCall(name, to_json(arguments)))
                name, arguments = attributes.get("tool", "") if not closes else "", {}
            elif not closes and opened is None and tag:
                opened = element, attributes.get("key", ""), attributes.get("type", "string"), tag.end()
        return calls


def _put(arguments: dict[str, Any], opened: tuple[str, str, str, int], text: str) -> None:
    element, key, kind, _ = opened
    value: Any = text
    if element == "json" or kind != "string":
        try:
            value = parse_json(text)
        except ValueError:
            value = text
    if element == "json" and isinstance(value, dict):
        arguments.update(value)
    elif key:
        arguments[key] = value


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
