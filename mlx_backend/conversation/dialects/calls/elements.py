"""MiniMax M3's calls: an element for each value, in each other, each tag after the marker `]<]minimax[>[`.

    ]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>

An element that holds others is an object, or a list where its schema says so (its elements are then `<item>`s). Values
have no types: the schema gives them theirs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import convert, property_schema, resolve, types_of
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.json_values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.tools import ToolSet

NAMESPACE = "]<]minimax[>["
ITEM = "item"
"""The name of a list's elements."""
RESERVED_NAMES = frozenset({"invoke", "tool_call"})
"""Names of elements that are no values."""

_TAG = re.compile(
    r"\]<\]minimax\[>\[\s{0,8}<(?P<close>/?)(?P<name>[^\s<>/=]{1,256})"
    r"(?:\s+name\s*=\s*(?P<quote>[\"']?)(?P<value>[^<>\"']{0,256})(?P=quote))?\s?>"
)

_LITERALS = {"true": True, "false": False, "null": None}

type _Element = str | list[tuple[str, _Element]]


class ElementCalls(CallSyntax):
    """A call's parameters are elements with their names."""

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call."""
        text = f'\n{NAMESPACE}<invoke name="{name}">{_written(dict(arguments))}{NAMESPACE}</invoke>\n'
        return _pieces(text)

    def is_open(self, body: str) -> bool:
        """Whether the last tag opened a value."""
        last = body.rfind(NAMESPACE)
        tag = _TAG.match(body, last) if last >= 0 else None
        return tag is None or not (tag["close"] or tag["name"] == "invoke")

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls, with the values that their schemas say."""
        calls: list[DecodedCall] = []
        name = ""
        # The elements that are open: name, text so far, children.
        stack: list[tuple[str, list[str], list[tuple[str, _Element]]]] = []
        at = 0
        for tag in [*_TAG.finditer(body), None]:
            start, element = (tag.start(), tag["name"]) if tag else (len(body), "invoke")
            closes = tag is None or bool(tag["close"])
            if stack:
                stack[-1][1].append(body[at:start])
            at = tag.end() if tag else start
            if element == "invoke" and (closes or (tag and tag["value"] is not None)):
                while len(stack) > 1:
                    _close(stack)
                if name:
                    calls.append(DecodedCall(name, to_json(_arguments(name, stack[0][2], tools))))
                name = tag["value"].strip() if tag and not closes else ""
                stack = [("", [], [])] if name else []
            elif not stack or element == "tool_call":
                continue
            elif not closes:
                if len(stack) > MAX_DEPTH:
                    return []
                stack.append((element, [], []))
            elif any(element == opened for opened, _, _ in stack[1:]):
                while stack[-1][0] != element:
                    _close(stack)
                _close(stack)
        return calls


def _close(stack: list[tuple[str, list[str], list[tuple[str, _Element]]]]) -> None:
    name, texts, children = stack.pop()
    text = "".join(texts)
    if children and text.strip():
        children.append(("$text", text))
    stack[-1][2].append((name, children or text))


def _arguments(name: str, elements: list[tuple[str, _Element]], tools: ToolSet) -> dict[str, Any]:
    parameters = tools.parameters(tools.offered_name(name))
    return _object(elements, parameters, parameters)


def _object(elements: list[tuple[str, _Element]], schema: Any, root: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    repeated: set[str] = set()
    for name, element in elements:
        value = _value(element, property_schema(_container(schema, root, "object"), name), root)
        if name not in result:
            result[name] = value
        elif name in repeated:
            result[name].append(value)
        else:
            result[name] = [result[name], value]
            repeated.add(name)
    return result


def _value(element: _Element, schema: Any, root: Any) -> Any:
    types = types_of(schema, root)
    if isinstance(element, str):
        if not element.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        if not types and (word := element.strip()) in _LITERALS:  # a number could be a text just as well
            return _LITERALS[word]
        return convert(element, schema, root)
    if "array" in types:
        items = _container(schema, root, "array").get("items")
        return [_value(item, items, root) for _, item in element]
    if not types and all(name == ITEM for name, _ in element):
        return [_value(item, {}, root) for _, item in element]
    return _object(element, schema, root)


def _container(schema: Any, root: Any, kind: str) -> Mapping[str, Any]:
    """Return the alternative of a schema that has this type, the schema itself by default."""
    found = resolve(schema, root)
    for word in ("anyOf", "oneOf", "allOf"):
        parts = found.get(word)
        for part in parts if isinstance(parts, list) else ():
            if kind in types_of(part, root):
                return resolve(part, root)
    return found


def _written(value: Any) -> str:
    match value:
        case str():
            return value
        case dict():
            items = [(str(key), item) for key, item in value.items()]
        case list():
            items = [(ITEM, item) for item in value]
        case _:
            return to_json(value)
    return "".join(f"{NAMESPACE}<{name}>{_written(item)}{NAMESPACE}</{name}>" for name, item in items)


def _pieces(text: str) -> tuple[Piece, ...]:
    """The namespace marker is a token of its own."""
    pieces: list[Piece] = []
    for at, part in enumerate(text.split(NAMESPACE)):
        if at:
            pieces.append(Piece(NAMESPACE, marker=True))
        if part:
            pieces.append(Piece(part))
    return tuple(pieces)
