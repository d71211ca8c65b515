"""Any schema is compiled or refused; what it then lets a model say matches it, and what matches it can be said."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from byte_tokenizer import ByteTokenizer
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from mlx_backend.constraints import GrammarError, Grammars
from mlx_backend.conversation.dialects import DIALECTS

END = 256
MAX_BYTES = 400


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(("</s>",), None), DIALECTS["plain"])


NAMES = st.sampled_from(["a", "b", "c", "ключ", 'q"', "\\"])
# llguidance takes no DEL as it is, only as \u007f; json.dumps does not escape it.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x7f"), max_size=6)


@st.composite
def schemas_with_values(draw: st.DrawFn, depth: int = 3) -> tuple[dict[str, Any], Any]:
    """A schema, and a value that matches it."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = draw(st.sampled_from([*kinds, "object", "array", "anyOf"] if depth else kinds))
    match kind:
        case "string":
            text = draw(WORDS)
            low, high = draw(st.integers(0, len(text))), draw(st.integers(len(text), len(text) + 3))
            return draw(
                st.sampled_from([{"type": "string"}, {"type": "string", "minLength": low, "maxLength": high}])
            ), text
        case "integer" | "number":
            value = draw(st.integers(-(10**6), 10**6))
            low, high = value - draw(st.integers(0, 100)), value + draw(st.integers(0, 100))
            return draw(
                st.sampled_from([{"type": kind}, {"type": kind, "minimum": low, "maximum": high}])
            ), value
        case "boolean":
            return {"type": "boolean"}, draw(st.booleans())
        case "null":
            return {"type": "null"}, None
        case "enum":
            values = draw(st.lists(st.one_of(WORDS, st.integers(-9, 9), st.none()), min_size=1, max_size=4))
            return {"enum": values}, draw(st.sampled_from(values))
        case "const":
            value = draw(st.one_of(WORDS, st.integers(-9, 9), st.booleans()))
            return {"const": value}, value
        case "array":
            schema, first = draw(schemas_with_values(depth=depth - 1))
            count = draw(st.integers(0, 3))
            return {"type": "array", "items": schema, "minItems": 0, "maxItems": 3}, [first] * count
        case "anyOf":
            parts = draw(st.lists(schemas_with_values(depth=depth - 1), min_size=1, max_size=3))
            return {"anyOf": [schema for schema, _ in parts]}, draw(
                st.sampled_from([value for _, value in parts])
            )
        case _:
            names = draw(st.lists(NAMES, unique=True, max_size=4))
            parts = [draw(schemas_with_values(depth=depth - 1)) for _ in names]
            sent = [draw(st.booleans()) for _ in names]
            required = [
                name for name, is_sent in zip(names, sent, strict=True) if is_sent and draw(st.booleans())
            ]
            schema = {
                "type": "object",
                "properties": {name: part for name, (part, _) in zip(names, parts, strict=True)},
                "required": required,
                "additionalProperties": False,
            }
            value = {
                name: each for name, (_, each), is_sent in zip(names, parts, sent, strict=True) if is_sent
            }
            return schema, value


def is_allowed(mask: Any, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


@examples(2)
@given(pair=schemas_with_values())
def test_a_value_that_matches_can_be_said(grammars: Grammars, pair: tuple[dict[str, Any], Any]) -> None:
    schema, value = pair
    jsonschema_rs.validate(schema, value)
    state = grammars.json_schema(
        {"type": "object", "properties": {"v": schema}, "required": ["v"]}, strict=True
    ).start()
    text = json.dumps({"v": value}, ensure_ascii=False)
    for at, token in enumerate([*text.encode(), END]):
        mask = state.allowed_mask()
        assert mask is not None
        assert is_allowed(mask, token), text.encode()[:at]
        if token != END:
            state.advance(token)


@examples(2)
@given(pair=schemas_with_values(), data=st.data())
def test_what_can_be_said_matches(
    grammars: Grammars, pair: tuple[dict[str, Any], Any], data: st.DataObject
) -> None:
    schema = {
        "type": "object",
        "properties": {"v": pair[0]},
        "required": ["v"],
        "additionalProperties": False,
    }
    state = grammars.json_schema(schema, strict=True).start()
    said = bytearray()
    closes = data.draw(st.integers(0, 20))
    while len(said) < MAX_BYTES:
        mask = state.allowed_mask()
        assert mask is not None
        if is_allowed(mask, END):
            break
        allowed = [token for token in range(256) if is_allowed(mask, token)]
        # After a few free choices: what ends a text, a number, an object.
        closing = [token for token in allowed if token in b'"}],:tfn0'] if len(said) > closes else []
        token = data.draw(st.sampled_from(closing or allowed))
        said.append(token)
        state.advance(token)
    else:
        assume(False)
    jsonschema_rs.validate(schema, json.loads(said.decode()))


KEYWORDS = st.sampled_from(
    [
        *(
            "type",
            "properties",
            "required",
            "items",
            "enum",
            "const",
            "anyOf",
            "allOf",
            "oneOf",
            "not",
            "$ref",
            "$defs",
        ),
        *(
            "pattern",
            "format",
            "minLength",
            "maxLength",
            "minimum",
            "maximum",
            "multipleOf",
            "minItems",
            "maxItems",
        ),
        *(
            "prefixItems",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "uniqueItems",
            "if",
            "then",
        ),
    ]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**33),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [
            "string",
            "integer",
            "object",
            "#",
            "#/$defs/a",
            "#/properties/a",
            "date",
            "(",
            "[a-",
            "^a*$",
            "\\p{L}",
        ]
    ),
)
ANYTHING = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYWORDS, st.just("a")), inner, max_size=4)
    ),
    max_leaves=12,
)


@examples(0.5)
@given(schema=st.dictionaries(KEYWORDS, ANYTHING, max_size=5), strict=st.booleans())
def test_anything_for_a_schema_is_compiled_or_refused_in_words(
    grammars: Grammars, schema: dict[str, Any], strict: bool
) -> None:
    try:
        state = grammars.json_schema(schema, strict=strict).start()
    except GrammarError:
        return
    assert state.allowed_mask() is not None
