"""The grammars of values that are not written as JSON: bare text, Gemma's delimiters, Python's literals.

A value is written as its schema says. What of a schema cannot be held in such a notation is reported, never silently
left out. Knows schemas and no calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.json_schema import ANNOTATIONS, values_in
from mlx_backend.constraints.lark import literal, pattern
from mlx_backend.conversation.argument_values import resolve, types_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx_backend.constraints.compiler import Rules
    from mlx_backend.constraints.lark import Lark

_ANNOTATIONS = ANNOTATIONS | {"nullable"}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
INTEGER = pattern("-?(?:0|[1-9][0-9]{0,30})")
NUMBER = pattern(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?")
MAX_LENGTH = 5_000
"""Characters of a text whose length is counted."""


class Report:
    """What of a schema has no effect: an error if the schema is strict, else a note for the log.

    `rules` makes the rules of its parts.
    """

    def __init__(self, what: str, rules: Rules, *, strict: bool) -> None:
        self.what = what
        self.rules = rules
        self.strict = strict
        self.notes: list[str] = []

    def ignore(self, pointer: str, words: str) -> None:
        """Note it. Raises GrammarError if the schema is strict."""
        if self.strict:
            where = f"{self.what} at {pointer}" if pointer else self.what
            raise GrammarError(f"{where} cannot be used with this model's format of calls: {words}.", pointer)
        self.notes.append(f"at {pointer}: {words}" if pointer else words)

    def unknown(self, pointer: str, schema: Mapping[str, Any], known: set[str]) -> None:
        """Note the keywords of a schema that are not known."""
        for keyword in sorted(schema.keys() - known - _ANNOTATIONS):
            self.ignore(pointer, f"the keyword {keyword!r} cannot be enforced here")

    def json(self, lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any], pointer: str) -> str:
        """Return the rule of a value that is JSON."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        try:
            if _refers_elsewhere(schema):
                raise GrammarError(
                    "a $ref to anything but $defs or definitions is not followed here", pointer
                )
            rule = self.rules.schema(
                {**schema, **definitions}, strict=self.strict, what=f"{self.what} at {pointer}"
            )
        except GrammarError as error:
            if self.strict:
                raise
            self.notes.append(f"at {pointer}: any value is accepted. {error}")
            types = sorted(types_of(schema, root) & {*TYPES})
            rule = self.rules.schema({"type": types} if types else {}, strict=False)
        self.notes += [f"at {pointer}: {note}" for note in rule.ignored]
        return lark.schema(rule.lark)


def bare_text(schema: Mapping[str, Any], report: Report, pointer: str) -> str | None:
    """Write, within a terminal, the texts that the schema of a string allows. None: any."""
    report.unknown(pointer, schema, {"type", "enum", "const", "pattern", "minLength", "maxLength"})
    members = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if isinstance(members, list):
        texts = [literal(member) for member in members if isinstance(member, str)]
        if not texts:
            raise GrammarError(f"{pointer}: no text fits it.", pointer)
        return f"({' | '.join(texts)})"
    limits = []
    if isinstance(schema.get("pattern"), str) and (regex := _searched(schema["pattern"])) is not None:
        try:
            limits.append(report.rules.regex(regex).lark.removeprefix("start: ").strip())
        except GrammarError as error:
            report.ignore(pointer, str(error))
    elif "pattern" in schema:
        report.ignore(pointer, "the pattern cannot be enforced here")
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if any(isinstance(size, int) and size > MAX_LENGTH for size in (low, high)):
        report.ignore(pointer, f"only lengths up to {MAX_LENGTH} can be enforced here")
    elif low or high is not None:
        limits.append(pattern(f"(?s:.{{{low},{'' if high is None else high}}})"))
    return " & ".join(limits) or None


def is_unlimited(schema: Any, root: Any) -> bool:
    """Whether a schema says no more than types, so that a text of any of them fits it."""
    schema = resolve(schema, root)
    keywords = schema.keys() - _ANNOTATIONS
    if not keywords or keywords == {"type"}:
        return True
    return keywords == {"anyOf"} and all(is_unlimited(part, root) for part in schema["anyOf"])


class Notation:
    """How values are written where it is not JSON: `text` writes the terminal of texts, the rest is words."""

    def __init__(
        self,
        lark: Lark,
        report: Report,
        root: Mapping[str, Any],
        *,
        words: Mapping[str, str],
        text: Callable[[str | None], str],
        key: Callable[[str], str | None],
        between: tuple[str, str],
    ) -> None:
        self._lark, self._report, self._root = lark, report, root
        self._words = words
        self._text, self._key = text, key
        self._comma, self._colon = between
        self._by_reference: dict[str, str] = {}

    def value(self, schema: Any, pointer: str) -> str:
        """Return the rule of a value."""
        if not isinstance(schema, dict):
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._by_reference:
                self._by_reference[reference] = name = self._lark.reserve()
                self._lark.define(name, self.value(dict(resolve(schema, self._root)), pointer))
            return self._by_reference[reference]
        for word in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(word), list) and parts:
                self._report.unknown(pointer, schema, {word})
                rules = [self.value(part, f"{pointer}/{word}/{at}") for at, part in enumerate(parts)]
                return self._lark.rule(" | ".join(rules))
        if "enum" in schema or "const" in schema:
            members = schema.get("enum", [schema.get("const")])
            return self._lark.rule(" | ".join(self.constant(member) for member in members))
        types = types_of(schema, self._root) & {*TYPES}
        if not types:
            self._report.unknown(pointer, schema, {"type"})
            return self._any()
        return self._lark.rule(" | ".join(self._typed(kind, schema, pointer) for kind in sorted(types)))

    def constant(self, value: Any) -> str:
        """Write one value."""
        match value:
            case None | bool():
                return literal(self._words[str(value)])
            case str():
                return self._text(literal(value))
            case list():
                return " ".join(['"["', f" {self._comma} ".join(map(self.constant, value)), '"]"'])
            case dict():
                pairs = [
                    f"{self._key(key)} {self._colon} {self.constant(item)}" for key, item in value.items()
                ]
                return " ".join(['"{"', f" {self._comma} ".join(pairs), '"}"'])
            case _:
                return literal(repr(value))

    def _typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> str:
        match kind:
            case "string":
                own = {
                    key: schema[key]
                    for key in schema.keys() & {"pattern", "minLength", "maxLength", "format"}
                }
                return self._text(bare_text(own, self._report, pointer))
            case "boolean":
                return self._lark.rule(f"{literal(self._words['True'])} | {literal(self._words['False'])}")
            case "null":
                return literal(self._words["None"])
            case "array":
                return self._array(schema, pointer)
            case "object":
                return self._object(schema, pointer)
            case _:
                limits = schema.keys() & {
                    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
                }
                if not limits:
                    return self._lark.terminal(INTEGER if kind == "integer" else NUMBER)
                own = {"type": kind, **{key: schema[key] for key in limits}}
                return self._report.json(self._lark, own, {}, pointer)

    def _array(self, schema: Mapping[str, Any], pointer: str) -> str:
        self._report.unknown(
            pointer, self.of_type(schema, "array"), {"type", "items", "minItems", "maxItems"}
        )
        item = self.value(schema.get("items", {}), f"{pointer}/items")
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        more = f"({self._comma} {item})"
        most = "" if high is None else max(high - 1, 0)
        items = f"{item} {more}{{{max(low - 1, 0)},{most}}}"
        if high == 0:
            items = '""'
        return self._lark.rule(f'"[" {items} "]"' if low else f'"[" ({items})? "]"')

    def _object(self, schema: Mapping[str, Any], pointer: str) -> str:
        items = self.properties(schema, pointer, self._key, self._colon)
        first = self._lark.sequence(items, self._comma)
        if not first:
            return literal("{}")
        return self._lark.rule('"{" ' + (first if any(must for _, must in items) else f"({first})?") + ' "}"')

    def properties(
        self, schema: Mapping[str, Any], pointer: str, key: Callable[[str], str | None], colon: str
    ) -> list[tuple[str, bool]]:
        """Return the pairs of an object's keys and values, and which are required."""
        known = {"type", "properties", "required", "additionalProperties"}
        self._report.unknown(pointer, self.of_type(schema, "object"), known)
        items = []
        for name, part, must in properties_of(schema):
            where = f"{pointer}/properties/{name}"
            written = key(name)
            if written is None:
                report_unwritable_name(self._report, where, name, is_required=must)
            else:
                items.append((self._lark.rule(f"{written} {colon} {self.value(part, where)}"), must))
        return items

    @staticmethod
    def of_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Return the schema of an object or of a list without the keywords of other types."""
        others = {
            *("pattern", "minLength", "maxLength", "format", "minimum", "maximum", "exclusiveMinimum"),
            *("exclusiveMaximum", "multipleOf"),
            *(("items", "minItems", "maxItems") if kind == "object" else ("properties", "required")),
            "additionalProperties" if kind == "array" else "",
        }
        return {key: value for key, value in schema.items() if key not in others}

    def _any(self) -> str:
        rules = [self._text(None), self._lark.terminal(NUMBER), *map(literal, self._words.values())]
        return self._lark.rule(" | ".join(rules))


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the properties of an object: name, schema, whether it is required. Others are not written."""
    named = schema.get("properties")
    named = named if isinstance(named, dict) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    found = [(name, part, name in required) for name, part in named.items()]
    return found + [(name, {}, True) for name in required if isinstance(name, str) and name not in named]


def report_unwritable_name(report: Report, pointer: str, name: str, *, is_required: bool) -> None:
    """Report a property whose name cannot be written. Raises GrammarError if it has to be."""
    if is_required:
        raise GrammarError(
            f"{pointer}: this model's format of calls cannot write the name {name!r}.", pointer
        )
    report.ignore(pointer, f"this model's format of calls cannot write the name {name!r}")


def _searched(regex: str) -> str | None:
    """Return a pattern that matches the whole of every text in which the regex is found. None: unknown."""
    begins, ends = regex.startswith("^"), regex.endswith("$") and not regex.endswith("\\$")
    inner = regex[begins : len(regex) - ends]
    if (begins or ends) and "|" in inner.replace("\\|", "") and "(" not in inner:
        return None
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _refers_elsewhere(schema: Any) -> bool:
    references = (value.get("$ref") for value in values_in(schema) if isinstance(value, dict))
    known = ("#/$defs/", "#/definitions/")
    return any(isinstance(each, str) and not each.startswith(known) for each in references)
