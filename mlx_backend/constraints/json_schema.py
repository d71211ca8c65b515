"""What a JSON Schema may ask for, and where in it an error is.

Knows schemas as plain data. llguidance decides what can be enforced; this module has the limits in front of it, and
turns its errors into words and a place in the schema.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeGuard

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.conversation.json_values import MAX_DEPTH, excerpt, is_too_deep, json_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

type Schema = dict[str, Any]

MAX_LENGTH = 200_000
"""Characters of a schema."""
MAX_OPTIONAL = 500
"""Optional properties of one object: each of them may be the next, or not."""
MAX_VALIDATIONS = 60
"""Parts of a schema that are validated to find the place of an error."""

WHITE_SPACE = r"( |\r?\n[ \t]{0,40})"
"""What may stand between two parts of a JSON text: a blank, or a line break and indentation."""

ANNOTATIONS = frozenset(
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
# Keywords that say, or may say, whether further properties are allowed.
_OPENING = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "dependentSchemas", "if"),
)
# Dates and times by RFC 3339. llguidance's own formats also allow a second 60 at any minute (few readers take it even
# where it is right), 29 February in every year, and digits of a second without end, which a model may write until its
# reply is cut: here they end at nanoseconds. One pattern stands in place of each: llguidance intersects all that
# constrains a text, and gives up on a format, a pattern and a `maxLength` together.
_LEAP_YEAR = (
    "([0-9][0-9](0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"  # 2000 is one, 1900 is none
)
_DAY = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"([0-9]{{4}}-({_DAY})|{_LEAP_YEAR}-02-29)"
_HOUR, _MINUTE = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(\.[0-9]{{1,9}})?([Zz]|[+-]{_HOUR}:{_MINUTE})"
_MOMENTS = {"time": f"^{_TIME}$", "date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""Patterns of the formats of dates and times."""
_MAX_ALTERNATIVES = 50
"""Alternatives of a oneOf, which are compared pairwise."""


def check_schema(schema: object) -> Schema:
    """Return the schema if it is an object of reasonable size; raise a GrammarError if it is not."""
    if not isinstance(schema, dict):
        raise GrammarError(f"A JSON Schema is an object; {excerpt(schema)} is {json_type(schema)}.")
    if is_too_deep(schema):
        raise GrammarError(f"The schema is nested more than {MAX_DEPTH} levels deep.")
    try:
        length = len(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise GrammarError("The schema holds half of a surrogate pair, which is not a character.") from None
    except ValueError:
        raise GrammarError("The schema holds NaN or Infinity, which are not JSON.") from None
    if length > MAX_LENGTH:
        raise GrammarError(f"The schema has {length} characters; at most {MAX_LENGTH} are allowed.")
    for value in values_in(schema):
        if isinstance(value, dict):
            count = _length(value.get("properties")) - _length(value.get("required"))
            if count > MAX_OPTIONAL:
                raise GrammarError(
                    f"An object of the schema has {count} optional properties; at most {MAX_OPTIONAL} are allowed."
                )
    return schema


def values_in(schema: object) -> Iterator[object]:
    """Yield every value in a schema, itself first."""
    pending = [schema]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, list | dict):
            pending += value if isinstance(value, list) else value.values()


def serialise(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Write a schema for llguidance, with the layout that is allowed. Not strict: it may ignore keywords."""
    schema = _with_real_moments(dict(schema))
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": not strict}})


def close_objects(schema: Schema) -> Schema:
    """Let objects have no other properties than those that are named, where the schema does not say.

    A schema whose constraints intersect is left as it is: an object closed there may exclude a neighbour's properties.
    """
    return schema if has_intersections(schema) else _closed(schema)


def _closed(schema: Schema) -> Schema:
    copy = _with_inner(schema, _closed)
    named, required = schema.get("properties"), schema.get("required", [])
    is_decided = any(key in schema for key in _OPENING)
    if (
        _is_schema(named)
        and isinstance(required, list)
        and not is_decided
        and all(name in [*named] for name in required)
    ):
        copy["additionalProperties"] = False
    return copy


def _with_real_moments(schema: Schema) -> Schema:
    """Let dates and times be such that exist, where a format would also allow others."""
    copy = _with_inner(schema, _with_real_moments)
    kind = schema.get("type", "string")
    is_text = "string" in (kind if isinstance(kind, list) else [kind])
    moment, parts = _MOMENTS.get(str(schema.get("format"))), copy.get("allOf", [])
    if moment is None or not is_text or not isinstance(parts, list) or schema.keys() & {"const", "enum"}:
        return copy
    del copy["format"]
    if "pattern" not in schema:
        return copy | {"pattern": moment}
    return copy | {"allOf": [*parts, {"pattern": moment}]}


def _with_inner(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a schema whose inner schemas, one level below, are changed."""

    def changed(inner: Any) -> Any:
        return change(inner) if isinstance(inner, dict) else inner

    copy: Schema = dict(schema)
    for key in _IN_OBJECTS:
        if isinstance(schema.get(key), dict):
            copy[key] = {name: changed(inner) for name, inner in schema[key].items()}
    for key in _IN_LISTS:
        if isinstance(schema.get(key), list):
            copy[key] = [changed(inner) for inner in schema[key]]
    for key in _ALONE:
        if isinstance(schema.get(key), dict):
            copy[key] = change(schema[key])
    return copy


def has_intersections(schema: Any) -> bool:
    """Whether several parts of a schema constrain one value, so that they have to be intersected."""
    return any(isinstance(value, dict) and _intersects(value) for value in values_in(schema))


def _intersects(schema: Schema) -> bool:
    keywords = schema.keys() - ANNOTATIONS - {"type"}
    combining = keywords & {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"}
    return (
        (bool(combining) and len(keywords) > 1)
        or _length(schema.get("allOf")) > 1
        or _length(schema.get("oneOf")) > _MAX_ALTERNATIVES
        or _length(schema.get("patternProperties")) > 1
    )


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | dict) else 0


# -- errors -------------------------------------------------------------------------------------------------


def locate_error(schema: Schema, error: str, error_of: Callable[[Schema], str]) -> str:
    """Return the JSON Pointer of the smallest part of a schema that has this error by itself."""
    definitions: Schema = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    found, part, validations = "", schema, 0
    seen = {found}
    while True:
        for pointer, inner in _parts(schema, found, part):
            validations += 1
            if validations > MAX_VALIDATIONS:
                return found
            if pointer in seen or has_intersections(inner) or error_of({**inner, **definitions}) != error:
                continue
            found, part = pointer, inner
            seen.add(found)
            break
        else:
            return found


def _parts(root: Schema, pointer: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly inside one, and the one it refers to, each with its JSON Pointer."""
    for key in _IN_OBJECTS:
        if isinstance(inner := schema.get(key), dict):
            yield from (
                (f"{pointer}/{key}/{_escaped(name)}", part)
                for name, part in inner.items()
                if _is_schema(part)
            )
    for key in _IN_LISTS:
        if isinstance(inner := schema.get(key), list):
            yield from ((f"{pointer}/{key}/{at}", part) for at, part in enumerate(inner) if _is_schema(part))
    for key in _ALONE:
        if _is_schema(inner := schema.get(key)):
            yield f"{pointer}/{key}", inner
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if _is_schema(target) else None
        if _is_schema(target):
            yield reference[1:], target


def _is_schema(schema: object) -> TypeGuard[Schema]:
    return isinstance(schema, dict)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_IN_JSON = re.compile(r"failed to compile JSON schema: (.*)", re.DOTALL)
# What llguidance puts before it shows the text again.
_EXCERPT = re.compile(r"\n\s+\d+ \| |\n<non-verbose/>")
_EXPLANATIONS = [
    (re.compile(r'Unimplemented keys: \[("[^"]*")\]'), r"the keyword \1 cannot be enforced here"),
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"the keywords \1 cannot be enforced here"),
    (re.compile(r"Unknown format: (.*)"), r'the format "\1" cannot be enforced here'),
    (re.compile(r"Unsatisfiable schema: (.*)", re.DOTALL), r"nothing can satisfy it: \1"),
    (re.compile(r"Invalid type: (.*)"), r'there is no type "\1"'),
    (re.compile(r"Pointer '(.*)' does not exist"), r'the "$ref" to "#\1" does not exist'),
    (
        re.compile(r"Resource '(.*?)' is not present.*"),
        r'the "$ref" to another document (\1) is not followed',
    ),
    (
        re.compile(r".*regex parse error:\s*(.*?)\n.*error: (.*)", re.DOTALL),
        r"the pattern \1 is not valid: \2",
    ),
    (re.compile(r"oneOf not fully supported.*"), "a oneOf is enforced as anyOf: a value may match several"),
    (re.compile(r"oneOf constraints are not supported.*"), "this oneOf cannot be enforced: use anyOf"),
    (re.compile(r"NoExtension.*"), "nothing can satisfy it"),
    (
        re.compile(r"Unable to determine if regex is empty.*", re.DOTALL),
        "it is too complex: whether a text can match all of its patterns takes too long to find out",
    ),
    (re.compile(r"schema too large|grammar size.*", re.DOTALL), "it is too complex"),
    (re.compile(r"fuel exhausted.*|.*[Tt]oo many.*|.*Current row has.*", re.DOTALL), "it is too complex"),
]
_MAX_ERROR_LENGTH = 300


def describe_error(error: str) -> str:
    """Put one of llguidance's errors, or what it says it ignores, into words for people."""
    text = _EXCERPT.split(error, maxsplit=1)[0]
    if inner := _IN_JSON.search(text):
        text = inner[1]
    for pattern, words in _EXPLANATIONS:
        if found := pattern.fullmatch(text.strip()):
            text = found.expand(words)
            break
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ERROR_LENGTH else text[: _MAX_ERROR_LENGTH - 1] + "…"
