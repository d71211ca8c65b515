"""The forms in which people send a schema: each means the same, whatever was pasted around it."""

import json
from typing import Any

import pytest

from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.chat.request import AnswerFormat
from mlx_backend.conversation.json_values import unwrapped_schema

SCHEMA = {"type": "object", "properties": {"schema": {"type": "string"}}, "required": ["schema"]}
NAMED = {"name": "plan", "description": "A plan.", "strict": True, "schema": SCHEMA}
PASTED = {"type": "json_schema", "json_schema": NAMED}


def answer_format(**fields: Any) -> AnswerFormat | None:
    written = {"messages": [], **fields}
    return ChatBody.parse(written).request().answer_format


@pytest.mark.parametrize(
    "response_format",
    [
        PASTED,
        {"type": "json_schema", **NAMED},
        {"type": "json_schema", "json_schema": PASTED},
        {"type": "json_schema", "json_schema": {"name": "response", "schema": PASTED}},
        {"type": "json_schema", "json_schema": {"name": "response", "strict": False, "schema": NAMED}},
        {"type": "json_object", "schema": PASTED},
    ],
    ids=str,
)
def test_a_response_format_may_stand_in_another(response_format: dict[str, Any]) -> None:
    assert answer_format(response_format=response_format) == AnswerFormat(
        kind="json_schema", value=SCHEMA, strict=True, name="plan", description="A plan."
    )


@pytest.mark.parametrize("field", ["json_schema", "guided_json"])
@pytest.mark.parametrize("written", [NAMED, PASTED, {"schema": SCHEMA}, SCHEMA], ids=str)
@pytest.mark.parametrize("as_text", [False, True])
def test_and_where_a_schema_alone_is_expected(field: str, written: dict[str, Any], *, as_text: bool) -> None:
    found = answer_format(**{field: json.dumps(written) if as_text else written})
    assert found is not None
    assert (found.value, found.field) == (SCHEMA, field)
    assert (found.name, found.strict) == (("plan", True) if "plan" in str(written) else ("", False))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        SCHEMA,
        {"properties": {"a": {}}, "schema": {"type": "string"}},
        {"description": "anything"},
        {"schema": "draft-07"},
        {"type": "json_schema", "json_schema": {"name": "nothing"}},
        [],
        None,
    ],
    ids=str,
)
def test_what_is_no_wrapping_is_left_as_it_is(schema: Any) -> None:
    assert unwrapped_schema(schema) == (schema, {})


def test_wrapping_of_any_depth_costs_no_recursion() -> None:
    deep: Any = SCHEMA
    for _ in range(100_000):
        deep = {"schema": deep}
    assert unwrapped_schema(deep)[0] is SCHEMA
