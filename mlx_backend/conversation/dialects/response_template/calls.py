"""The calls of a response template: a `CallSyntax` made of its `tool_calls`.

Knows the text between two markers; which markers these are is the format's (`fields`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import convert, property_schema, types_of
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, StreamedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.response_template.contents import Untyped, transformed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.dialects.response_template.contents import Content
    from mlx_backend.conversation.dialects.response_template.patterns import Pattern
    from mlx_backend.conversation.tools import ToolSet

_OBJECTS = JsonObjects(around=("", ""))


class TemplateCalls(CallSyntax):
    """`beginning` stands before the content and `ending` behind it; `transform` makes calls of both."""

    def __init__(
        self, beginning: Pattern, ending: Pattern, content: Content, transform: Any, *, each: bool
    ) -> None:
        self._beginning, self._ending, self._content = beginning, ending, content
        self._transform, self._each = transform, each
        self.head = re.compile(beginning.every_beginning(content.head), re.DOTALL)
        function = transform.get("function", transform) if isinstance(transform, dict) else None
        self._is_object = transform is None or function == "{content}" or transform == "{content}"
        self._name = ""
        if isinstance(function, dict) and function.get("arguments") == "{content}":
            self._name = str(function.get("name", "")).strip("{}")
        self.is_json = (
            content.is_json and not each and not ending.parts and (self._is_object or bool(self._name))
        )

    def decode(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls, with the types that their schemas say where the text has none."""
        begun = self._beginning.match(body)
        if begun is None or not begun.is_whole:
            return []
        text = self._ending.without_end(body[begun.end :])
        try:
            value = self._calls(self._content.decode(text), begun.captures)
        except (ValueError, RecursionError):
            return self._broken(text, begun.captures)
        found = _OBJECTS.decode(json.dumps(value), tools) if isinstance(value, dict | list) else []
        return [DecodedCall(call.name, _typed(call, value, tools), call.id) for call in found]

    def begin(self, body: str) -> StreamedCall | None:
        """Find where JSON arguments begin."""
        if not self.is_json:
            return None
        begun = self._beginning.match(body)
        if begun is None or not begun.is_whole:
            return None
        rest = body[begun.end :]
        at = begun.end + len(rest) - len(rest.lstrip())
        if self._is_object:
            call = _OBJECTS.begin(body[at:])
            return StreamedCall(call.name, at + call.arguments_at, call.id) if call else None
        name = begun.captures.get(self._name, "").strip()
        return StreamedCall(name, at) if name and body[at : at + 1] == "{" else None

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call."""
        value: Any = dict(arguments) if self._name else {"name": name, "arguments": dict(arguments)}
        if self._each:
            value = [_inverted(self._transform, name, dict(arguments))]
        elif not self._name and not self._is_object:
            inverted = _inverted(self._transform, name, dict(arguments))
            value = inverted.get("content", value)
        captures = {self._name: name} if self._name else {}
        begun, ended = self._beginning.written(captures), self._ending.written({})
        return (Piece(f"{begun}{self._content.encode(value)}{ended}"),)

    def _calls(self, value: Any, captures: Mapping[str, str]) -> Any:
        if self._each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("a list of objects is expected")
            return [transformed(self._transform, {**captures, **item}) for item in value]
        if self._transform is None:
            return value
        return transformed(self._transform, {**captures, "content": value})

    def _broken(self, text: str, captures: Mapping[str, str]) -> Sequence[DecodedCall]:
        """Return a call whose arguments are not what they should be, as they were written."""
        name = captures.get(self._name, "").strip()
        return [DecodedCall(name, text.strip())] if name else []


class JsonTemplateCalls(TemplateCalls):
    """Those whose arguments are JSON as it stands: they are put out as they come, and can be held to a schema."""


def _typed(call: DecodedCall, value: Any, tools: ToolSet) -> str:
    """Give bare texts their types. JSON has its own."""
    written = _untyped_arguments(value)
    if not written:
        return call.arguments
    parameters = tools.parameters(tools.offered_name(call.name))
    arguments = dict(written)
    for key, text in written.items():
        schema = property_schema(parameters, key)
        if isinstance(text, Untyped):
            arguments[key] = convert(str(text), schema, parameters)
        elif isinstance(text, list) and "array" not in types_of(schema, parameters):
            arguments[key] = [convert(str(item), schema, parameters) for item in text]
    return to_json(arguments)


def _untyped_arguments(value: Any) -> Mapping[str, Any]:
    """Return the arguments of a single call if any of them is bare text."""
    match value:
        case {"function": {"arguments": dict(arguments)}} | {"arguments": dict(arguments)}:
            items = [
                item for each in arguments.values() for item in (each if isinstance(each, list) else [each])
            ]
            return arguments if any(isinstance(item, Untyped) for item in items) else {}
    return {}


def _inverted(transform: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values whose transform is a call of this name with these arguments."""
    function = transform.get("function", transform) if isinstance(transform, dict) else {}
    values: dict[str, Any] = {}
    for key, value in (("name", name), ("arguments", arguments)):
        placeholder = function.get(key) if isinstance(function, dict) else None
        if isinstance(placeholder, str) and placeholder.startswith("{"):
            *path, last = placeholder.strip("{}").split(".")
            inner = values
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = value
    return values
