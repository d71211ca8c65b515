"""OpenAI's Agents SDK: its default, which speaks responses, and its model for chat completions."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    WebSearchTool,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

WEATHER = "What is the weather in Oslo?"

type Make = Callable[..., Agent[Any]]


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


EVENT = Event(name="science fair", date="Friday", participants=["Alice", "Bob"])


def weather(city: str) -> str:
    """The weather in a city"""
    return f"-3 C in {city}"


TOOL = function_tool(weather, name_override="get_weather")


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def agent(request: pytest.FixtureRequest, url: str, key: str) -> Make:
    """Makes an agent with a model of one kind."""

    def make(*, model: str = "mlx-demo", name: str = "Assistant", **fields: Any) -> Agent[Any]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        return Agent(name=name, model=request.param(model, openai_client=client), **fields)

    return make


def run(asked: Agent[Any], text: Any, **fields: Any) -> Any:
    return asyncio.run(Runner.run(asked, text, **fields))


def test_an_answer_with_its_reasoning(agent: Make) -> None:
    result = run(agent(instructions="Be kind."), "What is the capital of France?")
    assert result.final_output == "The capital of France is Paris."
    assert [type(item).__name__ for item in result.new_items] == ["ReasoningItem", "MessageOutputItem"]


def test_a_tool_in_two_turns_of_one_conversation(agent: Make) -> None:
    first = run(agent(tools=[TOOL]), WEATHER)
    assert "-3 C in Oslo" in first.final_output
    again: Any = [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}]
    assert "-3 C in Rome" in run(agent(tools=[TOOL]), again).final_output


def test_a_run_that_is_streamed(agent: Make) -> None:
    async def names() -> list[str]:
        result = Runner.run_streamed(agent(tools=[TOOL]), WEATHER)
        return [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]

    assert asyncio.run(names()) == [
        *("reasoning_item_created", "tool_called", "tool_output"),
        *("reasoning_item_created", "message_output_created"),
    ]


def test_outputs_are_of_the_programs_own_type(agent: Make) -> None:
    text = "Alice and Bob are going to a science fair on Friday."
    assert run(agent(output_type=Event), text).final_output == EVENT


def test_an_agent_hands_over_to_another(agent: Make) -> None:
    other = agent(name="weather", handoff_description="Knows the weather")
    result = run(agent(handoffs=[other]), "Use transfer_to_weather.")
    assert result.last_agent.name == "weather"


def test_an_agent_is_anothers_tool(agent: Make) -> None:
    other = agent(name="inner").as_tool(tool_name="ask_inner", tool_description="Ask another")
    result = run(agent(tools=[other]), "Use ask_inner for Mount Fuji.")
    assert "ToolCallOutputItem" in [type(item).__name__ for item in result.new_items]


def test_a_guardrail_asks_a_model_first(agent: Make) -> None:
    checks = []

    async def check(_context: Any, _agent: Any, text: Any) -> GuardrailFunctionOutput:
        checks.append((await Runner.run(agent(), text)).final_output)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    result = run(agent(input_guardrails=[InputGuardrail(check)]), "What is the capital of France?")
    assert [result.final_output] == checks


def test_a_session_keeps_the_conversation(agent: Make) -> None:
    async def twice() -> str:
        session = SQLiteSession("test")
        await Runner.run(agent(), "What is the capital of France?", session=session)
        return str((await Runner.run(agent(), "And of Italy?", session=session)).final_output)

    assert asyncio.run(twice()) == "The capital of Italy is Rome."


def test_the_settings_that_programs_send(agent: Make) -> None:
    settings = ModelSettings(
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "high"},
        verbosity="low",
        store=False,
        truncation="auto",
        response_include=["reasoning.encrypted_content"],
    )
    assert "-3 C in Oslo" in run(agent(tools=[TOOL], model_settings=settings), WEATHER).final_output


def test_images_are_seen(agent: Make, red_square: str) -> None:
    image = f"data:image/png;base64,{red_square}"
    parts = [
        {"type": "input_text", "text": "What colour is the shape?"},
        {"type": "input_image", "image_url": image, "detail": "auto"},
    ]
    assert "red" in run(agent(model="mlx-demo-vision"), [{"role": "user", "content": parts}]).final_output


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"model": "nope"}, "hello"), ({}, "word " * 20_000)],
    ids=["wrong model", "too long"],
)
def test_errors_say_what_is_wrong(agent: Make, fields: dict[str, str], text: str) -> None:
    with pytest.raises(Exception, match=r"is not served here|20\d+ tokens"):
        run(agent(**fields), text)


def test_tools_that_run_at_openai_are_left_out(url: str, key: str) -> None:
    model = OpenAIResponsesModel("mlx-demo", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
    result = run(Agent(name="Assistant", model=model, tools=[TOOL, WebSearchTool()]), WEATHER)
    assert "-3 C in Oslo" in result.final_output
