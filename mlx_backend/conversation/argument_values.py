"""The value of an argument that a model wrote as bare text, by the schema of its tool's parameter.

Families that write calls as XML write `3` for a number and for the text "3" alike: only the schema tells. A parameter
whose schema says string keeps its text, whatever it looks like. Text that does not fit its schema is kept as text, too:
what the model wrote is never lost, and the tool's owner sees it. Knows JSON Schema as far as types go, and no format.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.conversation.json_arguments import repair_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

type Untyped = Literal["text", "json"]
"""What a value without a schema is: its text (but `null`), or JSON where it is JSON and no string."""

_MAX_REFERENCES = 16
"""References followed one after the other: they may go in circles."""
_MAX_LITERAL = 65_536
"""Characters of a Python literal: its parser is slow, and recursive."""
_INTEGER = re.compile(r"[+-]?\d{1,4000}\Z")
_BRACKETS = frozenset("{[(\"'#\\")
"""What objects and lists begin with, in JSON and in Python."""
_WORD = re.compile(r"[-+.\w]+")
"""A number, or a word like `null`."""
_TYPES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
# Words that people write for JSON Schema's.
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char"), "string"),
    **dict.fromkeys(("int", "long", "short", "int32", "int64", "uint"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "arr", "tuple"), "array"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("none", "nil"), "null"),
}
_TRUE, _FALSE = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off"})


def convert(text: str, schema: Any, root: Any = None, *, untyped: Untyped = "text") -> Any:
    """Return the value of a text. `root` is the schema that `$ref`s point into, `schema` itself by default."""
    root = schema if root is None else root
    if (choice := _choice(text, schema, root)) is not None:
        return choice[0]
    types = types_of(schema, root)
    if not types:
        return _without_schema(text, untyped)
    if types == {"string"}:
        return text
    for kind, converter in _CONVERTERS.items():
        if kind in types and (converted := converter(text)) is not None:
            return converted[0]
    # A parameter that may be left out is often written as null, though its schema does not say so.
    if "string" not in types and text.strip() in ("null", "None"):
        return None
    return text


def fitted(value: Any, schema: Any, root: Any) -> Any:
    """Give a quoted text the type of its schema where that has no texts: models quote numbers, too."""
    types = types_of(schema, root)
    return (
        convert(value, schema, root) if isinstance(value, str) and types and "string" not in types else value
    )


def is_text(beginning: str, schema: Any, root: Any, *, untyped: Untyped = "text") -> bool:
    """Whether a value that begins so is its text, whatever follows. It may be one if this is not known yet."""
    if _members(resolve(schema, root)):
        return False
    types = types_of(schema, root)
    if types == {"string"}:
        return True
    word = beginning.strip()
    if (types and "string" not in types) or not word:
        return False
    if word[0] in _BRACKETS and (types & {"array", "object"} or (not types and untyped == "json")):
        return False
    return _WORD.fullmatch(word) is None


def types_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows, as far as it says so; none if it does not."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        part = resolve(waiting.pop(), root)
        if id(part) in seen:  # schemas may go in circles
            continue
        seen.add(id(part))
        types.update(_own_types(part))
        if part.get("type") is None:
            waiting += _parts(part)
    return frozenset(types)


def property_schema(parameters: Mapping[str, Any], name: str) -> Any:
    """Return the schema of one parameter, an empty one if there is none."""
    for schema in (parameters, *_parts(resolve(parameters, parameters))):
        properties = resolve(schema, parameters).get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    additional = parameters.get("additionalProperties")
    return additional if isinstance(additional, Mapping) else {}


def property_names(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of a tool's parameters, in their order."""
    properties = resolve(parameters, parameters).get("properties")
    return [str(name) for name in properties] if isinstance(properties, Mapping) else []


def offered_property(parameters: Mapping[str, Any], word: str) -> str:
    """Return the parameter that a word means: Python cannot say every name, and writes `from_` or `x_y`."""
    names = property_names(parameters)
    if word in names or not names:
        return word
    alike = [name for name in names if _plain(name) == _plain(word)]
    return alike[0] if len(alike) == 1 else word


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name)


def resolve(schema: Any, root: Any) -> Mapping[str, Any]:
    """Follow `$ref`s into the same schema; what leads nowhere is an empty schema."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.removeprefix("#").strip("/").split("/") if reference.strip("#/") else ():
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}


def parse_json(text: str) -> Any:
    """Parse JSON, also with raw line breaks in its strings. Raises ValueError, whatever is wrong."""
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def python_literal(text: str) -> Any:
    """Return the value of a Python literal that JSON has, too; None if it is none."""
    if len(text) > _MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    declared = schema.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            yield _ALIASES.get(name.strip().lower(), name.strip().lower())
    for member in _members(schema):
        yield _TYPES.get(type(member), "object")
    if schema.get("nullable") is True:
        yield "null"
    if declared is None and "properties" in schema:
        yield "object"
    if declared is None and ("items" in schema or "prefixItems" in schema):
        yield "array"


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    return [
        part
        for word in ("anyOf", "oneOf", "allOf")
        if isinstance(parts := schema.get(word), list)
        for part in parts
    ]


def _members(schema: Mapping[str, Any]) -> list[Any]:
    members = schema.get("enum")
    members = list(members) if isinstance(members, list) else []
    return [*members, schema["const"]] if "const" in schema else members


def _choice(text: str, schema: Any, root: Any) -> tuple[Any] | None:
    """Find the member of an enumeration that is spelt like this."""
    members = _members(resolve(schema, root))
    if text in members:
        return (text,)
    word = text.strip()
    for member in members:
        if word == (member if isinstance(member, str) else json.dumps(member)):
            return (member,)
    return None


def _without_schema(text: str, untyped: Untyped) -> Any:
    if untyped == "text":
        return None if text.strip() == "null" else text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return text if isinstance(value, str) or value != value else value


# Each returns the value in a tuple, None if the text has not this type.


def _null(text: str) -> tuple[None] | None:
    return (None,) if text.strip() in ("null", "None", "nil") else None


def _integer(text: str) -> tuple[int] | None:
    word = text.strip()
    if _INTEGER.match(word):
        return (int(word),)
    number = _number(word)
    return (int(number[0]),) if number and float(number[0]).is_integer() else None


def _number(text: str) -> tuple[int | float] | None:
    word = text.strip()
    if _INTEGER.match(word):
        return (int(word),)
    try:
        number = float(word)
    except ValueError:
        return None
    if "_" in word or number != number or number in (float("inf"), float("-inf")):
        return None
    return (number,)


def _boolean(text: str) -> tuple[bool] | None:
    word = text.strip().lower()
    return (word in _TRUE,) if word in _TRUE | _FALSE else None


def _collection(text: str, kind: type) -> tuple[Any] | None:
    try:
        value = parse_json(text)
        if isinstance(value, str):  # JSON in a JSON string
            value = parse_json(value)
    except ValueError:
        value = python_literal(text)
        if value is None and text.strip()[:1] in ("{", "["):
            try:
                value = parse_json(repair_arguments(text))
            except ValueError:
                return None
    return (value,) if isinstance(value, kind) else None


_CONVERTERS: Mapping[str, Callable[[str], tuple[Any] | None]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": lambda text: _collection(text, dict),
    "array": lambda text: _collection(text, list),
}
