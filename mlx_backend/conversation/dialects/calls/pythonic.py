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
    fitted,
    offered_property,
    property_names,
    property_schema,
    types_of,
)
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.stream import ESCAPED, OBJECTS, CallStream, StreamedSyntax

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

    from mlx_backend.conversation.dialects.calls.base import StreamedCall
    from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
    from mlx_backend.conversation.dialects.calls.stream import Reading
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
    r"\s*(?:[)\]}:#]|\Z|,\s*(?:[\"'\[{(*)\]}\d-]|[^\W\d]\w*\s*=|(?i:true|false|none|null)\b))"
)
# After a text that is an argument of its own.
_AFTER_NAMED = re.compile(r"\s*(?:[)#]|\Z|,\s*(?:[)*#]|[^\W\d]\w*\s*=(?!=)))")
_AFTER_POSITIONAL = re.compile(rf"(?!\s*[\]}}:]){_AFTER_STRING.pattern}")
_AFTER_BEGUN = re.compile(r"\s*(?:,\s*(?:[^\W\d]\w*\s*=?)?)?")
_NEXT_STRING = re.compile(r"\s+[\"']")
_CALL = re.compile(r"(?:\s*```\w{0,16}\s*\n)?[\s\[\],;]*([A-Za-z_][\w.]*)\s*\(")
_CALL_BEGUN = re.compile(r"\s*(?:`{1,3}|```\w{0,16}\s*)?[\s\[\],;]*(?:[A-Za-z_][\w.]*\s*)?")
_WORD = re.compile(r"([^\W\d]\w*)\s*=(?!=)(?=[^=])")
_WORD_BEGUN = re.compile(r"(?:[^\W\d]\w{0,255}\s*=?)?")
_BLANKS, _STARS = re.compile(r"\s*"), re.compile(r"\**")
_STRING_MARKS = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_EXPRESSION_MARKS = re.compile(r"[\"'()\[\]{},#]")
_ESCAPED = re.compile(
    r"\\(?:[^xuUN0-7]|x..|u.{4}|U.{8}|N(?:\{[^}]*\}|[^{])|[0-7]{3}|[0-7]{1,2}(?=[^0-7]))", re.DOTALL
)
_MAX_AHEAD = 600
"""Characters that are looked at to tell what comes."""
_PADDED = re.compile(r"(?<![\w.'\"])0\d+(?![\w.])")
_FIRST_CALL = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]{0,255})\s*\(")
_FENCE = re.compile(r"\A\s*```(?:\w{1,16})?\s*\n?|\n?\s*```\s*\Z")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*\Z")


class PythonicCalls(StreamedSyntax):
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
        match = _FIRST_CALL.match(body)
        return (match[1], match.end()) if match else None

    def is_open(self, body: str) -> bool:
        quotes = [match[0] for match in _STRINGS.finditer(body)]
        return bool(quotes) and quotes[-1][0] in "\"'" and not _is_closed(quotes[-1])

    def reader(self, tools: ToolSet) -> CallStream:
        return _PythonStream(tools)

    def stream(self, body: str, tools: ToolSet) -> CallStream | None:
        return self.reader(tools) if body.lstrip()[:1] not in ("", "{") else None

    def decode_other(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls of any other Python, all of them or none."""
        text = _FENCE.sub("", body).strip()
        if text[:1] == "{" or re.match(r"\[\s*\{", text):
            return OBJECTS.decode(text, tools)
        try:
            nodes = list(_call_nodes(_parse(text)))
            return [_decoded(node, tools) for node in nodes]
        except _NoCallError:
            return _shell_calls(text, tools) if self._has_shell_style else []


class _PythonStream(CallStream):
    """Reads calls whose arguments are named, and puts texts out as they come.

    Nothing is put out before the first text: until then, what is unusual is left to Python's own parser, with all of
    the body. A quotation mark within a text ends it only if an argument may end there.
    """

    special = f"{ESCAPED}'"

    __slots__ = ("_held",)

    def __init__(self, tools: ToolSet) -> None:
        super().__init__(tools)
        self._held: list[tuple[str, list[tuple[str, Any]]]] | None = []  # calls before the first text

    def read(self) -> Reading:
        while True:
            while not (begins := _CALL.match(self.text)):
                if self.is_at_end or len(self.text) > _MAX_AHEAD or not _CALL_BEGUN.fullmatch(self.text):
                    if self._held and self.is_at_end and not self.text.strip("`],; \t\r\n"):
                        self._put_held()
                        self.end_call()
                    return
                yield
            if begins[1] == "print":
                return
            self.text = self.text[begins.end() :]
            self.begin_call(_called(begins[1], self.tools))
            if self._held is not None:
                self._held.append((self.name, []))
            if not (yield from self._arguments()):
                return
            if self._held is None:
                self.end_call()

    def _arguments(self) -> Generator[None, None, bool]:
        """Read arguments up to the closing bracket. Return whether they are what can be read here."""
        names = property_names(self.parameters)
        position = 0
        is_first = True
        while (first := (yield from self.skip(_BLANKS))) != ")":
            while not (word := _WORD.match(self.text)):
                if self.is_at_end or not _WORD_BEGUN.fullmatch(self.text):
                    break
                yield
            key = ""  # of `**{…}`
            may_be_all = is_first and first == "{"  # one dictionary may stand for all arguments
            is_first = False
            if word:
                self.text = self.text[word.end() :]
                key = offered_property(self.parameters, word[1])
                first = yield from self.skip(_BLANKS)
            elif first == "*":
                yield from self.skip(_STARS)
            elif position < len(names) and (first in ("'", '"') or self._held is None):
                key = names[position]
                position += 1
            elif not may_be_all:
                return False
            types = types_of(property_schema(self.parameters, key), self.parameters)
            if first in ("'", '"') and (not types or "string" in types):
                if not (yield from self._text(key, _AFTER_NAMED if word else _AFTER_POSITIONAL)):
                    return False
            else:
                source = yield from self._expression()
                try:
                    [expression] = _parse(source.strip()).body
                    value = _value(expression.value) if isinstance(expression, ast.Expr) else None
                except (_NoCallError, ValueError):
                    return False
                if may_be_all and (yield from self.skip(_BLANKS)) == ")" and _are_arguments(value, names):
                    key = ""
                elif may_be_all and not key:
                    return False
                if key:
                    value = {key: value}
                elif not isinstance(value, dict):
                    return False
                for name, item in value.items():
                    item = fitted(item, property_schema(self.parameters, name), self.parameters)
                    if self._held is None:
                        self.put(name, item)
                    else:
                        self._held[-1][1].append((name, item))
            if (yield from self.skip(_BLANKS)) == ",":
                self.text = self.text[1:]
            elif self.text[:1] != ")":
                return False
        self.text = self.text[1:]
        return True

    def _put_held(self) -> None:
        held, self._held = self._held, None
        for at, (name, arguments) in enumerate(held or ()):
            if at:
                self.end_call()
            self.begin_call(name)
            for key, value in arguments:
                self.put(key, value)

    def _text(self, key: str, after: re.Pattern[str]) -> Generator[None, None, bool]:
        """Read a string, or several that are written one after the other. Return whether it is closed."""
        self._put_held()
        self.open_value(key)
        self.write('"')
        while (quote := self.text[:1]) in ("'", '"') and quote:
            while len(self.text) < 3 and self.text == quote * len(self.text) and not self.is_at_end:
                yield
            if self.text.startswith(quote * 3):
                quote *= 3
            self.text = self.text[len(quote) :]
            self.is_plain = True
            while mark := (yield from self.scan(_STRING_MARKS[quote[0]], self._write_text)):
                self.is_plain = False
                if mark == "\\":
                    yield from self._escape()
                elif (yield from self._is_closing(quote, after)):
                    self.text = self.text[len(quote) :]
                    break
                else:
                    self._write_text(mark)
                    self.text = self.text[1:]
                self.is_plain = True
            self.is_plain = False
            if not mark:
                return False
            yield from self.skip(_BLANKS)
        self.write('"')
        return True

    def _write_text(self, text: str) -> None:
        self.write(to_json(text)[1:-1])

    def _escape(self) -> Reading:
        while not (found := _ESCAPED.match(self.text)) and not self.is_at_end:
            if len(self.text) > _MAX_AHEAD:
                break
            yield
        escape = found[0] if found else self.text
        self.text = self.text[len(escape) :]
        self._write_text(_unescaped(escape))

    def _is_closing(self, quote: str, after: re.Pattern[str]) -> Generator[None, None, bool]:
        """Whether the quotation mark that comes next ends its string."""
        if len(quote) == 3:
            while len(self.text) < 3 and quote.startswith(self.text) and not self.is_at_end:
                yield
            return self.text.startswith(quote)
        while True:
            rest = self.text[1:]
            if self.is_at_end or len(rest) > _MAX_AHEAD or not _AFTER_BEGUN.fullmatch(rest):
                return after.match(rest) is not None or _NEXT_STRING.match(rest) is not None
            yield

    def _expression(self) -> Generator[None, None, str]:
        """Return the source of a value."""
        parts: list[str] = []
        depth = 0
        while mark := (yield from self.scan(_EXPRESSION_MARKS, parts.append)):
            if (mark in ",)" and not depth) or mark == "#":
                break
            if mark in "'\"":
                yield from self._string_source(parts)
                continue
            depth += 1 if mark in "([{" else -1 if mark in ")]}" else 0
            parts.append(mark)
            self.text = self.text[1:]
        return "".join(parts)

    def _string_source(self, parts: list[str]) -> Reading:
        quote = self.text[0]
        while len(self.text) < 3 and self.text == quote * len(self.text) and not self.is_at_end:
            yield
        quote = quote * 3 if self.text.startswith(quote * 3) else quote
        parts.append(quote)
        self.text = self.text[len(quote) :]
        while mark := (yield from self.scan(_STRING_MARKS[quote[0]], parts.append)):
            size = 1
            if mark == "\\":
                while len(self.text) < 2 and not self.is_at_end:
                    yield
                size = 2
            elif (yield from self._is_closing(quote, _AFTER_STRING)):
                parts.append(quote)
                self.text = self.text[len(quote) :]
                return
            else:
                parts.append("\\")  # a mark in the text that the model left as it is
            parts.append(self.text[:size])
            self.text = self.text[size:]


class TaggedCalls(CallSyntax):
    """Llama's `<|python_tag|>`: JSON after it, or the call of a built-in tool, `search.call(query="…")`."""

    def __init__(self, objects: JsonObjects) -> None:
        self._objects, self._python = objects, PythonicCalls(in_list=False)

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return self._objects.encode(name, arguments)

    def begin(self, body: str) -> StreamedCall | None:
        return self._objects.begin(body)

    def is_whole(self, body: str) -> bool:
        """Whether the last bracket of JSON is closed."""
        return body.lstrip()[:1] != "{" or self._objects.is_whole(body)

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls; a program is none."""
        if body.lstrip()[:1] == "{":
            return self._objects.decode(body, tools)
        calls = [*self._python.decode(body.split("<|")[0], tools)]
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
    """Escape line breaks in strings; mark arguments whose names are Python's keywords. `07` becomes a string."""
    parts: list[str] = []
    at = 0
    for string in _STRINGS.finditer(text):
        parts += [_repaired_code(text[at : string.start()]), string[0].replace("\n", "\\n")]
        at = string.end()
    return "".join([*parts, _repaired_code(text[at:])])


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
    name = _called(_dotted(node.func), tools)
    parameters = tools.parameters(tools.offered_name(name))
    names = property_names(parameters)
    arguments: dict[str, Any] = {}
    for position, argument in enumerate(node.args):
        value = _value(argument)
        if len(node.args) == 1 and _are_arguments(value, names):
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
        key: fitted(value, property_schema(parameters, key), parameters) for key, value in arguments.items()
    }
    return DecodedCall(name, to_json(typed))


def _are_arguments(value: Any, names: Collection[str]) -> bool:
    """Whether the only argument of a call is a dictionary of all of them."""
    return isinstance(value, dict) and (not names or value.keys() <= set(names))


def _called(name: str, tools: ToolSet) -> str:
    if name not in tools.names:
        name = name.removeprefix("default_api.")  # the namespace that Gemma's guide gives all tools
    if name not in tools.names and name.endswith(".call"):  # Llama's built-in tools
        name = name.removesuffix(".call")
    return name


def _unescaped(escape: str) -> str:
    """Return what an escape means in a string; as it is, if it means nothing."""
    if escape[1:2] in _KNOWN_ESCAPES:
        try:
            text = ast.literal_eval(f'"{escape}"')
        except (SyntaxError, ValueError):
            return escape
        return text if isinstance(text, str) else escape
    return escape


def _dotted(node: ast.expr) -> str:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise _NoCallError
    return ".".join([node.id, *reversed(names)])


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
        case ast.Name(id=name):  # or a text without quotation marks
            return _CONSTANTS.get(name, name)
    raise _NoCallError


def _key(node: ast.expr | None, depth: int) -> str:
    if node is None:
        raise _NoCallError
    key = _value(node, depth + 1)
    return key if isinstance(key, str) else to_json(key)


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
