"""Calls as Python: parsed with `ast`, and never evaluated.

    [get_age(name="Ann", years=3), look()]      LFM2, Llama
    get_age(name="Ann")\\nlook()                 Olmo 3, Gemma 3's ```tool_code
    print(default_api.get_age("Ann", 3))        Gemma 3
    get_age --name Ann                          Gemma 3 as a shell would have it

Positional arguments get the names of the schema's parameters, in their order. Values are literals (JSON's `true`,
`false` and `null` are read, too); what would have to be computed is no call.
"""

from __future__ import annotations

import ast
import keyword
import re
import shlex
from collections import deque
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import (
    convert,
    is_json_type,
    offered_property,
    property_names,
    property_schema,
    types_of,
)
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx_backend.conversation.dialects.calls.base import StreamedCall
    from mlx_backend.conversation.tools import ToolSet

MAX_CODE = 2_000_000
"""Characters of code."""
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_KEYWORD_ARGUMENT = re.compile(rf"(?<=[(,])(\s*)({'|'.join(keyword.kwlist)})(?=\s*=(?!=))")
_KEYWORD_MARK = "_is_no_keyword_"
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = "\\'\"abfnrtvxuUN01234567\n"
# Strings and comments; a string that is open goes on to the end.
_STRINGS = re.compile(
    r"#[^\n]*|\"\"\"(?:[^\\\"]|\\.|\"(?!\"\"))*+(?:\"\"\")?|'''(?:[^\\']|\\.|'(?!''))*+(?:''')?"
    r"|\"(?:[^\\\"]|\\.)*+\"?|'(?:[^\\']|\\.)*+'?",
    re.DOTALL,
)
_AFTER_STRING = re.compile(
    r"\s*(?:[)\]}:#]|\Z|,\s*(?:[\"'\[{(*)\]}\d-]|[A-Za-z_]\w*\s*=|(?i:true|false|none|null)\b))"
)
_PADDED = re.compile(r"(?<![\w.'\"])0\d+(?![\w.])")
_FIRST_CALL = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]{0,255})\s*\(")
_FENCE = re.compile(r"\A\s*```(?:\w{1,16})?\s*\n?|\n?\s*```\s*\Z")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*\Z")
_OBJECTS = JsonObjects()


class PythonicCalls(CallSyntax):
    """`in_list` is how it is written; lists, lines and single calls are read."""

    def __init__(
        self, *, in_list: bool = True, has_shell_style: bool = False, around: tuple[str, str] = ("", "")
    ) -> None:
        self.head = None if has_shell_style else re.compile(r"\s*(?:[A-Za-z_\[{(#].*)?", re.DOTALL)
        self.in_list = in_list
        self._around = around
        self._has_shell_style = has_shell_style

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call; keys that are no identifiers go into a dictionary."""
        words = {
            key: value
            for key, value in arguments.items()
            if key.isidentifier() and not keyword.iskeyword(key)
        }
        others = {key: value for key, value in arguments.items() if key not in words}
        written = [f"{key}={value!r}" for key, value in words.items()]
        if others:
            written.append(f"**{others!r}")
        call = f"{name}({', '.join(written)})"
        before, after = self._around
        return (Piece(f"{before}{f'[{call}]' if self.in_list else call}{after}"),)

    def first_name(self, body: str) -> tuple[str, int] | None:
        """Return the first call's name."""
        match = _FIRST_CALL.match(body)
        return (match[1], match.end()) if match else None

    def is_open(self, body: str) -> bool:
        """Whether a string is open."""
        quotes = [match[0] for match in _STRINGS.finditer(body)]
        return bool(quotes) and quotes[-1][0] in "\"'" and not _is_closed(quotes[-1])

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls, all of them or none."""
        text = _FENCE.sub("", body).strip()
        if text[:1] == "{" or re.match(r"\[\s*\{", text):
            return _OBJECTS.decode(text, tools)
        try:
            nodes = list(_call_nodes(_parse(text)))
            return [_decoded(node, tools) for node in nodes]
        except _NoCallError:
            return _shell_calls(text, tools) if self._has_shell_style else []


class TaggedCalls(CallSyntax):
    """Llama's `<|python_tag|>`: JSON after it, or the call of a built-in tool, `search.call(query="…")`."""

    def __init__(self, objects: JsonObjects) -> None:
        self._objects, self._python = objects, PythonicCalls(in_list=False)

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call as JSON."""
        return self._objects.encode(name, arguments)

    def begin(self, body: str) -> StreamedCall | None:
        """Find the arguments of JSON."""
        return self._objects.begin(body)

    def is_whole(self, body: str) -> bool:
        """Whether the last bracket of JSON is closed."""
        return body.lstrip()[:1] != "{" or self._objects.is_whole(body)

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls; a program is none."""
        if body.lstrip()[:1] == "{":
            return self._objects.decode(body, tools)
        calls = self._python.decode(body.split("<|")[0], tools)
        is_program = any(
            tools.are_known and tools.offered_name(call.name) not in tools.names for call in calls
        )
        return [] if is_program else calls


def _is_closed(string: str) -> bool:
    quote = string[0] * 3 if string[:3] in ('"""', "'''") else string[0]
    inner = string[len(quote) :]
    if not inner.endswith(quote):
        return False
    escapes = len(inner) - len(quote) - len(inner[: -len(quote)].rstrip("\\"))
    return escapes % 2 == 0


class _NoCallError(Exception):
    """This is no call, or one whose arguments would have to be computed."""


def _parse(text: str) -> ast.Module:
    if len(text) > MAX_CODE:
        raise _NoCallError
    # Python warns of escapes that it does not know: their backslash is a character.
    text = _ESCAPE.sub(lambda match: match[0] if match[1] in _KNOWN_ESCAPES else f"\\{match[0]}", text)
    try:
        return ast.parse(text)
    except SyntaxError:
        text = _repaired(text)
    except (ValueError, MemoryError, RecursionError) as error:
        raise _NoCallError from error
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _NoCallError from error


def _repaired(text: str) -> str:
    """Escape line breaks and quotation marks in strings; mark arguments whose names are Python's keywords.

    A number that Python does not know becomes a string: `07`.
    """
    parts: list[str] = []
    quote, start, at = "", 0, 0
    while at < len(text):
        character = text[at]
        if quote and character == "\\":
            at += 2
            continue
        if quote and text.startswith(quote, at):
            string = text[start:at]
            parts.append(string.replace("\n", "\\n") if len(quote) == 1 else string)
            if len(quote) == 3 or _AFTER_STRING.match(text, at + 1):
                quote = ""
            else:
                parts.append("\\")  # this one is part of the string
            start = at
            at += 1
            continue
        if not quote and character in "\"'":
            parts.append(_repaired_code(text[start:at]))
            quote = character * 3 if text.startswith(character * 3, at) else character
            start, at = at, at + len(quote)
            continue
        at += 1
    rest = text[start:]
    return "".join([*parts, rest if quote else _repaired_code(rest)])


def _repaired_code(text: str) -> str:
    return _PADDED.sub(r"'\g<0>'", _KEYWORD_ARGUMENT.sub(rf"\1{_KEYWORD_MARK}\2", text))


def _call_nodes(module: ast.Module) -> Iterator[ast.Call]:
    if not module.body:
        raise _NoCallError
    for statement in module.body:
        match statement:
            case ast.Expr(value=value) | ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                yield from _calls_in(value)
            case ast.Import() | ast.ImportFrom() | ast.Pass():
                continue
            case _:
                raise _NoCallError


def _calls_in(node: ast.expr) -> Iterator[ast.Call]:
    match node:
        case ast.List(elts=[_, *_] as elements) | ast.Tuple(elts=[_, *_] as elements):
            for element in elements:
                yield from _calls_in(element)
        case ast.Await(value=value):
            yield from _calls_in(value)
        case ast.Call(func=ast.Name(id="print"), args=[_, *_] as printed) if any(
            isinstance(each, ast.Call | ast.Await) for each in printed
        ):
            for each in printed:
                if isinstance(each, ast.Call | ast.Await):
                    yield from _calls_in(each)
        case ast.Call(func=ast.Name(id="print")):  # of a result
            return
        case ast.Call():
            yield node
        case ast.Constant(value=str()):  # a remark
            return
        case _:
            raise _NoCallError


def _decoded(node: ast.Call, tools: ToolSet) -> DecodedCall:
    name = _dotted(node.func)
    if name not in tools.names:
        name = name.removeprefix("default_api.")  # the namespace that Gemma's guide gives all tools
    if name not in tools.names and name.endswith(".call"):  # Llama's built-in tools
        name = name.removesuffix(".call")
    parameters = tools.parameters(tools.offered_name(name))
    names = property_names(parameters)
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(node.args):
        value = _value(argument)
        if isinstance(value, dict) and len(node.args) == 1 and (not names or value.keys() <= set(names)):
            arguments.update(value)
        elif position < len(names):
            arguments[names[position]] = value
        else:
            raise _NoCallError
    for word in node.keywords:
        value = _value(word.value)
        if word.arg is not None:
            arguments[offered_property(parameters, word.arg.removeprefix(_KEYWORD_MARK))] = value
        elif isinstance(value, dict):
            arguments.update(value)
        else:
            raise _NoCallError
    typed = {
        key: _fitted(value, property_schema(parameters, key), parameters) for key, value in arguments.items()
    }
    return DecodedCall(name, to_json(typed))


def _dotted(node: ast.expr) -> str:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise _NoCallError
    return ".".join([node.id, *reversed(names)])


class _Word(str):
    """A name where a value stands: a text without quotation marks."""


def _value(node: ast.expr, depth: int = 0) -> Any:
    if depth > 100:
        raise _NoCallError
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            if isinstance(value, float) and value - value != 0:  # infinite
                raise _NoCallError
            return value
        case ast.JoinedStr(values=[ast.Constant(value=str() as text)]):
            return text
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return number
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_value(element, depth + 1) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {
                _key(key, depth): _value(value, depth + 1) for key, value in zip(keys, values, strict=True)
            }
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(id=name):
            return _Word(name)
    raise _NoCallError


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:
        raise _NoCallError
    key = _value(node, depth + 1)
    return key if isinstance(key, str) else to_json(key)


def _fitted(value: Any, schema: Any, root: Any) -> Any:
    """Give a text the type of its schema where that has no texts: models put numbers into quotation marks."""
    types = types_of(schema, root)
    if isinstance(value, str) and types and "string" not in types:
        converted = convert(value, schema, root)
        return converted if any(is_json_type(converted, name) for name in types) else str(value)
    return value


def _shell_calls(text: str, tools: ToolSet) -> list[DecodedCall]:
    """Read lines as a shell would: `get_age --name Ann`, `get_age name=Ann`, `get_age Ann`."""
    calls: list[DecodedCall] = []
    for line in text.splitlines():
        try:
            command, *words = shlex.split(line) or [""]
        except ValueError:
            return []
        if not command:
            continue
        name = tools.offered_name(command)
        if not _IDENTIFIER.match(command) or (name not in tools.names and (tools.are_known or not words)):
            return []
        arguments = _shell_arguments(words, tools.parameters(name))
        if arguments is None:
            return []
        calls.append(DecodedCall(command, to_json(arguments)))
    return calls


def _shell_arguments(words: list[str], parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    names = property_names(parameters)
    arguments: dict[str, Any] = {}
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        key, equals, text = word.partition("=")
        if word.startswith("-"):
            key = key.lstrip("-")
            key = key if key in names else key.replace("-", "_")
            if not equals:
                is_flag = not waiting or (waiting[0].startswith("--"))
                text = "true" if is_flag else waiting.popleft()
        elif not equals:
            left = [name for name in names if name not in arguments]
            if not left:
                return None
            key, text = left[0], word
        if not key:
            return None
        schema = property_schema(parameters, key)
        arguments[key] = convert(text, schema, parameters, untyped="json")
    return arguments
