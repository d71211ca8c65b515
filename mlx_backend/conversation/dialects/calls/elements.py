"""MiniMax M3's calls: an element for each value, in each other, each tag after the marker `]<]minimax[>[`.

    ]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>

An element that holds others is an object, or a list where its schema says so (its elements are then `<item>`s). Values
have no types: the schema gives them theirs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import (
    convert,
    property_names,
    property_schema,
    resolve,
    types_of,
)
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import to_json
from mlx_backend.conversation.dialects.calls.stream import ESCAPED, CallStream, OpenValue, StreamedSyntax
from mlx_backend.conversation.json_values import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.dialects.calls.stream import Reading
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
# What may become one.
_BEGUN = re.compile(r"\](?:<(?:\](?:[a-z]{0,7}|minimax\[(?:>(?:\[\s{0,8}(?:<[^<>]{0,600})?)?)?)?)?)?\Z")

_LITERALS = {"true": True, "false": False, "null": None}

type _Element = str | list[tuple[str, _Element]]
type _Stack = list[tuple[str, list[str], list[tuple[str, _Element]]]]


class ElementCalls(StreamedSyntax):
    """A call's parameters are elements with their names."""

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        text = f'\n{NAMESPACE}<invoke name="{name}">{_written(dict(arguments))}{NAMESPACE}</invoke>\n'
        return _pieces(text)

    def is_open(self, body: str) -> bool:
        """Whether the last tag opened a value."""
        last = body.rfind(NAMESPACE)
        tag = _TAG.match(body, last) if last >= 0 else None
        return tag is None or not (tag["close"] or tag["name"] == "invoke")

    def reader(self, tools: ToolSet) -> CallStream:
        return _ElementStream(tools)


class _ElementStream(CallStream):
    """Reads elements. One that is written several times in a row is a list, so it waits for the next one's name."""

    tag, begun_tag = _TAG, _BEGUN
    tag_start = "]"
    special = ESCAPED + tag_start

    __slots__ = ("_waiting",)

    def __init__(self, tools: ToolSet) -> None:
        super().__init__(tools)
        self._waiting: list[tuple[str, _Element]] = []  # of one name

    def read(self) -> Reading:
        while tag := (yield from self.next_tag()):
            if tag["name"] == "invoke":
                self._put_waiting()
                self.end_call()
                if not tag["close"] and (name := (tag["value"] or "").strip()):
                    self.begin_call(name)
            elif self.name and not tag["close"] and tag["name"] != "tool_call":
                yield from self._read_element(tag["name"])
        self._put_waiting()
        self.end_call()

    def _read_element(self, key: str) -> Reading:
        if self._waiting and self._waiting[0][0] != key:
            self._put_waiting()
        types = types_of(property_schema(self.parameters, key), self.parameters)
        value = OpenValue(self, key, untyped="text", may_be_text=bool(types) and "array" not in types)
        # The elements that are open: name, text so far, children.
        stack: _Stack = [("", [], []), (key, [], [])]
        while len(stack) > 1:
            tag = yield from self.next_tag(
                value.add if value.is_begun or len(stack) == 2 else stack[-1][1].append
            )
            element = tag["name"] if tag else "invoke"
            if tag and value.is_begun and not tag["close"] and element not in RESERVED_NAMES:
                if element in property_names(self.parameters):  # a closing tag is missing
                    self.text = tag[0] + self.text
                    break
                value.add(tag[0])
            elif element == "invoke":
                self.text = (tag[0] if tag else "") + self.text
                break
            elif tag is None or element == "tool_call":
                continue
            elif not tag["close"]:
                if len(stack) > MAX_DEPTH:
                    self.name = ""  # no call
                    break
                if len(stack) == 2:
                    stack[1][1].append(value.taken())
                stack.append((element, [], []))
            elif any(element == opened for opened, _, _ in stack[1:]):
                while len(stack) > 2 and stack[-1][0] != element:
                    _close(stack)
                if len(stack) == 2:
                    break
                _close(stack)
        text = value.end()
        if text is None:
            return
        stack[1][1].append(text)
        while len(stack) > 1:
            _close(stack)
        self._waiting += stack[0][2]

    def _put_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.name:
            for key, value in _object(waiting, self.parameters, self.parameters).items():
                self.put(key, value)


def _close(stack: _Stack) -> None:
    name, texts, children = stack.pop()
    text = "".join(texts)
    if children and text.strip():
        children.append(("$text", text))
    stack[-1][2].append((name, children or text))


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
