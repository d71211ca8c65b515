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
from mlx_backend.conversation.dialects.calls.base import to_json
from mlx_backend.conversation.dialects.calls.stream import CallStream, OpenValue, StreamedSyntax

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.conversation.argument_values import Untyped
    from mlx_backend.conversation.dialects.calls.base import CallPiece
    from mlx_backend.conversation.dialects.calls.stream import NextTag, Reading
    from mlx_backend.conversation.tools import ToolSet

# A tag, or the beginning of a CDATA section, which may hold anything. Models forget the bracket after a tool's name.
_TAG = re.compile(
    r"<(?P<close>/?)(?:｜DSML｜ ?|[a-z]{1,16}:)?(?P<kind>(?P<call>function|invoke)|parameter|param)"
    r"(?P<attributes>(?:\s*=|\s)[^<>]{0,512})?\s?(?(call)(?:>|(?=<))|>)|<!\[CDATA\["
)
# What may become one.
_BEGUN = re.compile(
    r"<(?:!(?:\[[CDAT]{0,5})?|/?(?:｜[DSML]{0,4}(?:｜ ?)?|[a-z]{1,16}:?)?"
    r"|/?(?:｜DSML｜ ?|[a-z]{1,16}:)?(?:[a-z]{0,9}|(?:function|invoke|parameter|param)[\s=][^<>]{0,512}))\Z"
)
_ATTRIBUTE = re.compile(r"""([\w-]{1,32})\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_WHOLE = re.compile(r"(?:</[^<>]{0,64}|<(?:function|invoke)\b[^<>]{0,512})>\s*\Z|[}\]]\s*\Z")
_CDATA_SECTION = re.compile(r"<!\[CDATA\[.*?(?:\]\]>|\Z)", re.DOTALL)
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*\Z", re.DOTALL)
_WORD = re.compile(r"\w")
_CALLS = ("function", "invoke")
_WRAPPERS = ("arguments", "input")


class XmlCalls(StreamedSyntax):
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
        body = _CDATA_SECTION.sub("", body)
        opened = max(body.rfind(word) for word in ("parameter=", "parameter name=", "param name="))
        return opened > max(body.rfind("parameter>"), body.rfind("param>"))

    def is_whole(self, body: str) -> bool:
        """Whether no parameter is open."""
        return _WHOLE.search(body[-600:]) is not None

    def reader(self, tools: ToolSet) -> CallStream:
        return _XmlStream(tools, self)

    def open_value(self, stream: CallStream, key: str, is_string: str, *, may_be_text: bool) -> OpenValue:
        """Return a value that begins. `is_string` is what its `string` attribute says."""
        types = types_of(property_schema(stream.parameters, key), stream.parameters)
        is_text = is_string == "true" and (not types or "string" in types)
        return OpenValue(
            stream,
            key,
            untyped=self._untyped,
            breaks="layout" if self._trims else "pair",
            may_be_text=may_be_text and (is_string != "false" or types == {"string"}),
            is_text=is_text,
        )

    def value(self, text: str, is_string: str, schema: Any, root: Any) -> Any:
        """Return the value of a parameter's text."""
        if cdata := _CDATA.match(text):
            text = cdata[1]
        types = types_of(schema, root)
        if is_string == "true" and (not types or "string" in types):
            return text
        if is_string == "false" and types != {"string"}:
            try:
                return parse_json(text)
            except ValueError:
                return convert(text, schema, root, untyped="json")
        return convert(text, schema, root, untyped=self._untyped)


class _XmlStream(CallStream):
    """Reads tags. A tag within a value is part of it where the value is closed later.

    That is known at the next parameter's tag: until then it is held, with what follows it.
    """

    tag, begun_tag = _TAG, _BEGUN

    __slots__ = ("_known", "_syntax", "_values", "_wrapped")

    def __init__(self, tools: ToolSet, syntax: XmlCalls) -> None:
        super().__init__(tools)
        self._syntax = syntax
        self._known: list[str] = []  # the parameters of the call's tool
        self._values = 0  # of the call, so far
        self._wrapped: tuple[str, Any] | None = None  # what may hold all arguments

    def finish(self) -> list[CallPiece]:
        """Return the rest. The turn may end with a tool's name, without the bracket after it."""
        if not self.name and self.text:
            self.text += "<"
        return super().finish()

    def read(self) -> Reading:
        body: list[str] = []  # of the call, as long as it has no values
        while tag := (yield from self._tag(body.append)):
            is_call, closes = tag["kind"] in _CALLS, bool(tag["close"])
            name = _name_of(tag) if is_call and not closes else ""
            if is_call:
                self._end(body)
                if name:
                    self.begin_call(name)
                    self._known, self._values, self._wrapped = property_names(self.parameters), 0, None
                body.clear()
            elif not closes and self.name and (key := _name_of(tag)):
                yield from self._read_value(key, _attributes(tag).get("string", ""))
                body.clear()
        self._end(body)

    def _read_value(self, key: str, is_string: str) -> Reading:
        is_wrapper = self._values == 0 and key in _WRAPPERS and bool(self._known) and key not in self._known
        value = self._syntax.open_value(self, key, is_string, may_be_text=not is_wrapper)
        if self._wrapped is not None:
            self.put(*self._wrapped)
            self._wrapped = None
        self._values += 1
        held: list[str] = []
        tag = yield from self._tag(value.add, value)
        while tag and not self._ends_value(tag):
            self.is_plain = False  # until it is known what the tag is
            held.append(tag[0])
            follows = ""
            is_closer = tag["kind"] not in _CALLS and bool(tag["close"])
            is_first = True
            while True:
                between: list[str] = []
                following = yield from self._tag(between.append)
                follows = "".join(between)
                if following is None or (is_first and is_closer and not follows.strip()):
                    is_part = False
                elif following["kind"] in _CALLS:
                    held += [follows, following[0]]
                    is_first = False
                    continue
                else:
                    is_part = bool(following["close"])
                break
            if not is_part:
                self.read_again("".join([*held, follows, following[0] if following else ""]))
                break
            held.append(follows)
            value.add("".join(held))
            held.clear()
            tag = following
        else:
            if tag:
                self.text = tag[0] + self.text
        text = value.end()
        if text is not None:
            schema = property_schema(self.parameters, key)
            converted = self._syntax.value(text, is_string, schema, self.parameters)
            if is_wrapper:
                self._wrapped = key, converted
            else:
                self.put(key, converted)

    def _is_whole(self, tag: re.Match[str]) -> bool:
        """Whether a tag has its last bracket, or begins a call to an offered tool without it."""
        return tag[0][-1] == ">" or (
            not tag["close"] and self.tools.offered_name(_name_of(tag)) in self.tools.names
        )

    def _ends_value(self, tag: re.Match[str]) -> bool:
        """Whether a tag within a value ends it, whatever follows."""
        is_opener = tag["kind"] not in _CALLS and not tag["close"]
        return is_opener and (not self._known or _name_of(tag) in self._known)

    def _end(self, body: list[str]) -> None:
        """End the call. Llama writes JSON in it, and some fine-tunes."""
        text = "".join(body)
        arguments: dict[str, Any] = {}
        if self._wrapped is not None:
            arguments = _unwrapped(dict([self._wrapped]), self._known)
        elif self.name and not self._values and text.lstrip()[:1] == "{":
            try:
                parsed = parse_json(text)
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else {}
        self.end_call(arguments)

    def _tag(self, put: Callable[[str], object], value: OpenValue | None = None) -> NextTag:
        """Return the next tag, None at the end; `put` takes the text before it. A CDATA section may hold anything."""
        while (tag := (yield from self.next_tag(put))) and (not tag["kind"] or not self._is_whole(tag)):
            if tag["kind"]:
                put(tag[0])
                continue
            if value is not None:
                value.may_be_cdata()
            put(tag[0])
            while (end := self.text.find("]]>")) < 0 and not self.is_at_end:
                self.is_plain = False
                at = max(0, len(self.text) - 2)
                put(self.text[:at])
                self.text = self.text[at:]
                yield
            at = end + 3 if end >= 0 else len(self.text)
            put(self.text[:at])
            self.text = self.text[at:]
        return tag


def _unwrapped(arguments: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Take arguments out of a single `arguments` or `input` that the tool has no parameter for."""
    for wrapper in _WRAPPERS:
        if names and wrapper not in names and list(arguments) == [wrapper]:
            inner = arguments[wrapper]
            try:
                inner = parse_json(inner) if isinstance(inner, str) else inner
            except ValueError:
                continue
            if isinstance(inner, dict) and inner.keys() <= set(names):
                return inner
    return arguments


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
