"""Calls as JSON objects: one, several in a row, or a list.

    {"name": "f", "arguments": {…}}          Hermes, Qwen3, Granite, Ling
    [{"name": "f", "arguments": {…}}, …]     Mistral before 2025, Hunyuan A13B, Nemotron Nano
    {"name": "f", "parameters": {…}}         Llama 3
    [{"tool_name": "f", "parameters": {…}}]  Cohere
    [{"f": {…}}]                             Apertus (`by_name`)

The name may stand after the arguments. An object that is not JSON but names a tool is a call with the arguments as
they were written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import (
    CallSyntax,
    DecodedCall,
    JsonSpan,
    StreamedCall,
    to_json,
)
from mlx_backend.conversation.json_arguments import AFTER_OBJECT, JsonArguments, repair_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.conversation.tools import ToolSet

_NAMES = ("name", "tool_name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OF_CALL = {*_NAMES, "type", "index", "id", "tool_call_id"}
_QUOTED = r"""(?:"(?:[^"\\]|\\.)+"|'(?:[^'\\]|\\.)+')"""


def _key(*names: str) -> str:
    return rf"""["'](?:{"|".join(names)})["']\s*:\s*"""


_NAME = re.compile(rf"{_key(*_NAMES)}({_QUOTED})")
_ARGUMENTS_AT = re.compile(_key(*_ARGUMENTS))
_BETWEEN = re.compile(r"[\s\[\],;]*")
# What may stand before a name: the call's kind, its own id or number, and the object that holds the function.
_BEFORE_NAME = (
    rf"\{{\s*(?:{_key('type', 'index', 'tool_call_id')}(?:{_QUOTED}|\d+)\s*,\s*"
    rf"|{_key('id')}(?P<id>{_QUOTED})\s*,\s*)*(?:{_key('function')}\{{\s*)?"
)
# What may stand between the arguments of two calls in a list: the rest of the first object.
_AFTER_ARGUMENTS = rf"(?:\s*,\s*{_QUOTED}\s*:\s*(?:{_QUOTED}|[\w.+-]+))*[\s\[\],;}}]*"
_NAME_FIRST = re.compile(rf"{_AFTER_ARGUMENTS}{_BEFORE_NAME}{_key(*_NAMES)}(?P<name>{_QUOTED})")
_ARGUMENTS_NEXT = re.compile(rf"""\s*,\s*{_key(*_ARGUMENTS)}(?=[{{"'}}])""")
_BY_NAME = re.compile(rf"[\s\[\],;}}]*(?:\{{\s*)?(?P<name>{_QUOTED})\s*:\s*(?=[{{}}])")
_DECODER = json.JSONDecoder(strict=False)


class JsonObjects(CallSyntax):
    """`name_key`, `arguments_key` and `index_key` are how it is written; every spelling is read.

    `needs_arguments`: an object with a name and nothing else is no call.
    """

    def __init__(
        self,
        *,
        name_key: str = "name",
        arguments_key: str = "arguments",
        in_list: bool = False,
        by_name: bool = False,
        index_key: str = "",
        around: tuple[str, str] = ("\n", "\n"),
        needs_arguments: bool = False,
    ) -> None:
        self.head = re.compile(r"\s*(?:[{\[].*)?", re.DOTALL)
        self._keys = name_key, arguments_key
        self.in_list = in_list
        self._by_name = by_name
        self._index = f'"{index_key}": "0", ' if index_key else ""
        if index_key:
            self.counters = {'"0"': '"[0-9]{1,3}"'}
        self._around = around
        self._needs_arguments = needs_arguments

    def opening(self, name: str) -> str:
        """Write what stands before the arguments."""
        before, _ = self._around
        begins = before + ("[" if self.in_list else "")
        if self._by_name:
            return f"{begins}{{{to_json(name)}: "
        return f'{begins}{{{self._index}"{self._keys[0]}": {to_json(name)}, "{self._keys[1]}": '

    @property
    def closing(self) -> str:
        """What stands after the arguments."""
        _, after = self._around
        return "}" + ("]" if self.in_list else "") + after

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return (Piece(f"{self.opening(name)}{to_json(arguments)}{self.closing}"),)

    def begin(self, body: str) -> StreamedCall | None:
        """Find the arguments after a name. Those that stand before it have to wait for it."""
        if named := _NAME_FIRST.match(body):
            arguments = _ARGUMENTS_NEXT.match(body, named.end())
            own_id = _parse_string(named["id"]) if named["id"] else ""
        else:
            named = arguments = _BY_NAME.match(body) if self._by_name else None
            own_id = ""
        if named is None or arguments is None:
            return None
        name = _parse_string(named["name"])
        if not name or (named is arguments and name in (*_NAMES, *_ARGUMENTS)):
            return None
        return StreamedCall(name, arguments.end(), own_id)

    def first_name(self, body: str) -> tuple[str, int] | None:
        """Return the name, if nothing but what is known stands before it."""
        match = _NAME_FIRST.match(body)
        return (_parse_string(match["name"]), match.end()) if match else None

    def is_open(self, body: str) -> bool:
        span = JsonSpan()
        span.end(body)
        return span.in_string

    def is_whole(self, body: str) -> bool:
        """Whether the last bracket is closed."""
        value = body.strip()
        return JsonSpan().end(value) == len(value)

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls. JSON has types, so the schemas are not needed."""
        calls: list[DecodedCall] = []
        for value in self._objects(body):
            if isinstance(value, str):  # what cannot be repaired
                broken = _decode_broken(value)
                return [*calls, broken] if broken.name else []
            found = self._calls_of(value)
            if not found:
                return []
            calls += found
        return calls

    def _objects(self, body: str) -> Iterator[dict[str, Any] | str]:
        """Take the body apart: its objects, and the rest as text if it is no JSON."""
        at = _end_of(_BETWEEN, body, 0)
        while at < len(body):
            try:
                value, at = _DECODER.raw_decode(body, at)
            except (ValueError, RecursionError):
                if re.fullmatch(r"[\s}\]]*", body[at:]):  # a bracket too many
                    return
                reader = JsonArguments()
                written, rest = reader.read(body[at:])
                try:
                    value = json.loads(written if rest is not None else written + reader.finish())
                except (ValueError, RecursionError):
                    yield body[at:]
                    return
                at = len(body) - len(rest or "")
            if isinstance(value, str):  # JSON in a JSON string
                try:
                    value = json.loads(value, strict=False)
                except (ValueError, RecursionError):
                    return
            yield from (value if isinstance(value, list) else [value])
            at = _end_of(_BETWEEN, body, at)

    def _calls_of(self, value: Any) -> list[DecodedCall]:
        if not isinstance(value, Mapping):
            return []
        inner = value.get("function")
        if isinstance(inner, Mapping):
            value = {**inner, "id": value.get("id", "")}
        name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), "")
        if not name and self._by_name:
            return [
                DecodedCall(key, repair_arguments(to_json(arguments))) for key, arguments in value.items()
            ]
        if not name or (self._needs_arguments and not any(key in value for key in _ARGUMENTS)):
            return []
        flat = {
            key: each for key, each in value.items() if key not in _OF_CALL
        }  # as models write them at times
        arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), flat)
        own_id = value.get("id")
        return [
            DecodedCall(name, repair_arguments(to_json(arguments)), own_id if isinstance(own_id, str) else "")
        ]


def after_object(text: str) -> str:
    """Return what follows the object in which arguments stood, from a text that follows the arguments."""
    try:
        _, at = _DECODER.raw_decode('{"":0' + text.lstrip())
    except (ValueError, RecursionError):
        at = 5
    return text.lstrip()[at - 5 :].lstrip(AFTER_OBJECT)


def _decode_broken(body: str) -> DecodedCall:
    named = _NAME.search(body)
    name = _parse_string(named[1]) if named else ""
    arguments = _ARGUMENTS_AT.search(body)
    written = body[arguments.end() :].strip() if arguments else ""
    return DecodedCall(name, repair_arguments(written) if written.strip(AFTER_OBJECT) else "{}")


def _parse_string(literal: str) -> str:
    try:
        text = json.loads(repair_arguments(literal))
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
