"""Calls as XML tags: a tag for the function, and one for each parameter.

    <function=f><parameter=a>1</parameter></function>                 Qwen3-Coder, Qwen3.5, Nemotron, Step, Seed …
    <invoke name="f"><parameter name="a">1</parameter></invoke>       MiniMax M2; Step3 with `steptml:`, Muse `atem:`
    <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1…   DeepSeek V3.2, V4; V4.1 with blanks
    <function name="f"><param name="a">1</param></function>           MiniCPM5

One reader for all of them. Values have no types (but DSML's): the schema gives them theirs. A missing closing tag costs
nothing: a value ends where the next parameter begins.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.argument_values import (
    convert,
    parse_json,
    property_names,
    property_schema,
    types_of,
)
from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import CallSyntax, DecodedCall, to_json
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx_backend.conversation.argument_values import Untyped
    from mlx_backend.conversation.tools import ToolSet

_TAG = re.compile(
    r"<(?P<close>/?)(?:｜DSML｜ ?|[a-z]{1,16}:)?(?P<kind>function|invoke|parameter|param)"
    r"(?P<attributes>(?:\s*=|\s)[^<>]{0,512})?\s?>"
)
_ATTRIBUTE = re.compile(r"""([\w-]{1,32})\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_WHOLE = re.compile(r"(?:</[^<>]{0,64}|<(?:function|invoke)\b[^<>]{0,512})>\s*\Z|[}\]]\s*\Z")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*\Z", re.DOTALL)
_CDATA_SECTION = re.compile(r"<!\[CDATA\[.*?(?:\]\]>|\Z)", re.DOTALL)
_WORD = re.compile(r"\w")
_CALLS = ("function", "invoke")
_OBJECTS = JsonObjects()


class XmlCalls(CallSyntax):
    """`call_tag` and `parameter_tag` are how it is written, with `{}` for the name; every spelling is read.

    `trims`: a line break at each end of a value is layout. `untyped` is what a value without a schema is.
    """

    reserved = r"</?(?:｜DSML｜ ?|[a-z]{1,16}:)?param(?:eter)?[\s=>]"

    def __init__(
        self,
        *,
        call_tag: tuple[str, str] = ("<function={}>\n", "</function>"),
        parameter_tag: tuple[str, str] = ("<parameter={}>\n", "\n</parameter>\n"),
        around: tuple[str, str] = ("\n", "\n"),
        trims: bool = True,
        untyped: Untyped = "text",
    ) -> None:
        self.head = re.compile(r"\s*(?:[<{\[].*)?", re.DOTALL)
        self._call_tag, self._parameter_tag, self._around = call_tag, parameter_tag, around
        self._trims = trims
        self._untyped = untyped

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call: texts as they are, other values as JSON."""
        before, after = self._around
        parts = [before, self._call_tag[0].format(name)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else to_json(value)
            opening = self._parameter_tag[0].replace(
                "{string}", "true" if isinstance(value, str) else "false"
            )
            parts += [opening.replace("{}", key), text, self._parameter_tag[1]]
        return (Piece("".join([*parts, self._call_tag[1], after])),)

    def is_open(self, body: str) -> bool:
        """Whether a parameter is open."""
        body = _without_cdata(body)
        opened = max(body.rfind(word) for word in ("parameter=", "parameter name=", "param name="))
        return opened > max(body.rfind("parameter>"), body.rfind("param>"))

    def is_whole(self, body: str) -> bool:
        """Whether no parameter is open."""
        return _WHOLE.search(body[-600:]) is not None

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the calls, with the values that their schemas say."""
        calls = [
            DecodedCall(name, self._arguments(tools.parameters(tools.offered_name(name)), values, text))
            for name, values, text in _calls(body, tools)
        ]
        if not calls and body.lstrip()[:1] in ("{", "["):
            return _OBJECTS.decode(body, tools)
        return calls

    def _arguments(
        self, parameters: Mapping[str, Any], values: Mapping[str, tuple[str, str]], text: str
    ) -> str:
        if not values and text.lstrip()[:1] == "{":  # Llama writes JSON there, and some fine-tunes
            try:
                parsed = parse_json(text)
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                return to_json(parsed)
        arguments = {
            key: self._value(text, is_string, property_schema(parameters, key), parameters)
            for key, (text, is_string) in values.items()
        }
        return to_json(_unwrapped(arguments, property_names(parameters)))

    def _value(self, text: str, is_string: str, schema: Any, root: Any) -> Any:
        if cdata := _CDATA.match(text):
            text = cdata[1]
        elif self._trims:
            text = text.removeprefix("\r").removeprefix("\n").removesuffix("\n").removesuffix("\r")
        elif text[:1] == "\n" and text[-1:] == "\n" and len(text) > 1:
            text = text[1:-1]
        types = types_of(schema, root)
        if is_string == "true" and (not types or "string" in types):
            return text
        if is_string == "false" and types != {"string"}:
            try:
                return parse_json(text)
            except ValueError:
                return convert(text, schema, root, untyped="json")
        return convert(text, schema, root, untyped=self._untyped)


def _unwrapped(arguments: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Take arguments out of a single `arguments` or `input` that the tool has no parameter for."""
    for wrapper in ("arguments", "input"):
        if names and wrapper not in names and list(arguments) == [wrapper]:
            inner = arguments[wrapper]
            try:
                inner = parse_json(inner) if isinstance(inner, str) else inner
            except ValueError:
                continue
            if isinstance(inner, dict) and inner.keys() <= set(names):
                return inner
    return arguments


def _calls(body: str, tools: ToolSet) -> Iterator[tuple[str, dict[str, tuple[str, str]], str]]:
    """Yield each call's name, for each parameter its text and what its `string` attribute says, and the call's text."""
    tags = list(_TAG.finditer(_without_cdata(body)))
    closers = _next_closers(tags)
    name = key = ""
    is_string = ""
    values_at = begins_at = 0
    values: dict[str, tuple[str, str]] = {}
    known: list[str] = []
    for at, tag in enumerate(tags):
        is_call, closes = tag["kind"] in _CALLS, bool(tag["close"])
        after = body[tag.end() : tags[at + 1].start() if at + 1 < len(tags) else len(body)]
        if key and _is_part_of_value(tag, after, known, has_closer=closers[at]):
            continue
        if key:
            values[key] = (body[values_at : tag.start()], is_string)
            key = ""
        if is_call and not closes:
            if name:
                yield name, values, body[begins_at : tag.start()]
            name, values, begins_at = _name_of(tag), {}, tag.end()
            known = property_names(tools.parameters(tools.offered_name(name)))
        elif is_call and name:
            yield name, values, body[begins_at : tag.start()]
            name, values = "", {}
        elif not is_call and not closes and name:
            key, is_string = _name_of(tag), _attributes(tag).get("string", "")
            values_at = tag.end()
    if name:
        if key:
            values[key] = (body[values_at:], is_string)
        yield name, values, body[begins_at:]


def _without_cdata(body: str) -> str:
    """Blank out what may hold anything, so that what is after it stays where it is."""
    return _CDATA_SECTION.sub(lambda match: " " * len(match[0]), body)


def _is_part_of_value(tag: re.Match[str], after: str, known: list[str], *, has_closer: bool) -> bool:
    """Whether a tag within a value is part of it, because the value is closed later. `after`: up to the next tag."""
    if tag["kind"] not in _CALLS and tag["close"]:
        return has_closer and bool(after.strip())
    if tag["kind"] in _CALLS:
        return has_closer
    return has_closer and bool(known) and _name_of(tag) not in known


def _next_closers(tags: list[re.Match[str]]) -> list[bool]:
    """Whether the next parameter's tag after each tag closes one."""
    result = [False] * len(tags)
    found = False
    for at in range(len(tags) - 1, -1, -1):
        result[at] = found
        if tags[at]["kind"] not in _CALLS:
            found = bool(tags[at]["close"])
    return result


def _name_of(tag: re.Match[str]) -> str:
    attributes = (tag["attributes"] or "").strip()
    if attributes.startswith("="):
        name = attributes[1:].strip().strip("\"'").strip()
    else:
        name = _attributes(tag).get("name", "").strip()
    return name if _WORD.search(name) else ""  # not `<function=...>`, as people write of it


def _attributes(tag: re.Match[str]) -> dict[str, str]:
    found = _ATTRIBUTE.findall(tag["attributes"] or "")
    return {key: double or single or bare for key, double, single, bare in found}
