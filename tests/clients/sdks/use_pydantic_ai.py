"""Pydantic AI: its models of OpenAI's two APIs and of Anthropic's."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

FAIR = "Alice and Bob are going to a science fair on Friday."
WEATHER = "What is the weather in Oslo?"

type Make = Callable[..., Any]


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


EVENT = Event(name="science fair", date="Friday", participants=["Alice", "Bob"])


class Search(BaseModel):
    """Search an encyclopedia."""

    query: str


EFFORT = {"openai_reasoning_effort": "high", "openai_reasoning_summary": "detailed"}
WIRES: dict[str, tuple[Any, dict[str, Any]]] = {
    "responses": (OpenAIResponsesModel, {}),
    "responses with effort": (OpenAIResponsesModel, EFFORT),
    "chat completions": (OpenAIChatModel, {"openai_reasoning_effort": "high"}),
    "messages": (AnthropicModel, {}),
    "messages with thinking": (AnthropicModel, {"anthropic_thinking": {"type": "adaptive"}}),
}


@pytest.fixture(params=WIRES.values(), ids=WIRES)
def agent(request: pytest.FixtureRequest, url: str, key: str) -> Make:
    """Makes an agent with a model of one kind."""
    kind, settings = request.param
    is_anthropic = kind is AnthropicModel
    provider = AnthropicProvider if is_anthropic else OpenAIProvider

    def make(*, model: str = "mlx-demo", **fields: Any) -> Agent[None, Any]:
        # A provider for each: an agent that runs synchronously has an event loop of its own.
        served = provider(base_url=url if is_anthropic else f"{url}/v1", api_key=key)
        return Agent(kind(model, provider=served), model_settings=settings, **fields)

    return make


def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"-3 C in {city}"


def kinds(result: Any) -> list[str]:
    return [part.part_kind for message in result.all_messages() for part in message.parts]


def test_an_answer_with_its_reasoning(agent: Make) -> None:
    result = agent(instructions="Be kind.").run_sync("What is the capital of France?")
    assert result.output == "The capital of France is Paris."
    assert kinds(result) == ["user-prompt", "thinking", "text"]
    assert result.usage.output_reasoning_tokens > 0


def test_a_tool_in_two_turns_of_one_conversation(agent: Make) -> None:
    asked = agent(tools=[get_weather])
    first = asked.run_sync(WEATHER)
    second = asked.run_sync("And in Rome?", message_history=first.all_messages())
    assert "-3 C in Oslo" in first.output
    assert "-3 C in Rome" in second.output
    assert kinds(second)[-4:] == ["tool-call", "tool-return", "thinking", "text"]


def test_a_run_that_is_streamed(agent: Make) -> None:
    with agent(tools=[get_weather]).run_stream_sync(WEATHER) as result:
        assert "-3 C in Oslo" in "".join(result.stream_text(delta=True))


@pytest.mark.parametrize("output", [NativeOutput, PromptedOutput])
def test_outputs_are_of_the_programs_own_type(
    agent: Make, output: Any, request: pytest.FixtureRequest
) -> None:
    if output is NativeOutput and "messages" in request.node.name:
        pytest.skip("Pydantic AI has native output only for the names of Anthropic's own models")
    assert agent(output_type=output(Event)).run_sync(FAIR).output == EVENT


def test_an_output_that_is_a_tool_is_called(agent: Make, request: pytest.FixtureRequest) -> None:
    if "messages with thinking" in request.node.name:
        pytest.skip("Pydantic AI itself leaves tool_choice out where Anthropic's thinking is on")
    found = agent(output_type=Search).run_sync("Use final_result for Mount Fuji.").output
    assert found.query == "Mount Fuji"


def test_images_are_seen(agent: Make, red_square: str) -> None:
    picture = BinaryContent(base64.b64decode(red_square), media_type="image/png")
    result = agent(model="mlx-demo-vision").run_sync(["What colour is the shape?", picture])
    assert "red" in result.output


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"model": "nope"}, "hello"), ({}, "word " * 20_000)],
    ids=["wrong model", "too long"],
)
def test_errors_say_what_is_wrong(agent: Make, fields: dict[str, str], text: str) -> None:
    with pytest.raises(Exception, match=r"is not served here|20\d+ tokens"):
        agent(**fields).run_sync(text)
