"""Calls as JSON objects: one, several in a row, or a list.

    {"name": "f", "arguments": {…}}          Hermes, Qwen3, Granite, Ling
    [{"name": "f", "arguments": {…}}, …]     Mistral before 2025, Hunyuan A13B, Nemotron Nano
    {"name": "f", "parameters": {…}}         Llama 3
    [{"tool_name": "f", "parameters": {…}}]  Cohere
    [{"f": {…}}]                             Apertus (`by_name`)

The name may stand after the arguments. An object that is not JSON but names a tool is a call with the arguments as
they were written. `JsonCalls` is the codec of such objects in `<tool_call>` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import python_literal
from mlx_backend.conversation.dialects.base import JsonCallCodec, Piece
from mlx_backend.conversation.dialects.calls.base import (
    CallSyntax,
    DecodedCall,
    JsonSpan,
    StreamedCall,
    SyntaxCodec,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.conversation.tools import ToolSet

_NAMES = ("name", "tool_name", "function", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_NAME = re.compile(r'"(?:name|tool_name|function)"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS_AT = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_BETWEEN = re.compile(r"[\s\[\],;]*")
_BEGIN = re.compile(
    r"[\s\[\],;}]*\{\s*"
    r'(?:"type"\s*:\s*"function"\s*,\s*)?(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?'
    r'"(?:name|tool_name)"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_FIRST = re.compile(
    r'[\s\[]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|tool_name)"\s*:\s*(?P<name>"(?:[^"\\]|\\.)+")'
)
_DECODER = json.JSONDecoder(strict=False)


class JsonObjects(CallSyntax):
    """`name_key`, `arguments_key` and `index_key` are how it is written; every spelling is read.

    `streams`: arguments after a name are put out as they come; the call has to have a closer. `needs_arguments`: an
    object with a name and nothing else is no call.
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
        streams: bool = True,
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
        self._streams = streams and not by_name

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
        """Write a call."""
        return (Piece(f"{self.opening(name)}{to_json(arguments)}{self.closing}"),)

    def begin(self, body: str) -> StreamedCall | None:
        """Find the arguments after a name. Those that stand before it have to wait for it."""
        match = _BEGIN.match(body) if self._streams else None
        if match is None:
            return None
        name = _parse_string(match["name"])
        return StreamedCall(name, match.end()) if name else None

    def first_name(self, body: str) -> tuple[str, int] | None:
        """Return the name, if it is the first or, after a type, the second key."""
        match = _NAME_FIRST.match(body)
        return (_parse_string(match["name"]), match.end()) if match else None

    def is_open(self, body: str) -> bool:
        """Whether a string is open."""
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
            if isinstance(value, str):  # what is no JSON
                broken = _decode_broken(value)
                if not broken.name:
                    return [*calls, *self._calls_of(python_literal(value))]
                return [*calls, broken]
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
                if not re.fullmatch(r"[\s}\]]*", body[at:]):  # a bracket too many
                    yield body[at:]
                return
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
                DecodedCall(key, to_json(arguments if arguments is not None else {}))
                for key, arguments in value.items()
            ]
        if not name or (self._needs_arguments and not any(key in value for key in _ARGUMENTS)):
            return []
        arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
        written = arguments if isinstance(arguments, str) else to_json({} if arguments is None else arguments)
        own_id = value.get("id")
        return [DecodedCall(name, written or "{}", own_id if isinstance(own_id, str) else "")]


def is_end_of_object(text: str) -> bool:
    """Whether a text is what may follow the arguments of an object: the rest of it, and of the list it stands in."""
    if not text.strip(" \t\r\n}]),;`"):
        return True
    try:
        value, at = _DECODER.raw_decode('{"":0' + text.lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not text.lstrip()[at - 5 :].strip(" \t\r\n}]),;`")


def _decode_broken(body: str) -> DecodedCall:
    named = _NAME.search(body)
    name = _parse_string(named[1]) if named else ""
    arguments = _ARGUMENTS_AT.search(body)
    return DecodedCall(name, body[arguments.end() :].strip() if arguments else "")


def _parse_string(literal: str) -> str:
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


# What stands in the block where a template teaches another form than JSON (Qwen3-Coder, GLM).
_OTHER_FORMS = ("<function=", "<arg_key>")


class JsonCalls(JsonCallCodec, SyntaxCodec):
    """A block holds one JSON object with the tool's name and its arguments."""

    syntax = JsonObjects()
    opener = "<tool_call>"
    closer = "</tool_call>"

    def is_taught_by(self, template: str) -> bool:
        """Whether a template has the block, and none of the forms that are not JSON."""
        return self.opener in template and not any(form in template for form in _OTHER_FORMS)

    def opening(self, name: str) -> tuple[Piece, ...]:
        """Write the block up to the arguments."""
        spelling = json.dumps(name, ensure_ascii=False)
        return Piece(self.opener, marker=True), Piece(f'\n{{"name": {spelling}, "arguments": ')

    @property
    def closing(self) -> tuple[Piece, ...]:
        """The rest of the block."""
        return Piece("}\n"), Piece(self.closer, marker=True)


JSON_CALLS = JsonCalls()
