"""The grammar of a family's calls, found by having its codec write some.

Theory of operation
-------------------
A codec writes a call of a name, and of arguments that are known: what it puts around them is the family's markup, and
is the same for any other arguments. So a new family needs no grammar of its own, only one of these bodies:

    JsonBody    the arguments are one JSON object: Hermes, Mistral, DeepSeek, Kimi K2, Llama, Cohere, Apertus …
    TaggedBody  a tag for every parameter; texts stand as they are, other values as JSON: Qwen, GLM, MiniMax, DSML …
    NotedBody   a notation of its own for every value (`call_values.Notation`): Gemma, Python
    ElementBody an element for every value, in each other: MiniMax M3

Control tokens stand in the grammar as tokens, and where a model has none for a marker, its spelling. Line breaks that a
family writes between the parts of a call may be left out, and parameters come in the order of their schema. Whatever
the grammar allows, the family's reader reads back (`tests/constraints/test_call_grammars.py`).
"""

from __future__ import annotations

import json
import keyword
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mlx_backend.constraints.call_values import (
    INTEGER,
    NUMBER,
    TYPES,
    Notation,
    Report,
    bare_text,
    is_unlimited,
    properties_of,
    report_unwritable_name,
)
from mlx_backend.constraints.compiler import Rule
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.lark import ANY_TEXT, Lark, Marked, is_mark, literal, pattern, without
from mlx_backend.conversation.argument_values import resolve, types_of
from mlx_backend.conversation.dialects.block_format import BlockCalls
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax
from mlx_backend.conversation.dialects.calls.elements import ITEM, NAMESPACE, RESERVED_NAMES, ElementCalls
from mlx_backend.conversation.dialects.calls.gemma import GemmaCalls
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.named_json import NamedJson
from mlx_backend.conversation.dialects.calls.pairs import PairCalls
from mlx_backend.conversation.dialects.calls.pythonic import PythonicCalls, TaggedCalls
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.dialects.calls.xtml import XtmlCalls
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.constraints.compiler import Rules
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects.base import CallCodec
    from mlx_backend.conversation.dialects.calls.base import CallSyntax

_NAME, _KEY, _MORE, _TEXT = "zqname", "zqkey", "zqmore", "zqtext"
_SAMPLES: Mapping[str, tuple[Any, str]] = {
    "string": (_TEXT, _TEXT),
    "integer": (713_571, "713571"),
    "number": (71.25, "71.25"),
    "boolean": (True, "true"),
    "null": (None, "null"),
    "array": ([713_571], "[713571]"),
    "object": ({"zqz": 1}, '{"zqz": 1}'),
}
"""A value of each type, and how it is written as JSON."""
_FREE_KEY = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
"""A key that a schema does not name."""
_IDENTIFIER = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_ELEMENT_NAME = re.compile(r"[^\s<>/=]{1,256}")
_WORDS = {"True": "true", "False": "false", "None": "null"}


class CallGrammar:
    """The calls of one model.

    `opener` is the control token with which they begin, None if it is none; `spelling` is the marker, "" if they begin
    without one.
    """

    def __init__(self, codec: CallCodec, vocabulary: Vocabulary, rules: Rules) -> None:
        body = _body_of(codec)
        if body is None or not isinstance(codec, BlockCalls):
            raise _unknown_format()
        make, self._syntax = body
        self._rules = rules
        self._body = make(codec, self._syntax, Marked(vocabulary))
        begins, _ = self._body.around
        self.opener = self._body.marked.token((begins or self._body.written({}))[0])
        first = next(iter(codec.encode("f", {})))
        self.spelling = first.text if first.marker else ""

    def rule(self, at: int, name: str, parameters: Mapping[str, Any], *, strict: bool, what: str) -> Rule:
        """Return the rule of the calls of one tool, the `at`-th. Raises GrammarError if it cannot be enforced."""
        self._check_name(name)
        lark, report = Lark(f"call_{at}"), Report(what, self._rules, strict=strict)
        written = self._body.write(lark, name, parameters, report)
        return Rule(lark.finish(written), tuple(report.notes))

    def join(self, calls: Mapping[str, Rule], *, parallel: bool) -> Rule:
        """Return the rule of all that a turn calls: one of these, or more."""
        call = f"({' | '.join(_root(rule) for rule in calls.values())})"
        if parallel and not isinstance(self._syntax, TaggedCalls):
            between = '"," " "?' if self._syntax.in_list else '"\\n"?'
            call = f"{call} ({between} {call})*"
        begins, ends = self._body.around
        lines = [f"start: {self._body.lark(begins)} {call} {self._body.lark(ends)}"]
        return Rule("\n".join([*lines, *(rule.lark for rule in calls.values())]))

    def _check_name(self, name: str) -> None:
        tools = ToolSet([name])
        said = self._body.said(name) if not isinstance(self._body, JsonBody) else name
        body = "".join(piece.text for piece in self._syntax.encode(said, {}))
        if [tools.offered_name(call.name) for call in self._syntax.decode(body, tools)] != [name]:
            raise GrammarError(f"This model's format of calls cannot write the name {name!r}.")


def can_enforce(codec: CallCodec | None) -> bool:
    """Whether there is a grammar of the calls that a codec writes."""
    return codec is not None and _body_of(codec) is not None


def _body_of(codec: CallCodec) -> tuple[type[CallBody], CallSyntax] | None:
    syntax = codec.syntax if isinstance(codec, BlockCalls) else None
    syntax = syntax.own if isinstance(syntax, AnySyntax) else syntax
    for kinds, body in _BODIES.items():
        if syntax is not None and isinstance(syntax, kinds):
            return body, syntax
    return None


def _root(rule: Rule) -> str:
    return rule.lark.rstrip("\n").rpartition("\n")[2].partition(":")[0]


class CallBody(ABC):
    """Writes a call, without the markers around all calls (`around`)."""

    layout = "\n"

    def __init__(self, codec: BlockCalls, syntax: CallSyntax, marked: Marked) -> None:
        self.codec, self.syntax, self.marked = codec, syntax, marked
        self.around = marked.text(codec.around[0]), marked.text(codec.around[1])
        if syntax.in_list:
            written = self.written({})
            begins = written.rindex("[", 0, written.index(_NAME)) + 1  # a marker may have brackets, too
            self.around = written[:begins], written[written.rindex("]") :]

    @abstractmethod
    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        """Return the expression of a call."""

    def said(self, name: str) -> str:
        """Return how a tool's name is written."""
        return name

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Return what the codec writes for a call of `_NAME`, marked."""
        text = self.marked.of(self.codec.encode(_NAME, arguments))
        begins, ends = self.around if hasattr(self, "around") else ("", "")
        return text.removeprefix(begins).removesuffix(ends)

    def spelt_markers(self) -> list[str]:
        """Return patterns of the markers that are no control tokens: in a text they would be taken for markup."""
        return [re.escape(marker) for marker in sorted(self.codec.markers) if marker not in self.marked.ids]

    def lark(self, text: str) -> str:
        """Write marked text."""
        return self.marked.lark(text, layout=self.layout, counters=self.syntax.counters)

    def call(self, before: str, name: str, *arguments: str) -> str:
        """Write a call's beginning, which holds `_NAME`, and what follows."""
        head, found, tail = before.partition(_NAME)
        if not found:
            raise _unknown_format()
        return " ".join(
            filter(None, [self.lark(head), literal(self.said(name)), self.lark(tail), *arguments])
        )


class JsonBody(CallBody):
    """Arguments that are one JSON object."""

    layout = "\n "

    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        before, found, after = self.written({_KEY: 1}).rpartition(f'{{"{_KEY}": 1}}')
        if not found:
            raise _unknown_format()
        rule = report.rules.schema(dict(parameters), strict=report.strict, what=report.what)
        report.notes += rule.ignored
        return self.call(before, name, lark.schema(rule.lark), self.lark(after))

    def said(self, name: str) -> str:
        """Write a name as it stands in a JSON string, if that is where it stands."""
        return _json(name)[1:-1] if not isinstance(self.syntax, NamedJson) else name


class TaggedBody(CallBody):
    """A tag for every parameter, with its value as text or as JSON."""

    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        """Take apart what the codec writes of no parameter, of one and of two."""
        parameters = resolve(parameters, parameters)
        tags = {kind: self._tag(*_SAMPLES[kind]) for kind in TYPES}
        opened, _, last = tags["string"]
        none = self.written({})
        between = self.written({_KEY: _TEXT, _MORE: _TEXT}).partition(_TEXT)[2].partition(_MORE)[0]
        # The tag that closes a value stands after it whether another one follows or not.
        size = next(at for at in range(1, 1 + len(last)) if is_mark(last[at - 1]) or last[at - 1] == ">")
        closing, last, between = last[:size], last[size:], between[size:]
        head = none[: none.index(_NAME) + len(_NAME)]
        tail = none.removeprefix(head)
        values = _TaggedValues(
            self, lark, report, parameters, {kind: tags[kind][1] for kind in TYPES}, closing
        )
        report.unknown("", parameters, {"type", "properties", "required", "additionalProperties"})
        items = []
        for key, schema, must in properties_of(parameters):
            where = f"/properties/{key}"
            if self._can_write(key):
                items.append((lark.rule(f"{literal(key)} {values.value(schema, where)}"), must))
            else:
                report_unwritable_name(report, where, key, is_required=must)
        others = parameters.get("additionalProperties")
        if not items and others is not False:
            value = values.value(others if isinstance(others, dict) else {}, "")
            items = [(lark.rule(f"{lark.terminal(_FREE_KEY)} {value}"), False)]
        some = lark.sequence(items, self.lark(between))
        some = f"{self.lark(opened.removeprefix(head))} {some} {self.lark(last)}" if some else ""
        if not any(must for _, must in items):
            some = f"({some} | {self.lark(tail)})" if some else self.lark(tail)
        return self.call(head, name, some)

    def _tag(self, value: Any, text: str) -> tuple[str, str, str]:
        """Return what stands before a parameter's key, between key and value, and after the value."""
        before, found, rest = self.written({_KEY: value}).partition(_KEY)
        between, found_value, after = rest.partition(text)
        if not (found and found_value):
            raise _unknown_format()
        return before, between, after

    def _can_write(self, key: str) -> bool:
        if "\n" in key or self.written({_KEY: _TEXT}).replace(_KEY, key) != self.written({key: _TEXT}):
            return False
        body = "".join(piece.text for piece in self.syntax.encode(_NAME, {key: _TEXT}))
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        calls = self.syntax.decode(body, ToolSet([{"name": _NAME, "parameters": parameters}]))
        return [call.arguments for call in calls] == [f'{{{_json(key)}: "{_TEXT}"}}']


class _TaggedValues:
    """The values of one call's parameters: `between` stands before a value, by its type, and `closing` closes it."""

    def __init__(
        self,
        body: TaggedBody,
        lark: Lark,
        report: Report,
        root: Mapping[str, Any],
        between: Mapping[str, str],
        closing: str,
    ) -> None:
        self._body, self._lark, self._report, self._root = body, lark, report, root
        self._between, self._closing = between, closing

    def value(self, schema: Any, where: str) -> str:
        """Return the rule of what stands after a parameter's key: its value, and the tag that closes it."""
        root, report = self._root, self._report
        own = dict(resolve(schema, root)) if isinstance(schema, dict) else {}
        types = types_of(own, root) & {*TYPES}
        alternatives = []
        if not types or "string" in types:
            if types != {"string"} and not is_unlimited(own, root) and not _has_texts(own):
                report.ignore(
                    where, "a text is accepted as well as other types, whatever they are limited to"
                )
            limits = bare_text(own, report, where) if types == {"string"} or _has_texts(own) else None
            alternatives.append(f"{self._body.lark(self._between['string'])} {self._text(limits)}")
        if types and types != {"string"} and not (is_unlimited(own, root) and "string" in types):
            by_tag: dict[str, list[str]] = {}
            for kind in sorted(types - {"string"}):
                by_tag.setdefault(self._between[kind], []).append(kind)
            for between, kinds in by_tag.items():
                value = self._json(own, kinds, where, is_whole={*kinds} == types)
                alternatives.append(f"{self._body.lark(between)} {value} {self._body.lark(self._closing)}")
        return self._lark.rule(" | ".join(alternatives))

    def _json(self, schema: dict[str, Any], kinds: list[str], where: str, *, is_whole: bool) -> str:
        """Write the values of some types; `is_whole`: they are all that the schema has."""
        if is_unlimited(schema, self._root) and {*kinds} <= {"integer", "number"}:
            return self._lark.terminal(INTEGER if kinds == ["integer"] else NUMBER)
        if not is_whole:
            schema = {**schema, "type": kinds}
            if "enum" in schema:
                schema["enum"] = [member for member in schema["enum"] if not isinstance(member, str)]
        return self._report.json(self._lark, schema, self._root, where)

    def _text(self, limits: str | None) -> str:
        """Write a text up to its closing tag, and that: one terminal, so that the first such tag ends the text."""
        body, lark, closing = self._body, self._lark, self._closing
        excluded = body.spelt_markers()
        if body.syntax.reserved:
            excluded.append(body.syntax.reserved)
        ends_with_token = is_mark(closing[-1])
        spelt = closing[:-1] if ends_with_token else closing
        closer = spelt.strip("\n")
        if closer:
            excluded.append(re.escape(closer))
        if limits is None:
            text = f"({without(*excluded)})"
        else:
            # Line breaks at its edges may be layout, and limits count what is left of a text.
            edges = pattern(r"(?s:[^\r\n]|[^\r\n].*[^\r\n])?")
            layout = ' "\\n"?' if spelt[:1] == "\n" else ""
            text = f"(({limits}) & {without(*excluded, re.escape('<![CDATA['))} & {edges}){layout}"
        if not closer:
            return f"{lark.terminal(text)} {body.lark(closing)}"
        last = body.lark(closing[-1]) if ends_with_token else ""
        return f"{lark.terminal(f'{text} {literal(closer)}')} {last}".rstrip()


class NotedBody(CallBody):
    """Pairs of keys and values in brackets, in a notation of their own."""

    brackets: str

    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        """Find the brackets after the name."""
        parameters = resolve(parameters, parameters)
        before, found, after = self.written({}).rpartition(_NAME + self.brackets)
        if not found:
            raise _unknown_format()
        notation = self.notation(lark, report, parameters)
        items = notation.properties(parameters, "", self.key, self.colon)
        arguments = lark.sequence(items, self.comma)
        if arguments and not any(must for _, must in items):
            arguments = f"({arguments})?"
        opens, closes = self.brackets[0], self.brackets[1]
        return self.call(before + _NAME + opens, name, arguments, self.lark(closes + after))

    comma = '","'
    colon = '":"'

    @abstractmethod
    def notation(self, lark: Lark, report: Report, root: Mapping[str, Any]) -> Notation:
        """Make the notation of values."""

    @abstractmethod
    def key(self, name: str) -> str | None:
        """Write a parameter's name; None if that cannot be done."""


class GemmaBody(NotedBody):
    """Bare keys, and texts between delimiters."""

    syntax: GemmaCalls
    brackets = "{}"

    def notation(self, lark: Lark, report: Report, root: Mapping[str, Any]) -> Notation:
        delimiter = self.marked.text(self.syntax.delimiter)
        quote = self.marked.lark(delimiter)
        is_token = is_mark(delimiter)

        delimiters = [] if is_token else [re.escape(self.syntax.delimiter)]
        free = without(*self.spelt_markers(), *delimiters)

        def text(limits: str | None) -> str:
            inner = f"({limits}) & {free}" if limits else free
            if is_token:
                return f"{quote} {lark.terminal(inner)} {quote}"
            return lark.terminal(f"{quote} ({inner}) {quote}")

        return Notation(lark, report, root, words=_WORDS, text=text, key=self.key, between=('","', '":"'))

    def key(self, name: str) -> str | None:
        """Write a name without quotation marks."""
        return literal(name) if re.fullmatch(r"[^\s:{}\[\]<>\",]{1,256}", name) else None


class PythonBody(NotedBody):
    """Keyword arguments, and literals."""

    brackets = "()"
    comma = '"," " "?'
    colon = '"="'

    def said(self, name: str) -> str:
        """Write a name as an identifier: the reader finds the tool that is spelt like it."""
        return name if _IDENTIFIER.fullmatch(name) else re.sub(r"\W", "_", name)

    def notation(self, lark: Lark, report: Report, root: Mapping[str, Any]) -> Notation:
        free = without(*self.spelt_markers())
        plain = lark.terminal(
            f"({free}) & ("
            + pattern(r'"(?:[^"\\\x00\r\n]|\\["\\nt])*"')
            + " | "
            + pattern(r"'(?:[^'\\\x00\r\n]|\\['\\nt])*'")
            + ")"
        )

        def text(limits: str | None) -> str:
            if limits is None:
                return plain
            # What is limited is written without escapes, so that what is counted is what is read.
            quoted = [
                f"{literal(quote)} (({limits}) & {free} & {pattern(rf'[^{quote}\\\x00\r\n]*')}) {literal(quote)}"
                for quote in ('"', "'")
            ]
            return lark.terminal(" | ".join(quoted))

        words = {"True": "True", "False": "False", "None": "None"}

        def key(name: str) -> str | None:
            return literal(_json(name)) if not re.search(r'["\\\x00-\x1f]', name) else None

        return Notation(lark, report, root, words=words, text=text, key=key, between=('"," " "?', '":" " "?'))

    def key(self, name: str) -> str | None:
        return literal(name) if name.isidentifier() and not keyword.iskeyword(name) else None


def _has_texts(schema: Mapping[str, Any]) -> bool:
    return "enum" in schema or "const" in schema


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _unknown_format() -> GrammarError:
    """Make the error of a family whose calls cannot be enforced."""
    return GrammarError("Calls cannot be forced with this model: its format of calls cannot be enforced yet.")


class ElementBody(CallBody):
    """An element for each parameter."""

    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        """Write the elements between the tags of a call."""
        parameters = resolve(parameters, parameters)
        head, found, tail = self.written({}).partition(f"{self.marked.text(NAMESPACE)}</")
        if not found:
            raise _unknown_format()
        elements = _Elements(lark, report, parameters, self.marked.text(NAMESPACE), self)
        # The marker of the next tag is written with what stands before it.
        inner = elements.members(parameters, "")
        return self.call(head, name, inner, self.lark(f"</{tail}"))


class _Elements(Notation):
    """How values are written as elements. Each rule ends with the marker of the tag after the value."""

    def __init__(
        self, lark: Lark, report: Report, root: Mapping[str, Any], namespace: str, body: ElementBody
    ) -> None:
        super().__init__(
            lark, report, root, words=_WORDS, text=self._marked_text, key=self._name, between=("", "")
        )
        self._namespace = body.lark(namespace)
        self._is_token = is_mark(namespace)

    def members(self, schema: Mapping[str, Any], pointer: str) -> str:
        """Return the rule of an object's elements, each after a marker, and of the marker after the last."""
        known = {"type", "properties", "required", "additionalProperties"}
        self._report.unknown(pointer, self.of_type(schema, "object"), known)
        items = []
        for name, part, must in properties_of(schema):
            where = f"{pointer}/properties/{name}"
            if self._name(name) is None:
                report_unwritable_name(self._report, where, name, is_required=must)
            else:
                items.append((self._element(literal(name), self.value(part, where)), must))
        others = schema.get("additionalProperties")
        if not items and others is not False and not schema.get("properties"):
            part = others if isinstance(others, dict) else {"type": "string"}
            items = [(self._element(self._lark.terminal(_FREE_KEY), self.value(part, pointer)), False)]
            return self._lark.rule(f"{self._namespace} ({items[0][0]} {self._namespace}){{0,64}}")
        rule = self._namespace
        for element, must in items:
            written = f"{element} {self._namespace}"
            rule += f" {written}" if must else f" ({written})?"
        return self._lark.rule(rule)

    def constant(self, value: Any) -> str:
        match value:
            case list():
                elements = [self._element(literal(ITEM), self.constant(item)) for item in value]
            case dict():
                elements = [self._element(literal(key), self.constant(item)) for key, item in value.items()]
            case str():
                return self._marked_text(literal(value))
            case _:
                return f"{super().constant(value)} {self._namespace}"
        return " ".join([self._namespace, *(f"{element} {self._namespace}" for element in elements)])

    def _typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> str:
        written = super()._typed(kind, schema, pointer)
        # Texts, lists and objects have written the marker themselves.
        return written if kind in ("string", "array", "object") else f"{written} {self._namespace}"

    def _array(self, schema: Mapping[str, Any], pointer: str) -> str:
        self._report.unknown(
            pointer, self.of_type(schema, "array"), {"type", "items", "minItems", "maxItems"}
        )
        item = self._element(literal(ITEM), self.value(schema.get("items", {}), f"{pointer}/items"))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        return self._lark.rule(
            f"{self._namespace} ({item} {self._namespace}){{{low},{'' if high is None else high}}}"
        )

    def _object(self, schema: Mapping[str, Any], pointer: str) -> str:
        return self.members(schema, pointer)

    def _any(self) -> str:
        return self._marked_text(None)

    def _element(self, name: str, value: str) -> str:
        """Write an element without the marker before its first tag: its name, what it holds, its name again."""
        # A name that is free need not be written twice alike: the reader closes the element that is open.
        return self._lark.rule(f'"<" {name} ">" {value} "</" {name} ">"')

    def _marked_text(self, limits: str | None) -> str:
        if self._is_token:
            return f"{self._lark.terminal(f'({limits})' if limits else ANY_TEXT)} {self._namespace}"
        free = without(re.escape(NAMESPACE))
        inner = f"({limits}) & {free}" if limits else free
        return self._lark.terminal(f"({inner}) {literal(NAMESPACE)}")

    @staticmethod
    def _name(name: str) -> str | None:
        return literal(name) if _ELEMENT_NAME.fullmatch(name) and name not in RESERVED_NAMES else None


_BODIES: Mapping[tuple[type[CallSyntax], ...], type[CallBody]] = {
    (JsonObjects, NamedJson, TaggedCalls): JsonBody,
    (XmlCalls, PairCalls, XtmlCalls): TaggedBody,
    (GemmaCalls,): GemmaBody,
    (PythonicCalls,): PythonBody,
    (ElementCalls,): ElementBody,
}
"""Which syntaxes are written by which body; calls in another syntax cannot be enforced."""
