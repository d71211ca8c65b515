"""What a JSON Schema may ask for, and where in it the trouble is.

Knows schemas as plain data. What can be held to and what cannot, llguidance says; here stand the limits in
front of it, and the words and the place behind it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeGuard

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.conversation.json_values import DEEPEST, kind, shown, too_deep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

type Schema = dict[str, Any]

LONGEST = 200_000  # characters of a schema
MAX_OPTIONAL = 500  # properties of one object: each of them may be the next, or not
MAX_LOOKS = 60  # how often a part of a schema is read to find the place of an error

WHITE_SPACE = r"( |\r?\n[ \t]{0,40})"
"""What may stand between two parts of a JSON text: a blank, or a line break and an indentation."""

_ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
        *("description", "example", "examples", "readOnly", "title", "writeOnly"),
    }
)
_IN_OBJECTS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALONE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_OPENING = (  # what says something about further properties, or may
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "dependentSchemas", "if"),
)
_MAX_CHOICES = 50  # of a oneOf, compared pairwise


def read_schema(schema: object) -> Schema:
    """Return a schema that is an object of bearable size, or raise a GrammarError."""
    if not isinstance(schema, dict):
        raise GrammarError(f"A JSON Schema is an object; {shown(schema)} is {kind(schema)}.")
    if too_deep(schema):
        raise GrammarError(f"The schema is nested more than {DEEPEST} levels deep.")
    try:
        length = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise GrammarError("The schema holds half a surrogate pair, which is no character.") from None
    except ValueError:
        raise GrammarError("The schema holds NaN or Infinity, which are no JSON.") from None
    if length > LONGEST:
        raise GrammarError(f"The schema has {length} characters; {LONGEST} are the most.")
    for value in _values(schema):
        if isinstance(value, dict):
            count = _length(value.get("properties")) - _length(value.get("required"))
            if count > MAX_OPTIONAL:
                raise GrammarError(
                    f"An object of the schema has {count} optional properties; {MAX_OPTIONAL} are the most."
                )
    return schema


def _values(schema: object) -> Iterator[object]:
    """Everything in a schema, itself first."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, list | dict):
            waiting += value if isinstance(value, list) else value.values()


def spelt(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Spell a schema for llguidance, with the layout that is allowed. Not strict: it may ignore keywords."""
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": not strict}})


def closed(schema: Schema) -> Schema:
    """Let objects have the properties that are named and no others, where the schema does not say.

    A schema in which constraints meet is left as it is: what is closed there may shut out its neighbour.
    """
    return schema if constraints_meet(schema) else _closed(schema)


def _closed(schema: Schema) -> Schema:
    copy: Schema = dict(schema)
    for key in _IN_OBJECTS:
        if isinstance(schema.get(key), dict):
            copy[key] = {name: _closed_any(inner) for name, inner in schema[key].items()}
    for key in _IN_LISTS:
        if isinstance(schema.get(key), list):
            copy[key] = [_closed_any(inner) for inner in schema[key]]
    for key in _ALONE:
        if isinstance(schema.get(key), dict):
            copy[key] = _closed(schema[key])
    named, required = schema.get("properties"), schema.get("required", [])
    says_more = any(key in schema for key in _OPENING)
    if (
        _is(named)
        and isinstance(required, list)
        and not says_more
        and all(name in [*named] for name in required)
    ):
        copy["additionalProperties"] = False
    return copy


def _closed_any(schema: Any) -> Any:
    return _closed(schema) if isinstance(schema, dict) else schema


def constraints_meet(schema: Any) -> bool:
    """Whether one value is held by several parts of a schema at once, so that they must be multiplied."""
    return any(isinstance(value, dict) and _meet(value) for value in _values(schema))


def _meet(schema: Schema) -> bool:
    says = schema.keys() - _ANNOTATIONS - {"type"}
    combining = says & {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"}
    return (
        (bool(combining) and len(says) > 1)
        or _length(schema.get("allOf")) > 1
        or _length(schema.get("oneOf")) > _MAX_CHOICES
        or _length(schema.get("patternProperties")) > 1
    )


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0


# -- errors -------------------------------------------------------------------------------------------------


def place_of(schema: Schema, error: str, error_of: Callable[[Schema], str]) -> str:
    """Return the smallest part of a schema that has this error by itself, as a JSON Pointer."""
    kept: Schema = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    place, part, looks = "", schema, 0
    been = {place}
    while True:
        for pointer, inner in _parts(schema, place, part):
            looks += 1
            if looks > MAX_LOOKS:
                return place
            if pointer not in been and not constraints_meet(inner) and error_of({**inner, **kept}) == error:
                place, part = pointer, inner
                been.add(place)
                break
        else:
            return place


def _parts(root: Schema, place: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas directly inside one, and the one it refers to."""
    for key in _IN_OBJECTS:
        if isinstance(inner := schema.get(key), dict):
            yield from (
                (f"{place}/{key}/{_escaped(name)}", part) for name, part in inner.items() if _is(part)
            )
    for key in _IN_LISTS:
        if isinstance(inner := schema.get(key), list):
            yield from ((f"{place}/{key}/{at}", part) for at, part in enumerate(inner) if _is(part))
    for key in _ALONE:
        if _is(inner := schema.get(key)):
            yield f"{place}/{key}", inner
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if _is(target) else None
        if _is(target):
            yield reference[1:], target


def _is(schema: object) -> TypeGuard[Schema]:
    return isinstance(schema, dict)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_IN_JSON = re.compile(r"failed to compile JSON schema: (.*)", re.DOTALL)
_EXCERPT = re.compile(r"\n\s+\d+ \| |\n<non-verbose/>")  # the text is shown again behind this
_WORDS = [
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"nothing can be held to the keyword \1 here"),
    (re.compile(r"Unknown format: (.*)"), r'nothing can be held to the format "\1" here'),
    (re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL), r"nothing can satisfy it: \1"),
    (re.compile(r"Invalid type: (.*)"), r'there is no type "\1"'),
    (re.compile(r"Pointer '(.*)' does not exist"), r'the "$ref" to "#\1" leads nowhere'),
    (re.compile(r"Resource '(.*?)' is not present.*"), r'a "$ref" to another document (\1) is not followed'),
    (
        re.compile(r".*regex parse error:\s*(.*?)\n.*error: (.*)", re.DOTALL),
        r"the pattern \1 cannot be read: \2",
    ),
    (re.compile(r"oneOf constraints are not supported.*"), "nothing can be held to this oneOf: use anyOf"),
    (re.compile(r"NoExtension.*"), "nothing can satisfy it"),
    (re.compile(r"schema too large|grammar size.*", re.DOTALL), "it is too complex"),
    (re.compile(r"fuel exhausted.*|.*[Tt]oo many.*|.*Current row has.*", re.DOTALL), "it is too complex"),
]
_LONGEST_WORDS = 300


def told(error: str) -> str:
    """Say an error of llguidance's in words for people."""
    text = _EXCERPT.split(error, maxsplit=1)[0]
    if inner := _IN_JSON.search(text):
        text = inner[1]
    for pattern, words in _WORDS:
        if found := pattern.fullmatch(text.strip()):
            text = found.expand(words)
            break
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_WORDS else text[: _LONGEST_WORDS - 1] + "…"
