"""Anthropic's own Python client, unchanged, against the real server with the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from running_server import running

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anthropic import Anthropic

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    engine = load_engine(MODEL_PATH, model_id=MODEL_NAME)
    with (
        running(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client
    engine.stop()


def test_thinking_and_an_answer(client: Anthropic) -> None:
    message = client.messages.create(
        model=MODEL_NAME,
        max_tokens=1000,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        output_config={"effort": "high"},
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[-1].type == "text"
    assert message.content[-1].text == "The capital of France is Paris."
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}])
def test_a_call_goes_back_with_its_thinking_and_is_a_prefix(client: Anthropic, thinking: Any) -> None:
    with client.messages.stream(
        model=MODEL_NAME, max_tokens=1000, messages=[QUESTION], tools=[WEATHER], thinking=thinking
    ) as stream:
        first = stream.get_final_message()
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    back: Any = {
        "role": "assistant",
        "content": [block.model_dump(exclude_none=True) for block in first.content],
    }
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "-3 C, snow"}
    second = client.messages.create(
        model=MODEL_NAME,
        max_tokens=1000,
        messages=[QUESTION, back, {"role": "user", "content": [result]}],
        tools=[WEATHER],
        thinking=thinking,
    )
    assert second.content[-1].type == "text"
    assert "-3 C" in second.content[-1].text
    total = (first.usage.cache_read_input_tokens or 0) + first.usage.input_tokens
    assert (second.usage.cache_read_input_tokens or 0) >= total


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_call_is_made_where_it_is_required(client: Anthropic, kind: str) -> None:
    named = {"name": "get_weather"} if kind == "tool" else {}
    choice: Any = {"type": kind, "disable_parallel_tool_use": True, **named}
    message = client.messages.create(
        model=MODEL_NAME,
        max_tokens=1000,
        messages=[{"role": "user", "content": "What is 2 plus 3?"}],
        tools=[WEATHER],
        tool_choice=choice,
    )
    assert [block.type for block in message.content if block.type != "thinking"] == ["tool_use"]


def test_an_answer_is_held_to_its_schema(client: Anthropic) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    message = client.messages.create(
        model=MODEL_NAME,
        max_tokens=1000,
        messages=[{"role": "user", "content": "Give me a person."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[-1].type == "text"
    assert json.loads(message.content[-1].text).keys() == {"name"}


def test_tokens_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL_NAME, messages=[QUESTION], tools=[WEATHER])
    usage = client.messages.create(model=MODEL_NAME, max_tokens=5, messages=[QUESTION], tools=[WEATHER]).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_the_clients_own(client: Anthropic) -> None:
    wrong: Any = [{"role": "user", "content": [7]}]
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="other", max_tokens=5, messages=[QUESTION])
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]"):
        client.messages.create(model=MODEL_NAME, max_tokens=5, messages=wrong)
    assert [model.id for model in client.models.list()] == [MODEL_NAME]


def test_a_model_says_which_efforts_and_formats_clients_may_offer(client: Anthropic) -> None:
    can = client.models.retrieve(MODEL_NAME).capabilities
    assert can is not None
    assert (can.effort.high.supported, can.effort.max.supported) == (True, False)
    assert can.thinking.types.adaptive.supported
    assert can.structured_outputs.supported
    assert not can.image_input.supported


def test_the_tool_runner_sends_all_of_the_conversation_where_none_is_stored(client: Anthropic) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"-3 C in {city}"

    runner: Any = client.beta.messages.tool_runner(
        model=MODEL_NAME, max_tokens=1000, messages=[QUESTION], tools=[anthropic.beta_tool(get_weather)]
    )
    messages = list(runner)
    assert messages[-1].content[-1].text.startswith("The weather in Oslo: -3 C")  # knows the question
