"""LangChain: ChatOpenAI over both of OpenAI's APIs, ChatAnthropic, and agents over each."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

FAIR = "Alice and Bob are going to a science fair on Friday."
WEATHER = HumanMessage("What is the weather in Oslo?")

type Chat = Callable[..., Any]


class Event(BaseModel):
    """An event."""

    name: str
    date: str
    participants: list[str]


EVENT = Event(name="science fair", date="Friday", participants=["Alice", "Bob"])


def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"-3 C in {city}"


def openai_chat(url: str, key: str, **fields: Any) -> Any:
    return ChatOpenAI(**{"base_url": f"{url}/v1", "api_key": key, "model": "mlx-demo", **fields})


def anthropic_chat(url: str, key: str, **fields: Any) -> Any:
    common = {"base_url": url, "api_key": key, "model": "mlx-demo", "max_tokens": 1000}
    return ChatAnthropic(**{**common, **fields})


WIRES: dict[str, tuple[Chat, dict[str, Any]]] = {
    "chat completions": (openai_chat, {"reasoning_effort": "high"}),
    "responses": (openai_chat, {"use_responses_api": True}),
    "responses with reasoning=": (openai_chat, {"reasoning": {"effort": "high", "summary": "auto"}}),
    "responses that are stored": (openai_chat, {"use_responses_api": True, "use_previous_response_id": True}),
    "responses with encrypted reasoning": (
        openai_chat,
        {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high"}},
    ),
    "messages": (anthropic_chat, {}),
    "messages with thinking": (anthropic_chat, {"thinking": {"type": "adaptive"}}),
}


@pytest.fixture(params=WIRES.values(), ids=WIRES)
def chat(request: pytest.FixtureRequest, url: str, key: str) -> Chat:
    """Makes a chat model of one kind."""
    make, fields = request.param
    return lambda **more: make(url, key, **fields, **more)


def test_an_answer_whole_and_streamed(chat: Chat) -> None:
    whole = chat().invoke("What is the capital of France?")
    assert whole.text == "The capital of France is Paris."
    assert whole.usage_metadata["output_token_details"]["reasoning"] > 0
    assert "".join(piece.text for piece in chat().stream("What is the capital of France?")) == whole.text


def test_reasoning_is_shown_where_langchain_shows_it(chat: Chat, request: pytest.FixtureRequest) -> None:
    kinds = {block["type"] for block in chat().invoke("What is the capital of France?").content_blocks}
    # ChatOpenAI does not read the reasoning of chat completions.
    assert ("reasoning" in kinds) == ("chat completions" not in request.node.name)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_and_its_result_are_read_from_the_cache(chat: Chat, streamed: bool) -> None:
    with_tool = chat().bind_tools([tool(get_weather)])
    if streamed:
        first, *rest = with_tool.stream([WEATHER])
        for piece in rest:
            first += piece
    else:
        first = with_tool.invoke([WEATHER])
    result = tool(get_weather).invoke(first.tool_calls[0])
    second = with_tool.invoke([WEATHER, first, result])
    assert "-3 C in Oslo" in second.text
    assert second.usage_metadata["input_token_details"]["cache_read"] > 80


def test_a_call_can_be_required(chat: Chat, request: pytest.FixtureRequest) -> None:
    if "messages with thinking" in request.node.name:
        pytest.skip("LangChain itself leaves tool_choice out where Anthropic's thinking is on")
    for choice in ("any", "get_weather"):
        assert chat().bind_tools([tool(get_weather)], tool_choice=choice).invoke("Hello!").tool_calls


def test_answers_are_parsed_into_the_programs_own_type(chat: Chat) -> None:
    assert chat().with_structured_output(Event, method="json_schema").invoke(FAIR) == EVENT


def test_images_are_seen(chat: Chat, red_square: str) -> None:
    image = {"type": "image", "base64": red_square, "mime_type": "image/png"}
    message = HumanMessage([{"type": "text", "text": "What colour is the shape?"}, image])
    assert "red" in chat(model="mlx-demo-vision").invoke([message]).text


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers(chat: Chat, streamed: bool) -> None:
    agent = create_agent(chat(), [get_weather], system_prompt="Be kind.")
    asked: Any = {"messages": [WEATHER]}
    if streamed:
        texts = [piece.text for piece, _ in agent.stream(asked, stream_mode="messages")]
        assert "-3 C in Oslo" in "".join(texts)
    else:
        assert "-3 C in Oslo" in agent.invoke(asked)["messages"][-1].text


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"model": "nope"}, "hello"), ({}, "word " * 20_000)],
    ids=["wrong model", "too long"],
)
def test_errors_say_what_is_wrong(chat: Chat, fields: dict[str, str], text: str) -> None:
    with pytest.raises(Exception, match=r"is not served here|20\d+ tokens"):
        chat(**fields).invoke(text)
