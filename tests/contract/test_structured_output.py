"""The official client asks for JSON and for calls, and gets them; the reasoning stays free."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import running

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with load_engine(MODEL_PATH) as engine, running(engine) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_matches_its_schema_and_the_reasoning_is_free(
    client: openai.OpenAI, temperature: float
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        reply = client.chat.completions.create(
            model="default",
            messages=FRANCE,
            response_format=form,
            temperature=temperature,
            seed=seed,
            max_tokens=300,
        )
        [choice] = reply.choices
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        answer = json.loads(choice.message.content)
        assert answer.keys() == {"city", "large"}
        assert isinstance(answer["large"], bool)
        assert choice.message.model_extra is not None
        assert choice.message.model_extra["reasoning_content"].startswith("Answer with JSON.") or temperature
        assert answer["city"] == "Paris" or temperature


def test_streamed_it_is_the_same(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    request: dict[str, Any] = {
        "model": "default",
        "messages": FRANCE,
        "response_format": form,
        "temperature": 0,
        "max_tokens": 300,
    }
    whole = client.chat.completions.create(**request)
    chunks = client.chat.completions.create(stream=True, **request)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    )


def test_any_object_is_valid_without_a_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="default",
        messages=FRANCE,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=300,
    )
    content, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert content is not None
    assert content.startswith("{")
    if finish == "stop":
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_forced(client: openai.OpenAI, choice: Any) -> None:
    reply = client.chat.completions.create(
        model="default", messages=FRANCE, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=300
    )
    [only] = reply.choices
    assert only.finish_reason == "tool_calls"
    assert only.message.tool_calls
    [call] = only.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": r'[ab]\n"x'}}, {'a\n"x', 'b\n"x'}),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*" W\nW: "yes" | "no"'}},
            {"*yes", "*no"},
        ),
        ({"type": "text"}, None),
    ],
    ids=["regex", "lark", "text"],
)
def test_a_custom_tool_gets_a_text_that_matches_its_grammar(
    client: openai.OpenAI, form: Any, expected: set[str] | None
) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "write", "format": form}}
    choice: Any = {"type": "custom", "custom": {"name": "write"}}
    fields: Any = {"model": "default", "messages": FRANCE, "tools": [tool, WEATHER], "tool_choice": choice}
    reply = client.chat.completions.create(**fields, max_tokens=300, temperature=0)
    assert reply.choices[0].message.tool_calls
    [call] = reply.choices[0].message.tool_calls
    assert call.type == "custom"
    assert call.custom.name == "write"
    assert expected is None or call.custom.input in expected
    stream = client.chat.completions.create(**fields, max_tokens=300, temperature=0, stream=True)
    deltas: list[Any] = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta.custom["input"] for delta in deltas) == call.custom.input
    result = {"role": "tool", "tool_call_id": call.id, "content": "Written."}
    fields["messages"] = [*FRANCE, {"role": "assistant", "tool_calls": [call.model_dump()]}, result]
    assert client.chat.completions.create(**{**fields, "tool_choice": "none"}).choices


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_tools_that_are_allowed_are_called(client: openai.OpenAI, mode: str) -> None:
    other: Any = {"type": "function", "function": {"name": "get_time"}}
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER, other],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        temperature=0,
        max_tokens=300,
    )
    calls = reply.choices[0].message.tool_calls or []
    assert all(call.type == "function" and call.function.name == "get_time" for call in calls)
    assert mode == "auto" or calls


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes, surely", "no, never"]},
        {"structured_outputs": {"choice": ["yes, surely", "no, never"]}},
        {"structured_outputs": {"regex": "yes, surely|no, never"}},
        {"regex": "yes, surely|no, never"},
        # As a client without the SDK writes it into the body.
        {"extra_body": {"guided_choice": ["yes, surely", "no, never"]}},
    ],
    ids=str,
)
def test_an_answer_can_be_limited_to_choices(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    reply = client.chat.completions.create(
        model="default", messages=FRANCE, temperature=0, reasoning_effort="low", extra_body=fields
    )
    assert reply.choices[0].message.content in ("yes, surely", "no, never")


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"json_schema": json.dumps(SCHEMA)},
        {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}},
    ],
    ids=str,
)
def test_other_servers_fields_for_a_schema_hold_the_answer_too(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    reply = client.chat.completions.create(
        model="default",
        messages=FRANCE,
        temperature=0,
        reasoning_effort="low",
        max_tokens=300,
        extra_body=fields,
    )
    assert json.loads(reply.choices[0].message.content or "").keys() == SCHEMA["properties"].keys()


def test_an_answer_with_a_schema_does_not_forbid_a_call(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    reply = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        response_format=form,
        temperature=0,
        max_tokens=300,
    )
    [only] = reply.choices
    assert only.finish_reason == "tool_calls"
    assert only.message.tool_calls
    assert only.message.tool_calls[0].type == "function"
    assert json.loads(only.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
