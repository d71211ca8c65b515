"""JSON values: how error messages name and quote them, and how deep they may nest."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
"""Levels. Tool schemas of real applications have under 20; Python's own recursion ends near 1,000."""


_NESTING = (dict, list)


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested in each other more than `MAX_DEPTH` levels. Does not recurse."""
    level = [value] if isinstance(value, _NESTING) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTING)
        ]
    return bool(level)


_KEYWORDS = frozenset(("properties", "items", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"))
_OF_SCHEMA = _KEYWORDS | {"type", "schema", "json_schema"}


def unwrapped_schema(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return a JSON schema without what people paste around it, and what that says of it.

    That is `{"name": …, "schema": …}`, a whole response_format, or one in the other.
    """
    words: dict[str, Any] = {}
    while isinstance(value, dict) and value.get("type", "json_schema") == "json_schema":
        inner = value.get("schema")
        if (
            inner is None
            and isinstance(format := value.get("json_schema"), dict)
            and _OF_SCHEMA & format.keys()
        ):
            inner = format
        if not isinstance(inner, dict | bool) or _KEYWORDS & value.keys():
            break
        words |= {name: value[name] for name in ("name", "description", "strict") if name in value}
        value = inner
    return value, words


def json_type(value: Any) -> str:
    """Name a value's JSON type for a sentence: "a list", "a string", "null" …"""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return "a number"


def excerpt(value: Any, max_length: int = 80) -> str:
    """Return a value as JSON, cut to `max_length` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
