"""The Responses API of OpenAI's own Python client, against the real server with the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from running_server import running

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI
    from openai.types.responses import Response

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    engine = load_engine(MODEL_PATH, model_id=MODEL_NAME)
    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    engine.stop()


def created(client: OpenAI, **fields: Any) -> Response:
    response: Response = client.responses.create(**{"model": MODEL_NAME, **fields})
    assert response.status == "completed"
    return response


def test_a_conversation_goes_on_by_the_id_of_its_last_response(client: OpenAI) -> None:
    first = created(client, input="What is the capital of France?", reasoning={"effort": "high"})
    assert first.output_text == "The capital of France is Paris."
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    second = created(client, input="And of Japan?", previous_response_id=first.id)
    assert second.output_text == "The capital of Japan is Tokyo."


def test_a_call_goes_back_with_its_reasoning_and_is_a_prefix(client: OpenAI) -> None:
    question: Any = {"role": "user", "content": "What is the weather in Oslo?"}
    with client.responses.stream(model=MODEL_NAME, input=[question], tools=[WEATHER], store=False) as stream:
        events = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in events
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Oslo"}
    back: Any = [item.model_dump(exclude_none=True) for item in first.output]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "-3 C, snow"}
    second = created(client, input=[question, *back, result], tools=[WEATHER])
    assert "-3 C" in second.output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ({"syntax": "regex", "definition": r'[ab]{3}\n"x'}, ('aaa\n"x', 'bbb\n"x')),
        (
            {"syntax": "lark", "definition": 'start: "*" W LF W "!"\nW: "yes" | "no"\n%import common.LF'},
            ("*yes\nyes!", "*yes\nno!", "*no\nyes!", "*no\nno!"),
        ),
    ],
    ids=["regex", "lark"],
)
def test_the_input_of_a_custom_tool_is_held_to_its_grammar(
    client: OpenAI, grammar: dict[str, str], expected: tuple[str, ...]
) -> None:
    tool: Any = {"type": "custom", "name": "write", "format": {"type": "grammar", **grammar}}
    choice: Any = {"type": "custom", "name": "write"}
    response = created(client, input="Write it.", tools=[tool], tool_choice=choice)
    call = response.output[-1]
    assert call.type == "custom_tool_call"
    if grammar["syntax"] == "regex":
        assert len(call.input) == len(expected[0])
        assert set(call.input[:3]) <= {"a", "b"}
        assert call.input[3:] == expected[0][3:]
    else:
        assert call.input in expected


def test_only_the_tools_that_are_allowed_are_called(client: OpenAI) -> None:
    other: Any = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    response = created(
        client, input="What is the weather in Oslo?", tools=[WEATHER, other], tool_choice=choice
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert {call.name for call in calls} == {"get_time"}


def test_an_answer_is_held_to_its_schema(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    person = json.loads(created(client, input="Give me a person.", text=text).output_text)
    assert person.keys() == {"name", "age"}


def test_log_probabilities_come_with_the_text(client: OpenAI) -> None:
    response = created(
        client,
        input="What is the capital of France?",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    message = response.output[-1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert "".join(each.token for each in part.logprobs or ()) == response.output_text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs or ())
