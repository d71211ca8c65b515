"""Puts values into the text of a JSON object, and leaves all else of the text as it is: comments, order and layout.

Reads what editors have in their settings: JSON with comments and with commas after the last value. Objects are merged,
every other value is replaced as a whole, by what the caller makes of the old one and the new.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_BLANK = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
MAX_DEPTH = 100


@dataclass(slots=True)
class _Node:
    """A value and where it stands. Of an object: its members, and what is needed to add one."""

    start: int
    end: int = 0
    value: Any = None
    members: dict[str, _Node] | None = None
    first: int = 0
    """Where the first member begins."""
    comma: int | None = None
    """Where a comma is missing; None where there is one, or no member."""
    tail: int = 0
    """The end of the last that is not white space, before what closes it."""
    items: list[Any] = field(default_factory=list)


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


def with_values(text: str, new: Mapping[str, Any], merge: Callable[[Any, Any], Any]) -> str:
    """Return the text with these values; `merge(old, new)` says what replaces a value that is no object.

    Raises ValueError if the text is no JSON object.
    """
    try:
        start = _blank_end(text, 0)
        root = _read(text, start, 0)
        if root.members is None or _blank_end(text, root.end) != len(text):
            raise ValueError("it is no JSON object")
    except (IndexError, StopIteration, json.JSONDecodeError):
        raise ValueError("it is no JSON") from None
    indent = _indent_of(text, root.first) if root.members else ""
    edits = _edits(text, root, new, merge, indent or "  ")
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _blank_end(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _read(text: str, at: int, depth: int) -> _Node:
    """Read the value that begins here."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    node = _Node(at)
    if text[at] not in "{[":
        node.value, node.end = json.JSONDecoder().raw_decode(text, at)
        return node
    is_object, closer = text[at] == "{", "}" if text[at] == "{" else "]"
    members: dict[str, _Node] = {}
    before, at = at + 1, _blank_end(text, at + 1)
    node.first = at
    while text[at] != closer:
        name = ""
        if is_object:
            if text[at] != '"':
                raise ValueError("it is no JSON")
            name, at = json.JSONDecoder().raw_decode(text, at)
            at = _blank_end(text, at)
            if text[at] != ":":
                raise ValueError("it is no JSON")
            at = _blank_end(text, at + 1)
        value = _read(text, at, depth + 1)
        members[name] = value
        node.items.append(value.value)
        before = node.comma = value.end
        at = _blank_end(text, before)
        if text[at] == ",":
            node.comma, before = None, at + 1
            at = _blank_end(text, before)
        elif text[at] != closer:
            raise ValueError("it is no JSON")
    node.tail, node.end = before + len(text[before:at].rstrip()), at + 1
    node.value = {name: each.value for name, each in members.items()} if is_object else node.items
    node.members = members if is_object else None
    return node


def _edits(
    text: str, node: _Node, new: Mapping[str, Any], merge: Callable[[Any, Any], Any], unit: str
) -> list[_Edit]:
    assert node.members is not None
    edits: list[_Edit] = []
    outer = _indent_of(text, node.start)
    own_line = _indent_of(text, node.first)
    inner = own_line if node.members and own_line != outer else outer + unit
    added: list[str] = []
    for name, wanted in new.items():
        there = node.members.get(name)
        if there is None:
            added.append(f"\n{inner}{json.dumps(name, ensure_ascii=False)}: {_dumped(wanted, unit, inner)}")
        elif there.members is not None and isinstance(wanted, dict):
            edits += _edits(text, there, wanted, merge, unit)
        elif (value := merge(there.value, wanted)) != there.value:
            edits.append(_Edit(there.start, there.end, _dumped(value, unit, inner)))
    if added:
        if node.comma is not None and node.comma < node.tail:
            edits.append(_Edit(node.comma, node.comma, ","))
            comma = ""
        else:
            comma = "," if node.comma is not None else ""
        closing = "" if "\n" in text[node.tail : node.end] else f"\n{outer}"
        edits.append(_Edit(node.tail, node.tail, f"{comma}{','.join(added)}{closing}"))
    return edits


def _dumped(value: Any, unit: str, indent: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{indent}")


def _indent_of(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]
