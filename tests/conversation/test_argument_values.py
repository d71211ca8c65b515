"""A value that was written as bare text gets the type of its schema, and is never guessed where that says string."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_backend.conversation.argument_values import Untyped, convert, property_names, property_schema

STRING = {"type": "string"}
NODE: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
ROOT: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"next": NODE}}, "count": {"type": "integer"}},
    "properties": {"count": {"$ref": "#/$defs/count"}, "node": NODE, "loop": {"$ref": "#/$defs/loop"}},
}
ROOT["$defs"]["loop"] = {"$ref": "#/$defs/loop"}


@pytest.mark.parametrize(
    "text", ["3", "3.0", "true", "null", "None", '{"a": 1}', "[1]", '"quoted"', "", " spaced ", "\n"]
)
@pytest.mark.parametrize(
    "schema", [STRING, {"type": ["string"]}, {"anyOf": [STRING, STRING]}, {"type": "str"}]
)
def test_a_string_stays_its_text(text: str, schema: dict[str, Any]) -> None:
    assert convert(text, schema) == text


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" -3\n", {"type": "integer"}, -3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("three", {"type": "integer"}, "three"),
        ("3.5", {"type": "number"}, 3.5),
        ("3", {"type": "number"}, 3),
        ("1e3", {"type": "number"}, 1000.0),
        ("nan", {"type": "number"}, "nan"),
        ("1_000", {"type": "number"}, "1_000"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("maybe", {"type": "boolean"}, "maybe"),
        ("null", {"type": "integer"}, None),
        ("null", {"type": "null"}, None),
        ('{"a": [1, "2"]}', {"type": "object"}, {"a": [1, "2"]}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ('"{\\"a\\": 1}"', {"type": "object"}, {"a": 1}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"type": "array"}, '{"a": 1}'),
        ("[1]", {"items": {}}, [1]),
        ("{}", {"properties": {}}, {}),
        ("null", {"type": ["string", "null"]}, None),
        ("x", {"type": ["string", "null"]}, "x"),
        ("5", {"anyOf": [{"type": "integer"}, STRING]}, 5),
        ("x", {"oneOf": [{"type": "integer"}, STRING]}, "x"),
        ("5", {"type": "integer", "nullable": True}, 5),
        ("null", {"type": "string", "nullable": True}, None),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("7", {"enum": [5, 6]}, 7),
        ("true", {"const": True}, True),
        ("red", {"type": "string", "enum": ["red"]}, "red"),
        ("5", {"$ref": "#/$defs/count"}, 5),
        ('{"next": null}', {"$ref": "#/$defs/node"}, {"next": None}),
        ("5", {"$ref": "#/$defs/loop"}, "5"),
        ("5", {"$ref": "#/nowhere/else"}, "5"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_a_value_has_the_type_of_its_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    found = convert(text, schema, ROOT)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "untyped", "value"),
    [
        ("5", "text", "5"),
        ("null", "text", None),
        ("5", "json", 5),
        ('"5"', "json", '"5"'),
        ("[1]", "json", [1]),
        ("x", "json", "x"),
        ("NaN", "json", "NaN"),
    ],
)
def test_without_a_schema_the_family_decides(text: str, untyped: Untyped, value: Any) -> None:
    for schema in ({}, None, True, {"description": "anything"}):
        assert convert(text, schema, untyped=untyped) == value


@pytest.mark.parametrize(
    "schema", ["string", 3, [], {"type": 3}, {"type": [None]}, {"anyOf": 1}, {"enum": "ab"}]
)
def test_a_schema_that_is_none_is_no_schema(schema: Any) -> None:
    assert convert("5", schema, untyped="json") == 5


def test_parameters_are_found_in_their_schema() -> None:
    parameters = {"allOf": [{"properties": {"a": STRING}}], "additionalProperties": {"type": "integer"}}
    assert property_schema(parameters, "a") == STRING
    assert property_schema(parameters, "b") == {"type": "integer"}
    assert property_schema({}, "a") == {}
    assert property_names({"properties": {"b": 1, "a": 2}}) == ["b", "a"]


def test_schemas_in_circles_end() -> None:
    circle: dict[str, Any] = {"anyOf": []}
    circle["anyOf"] = [circle, {"type": "integer"}, circle]
    assert convert("5", circle) == 5
