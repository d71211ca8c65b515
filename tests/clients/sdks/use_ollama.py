"""Ollama's own SDK; and LangChain's ChatOllama and LiteLLM's ollama_chat/, which speak the same API."""

from typing import Any

import litellm
import ollama
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from pydantic import BaseModel

MODEL = "mlx-demo"
FAIR = "Alice and Bob are going to a science fair on Friday."
WEATHER: dict[str, Any] = {"role": "user", "content": "What is the weather in Oslo?"}


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


def get_weather(city: str) -> str:
    """The weather in a city

    Args:
        city: The city
    """
    return f"-3 C in {city}"


@pytest.fixture
def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def client(url: str, headers: dict[str, str]) -> ollama.Client:
    return ollama.Client(host=url, headers=headers)


def test_think_is_the_effort_and_the_thinking_is_shown(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    thoughts = []
    for think in (False, "low", "high"):
        reply = client.chat(MODEL, messages, think=think)
        assert reply.message.content == "The capital of France is Paris."
        thoughts.append(reply.message.thinking or "")
    assert thoughts[0] == ""
    assert len(thoughts[1]) < len(thoughts[2])


def test_a_reply_that_is_streamed(client: ollama.Client) -> None:
    pieces = list(client.chat(MODEL, [{"role": "user", "content": "Count to 10."}], stream=True))
    assert "".join(piece.message.content or "" for piece in pieces).endswith("8, 9, 10")
    assert [piece.done for piece in pieces[-2:]] == [False, True]


def test_a_function_is_a_tool(client: ollama.Client) -> None:
    first = client.chat(MODEL, [WEATHER], tools=[get_weather])
    assert first.message.tool_calls is not None
    [call] = first.message.tool_calls
    result = get_weather(**call.function.arguments)
    back = {"role": "tool", "tool_name": call.function.name, "content": result}
    second = client.chat(MODEL, [WEATHER, first.message, back], tools=[get_weather])
    assert "-3 C in Oslo" in (second.message.content or "")


def test_an_answer_is_held_to_a_schema(client: ollama.Client) -> None:
    reply = client.chat(MODEL, [{"role": "user", "content": FAIR}], format=Event.model_json_schema())
    assert Event.model_validate_json(reply.message.content or "").participants == ["Alice", "Bob"]


def test_images_are_seen(client: ollama.Client, red_square: str) -> None:
    message = {"role": "user", "content": "What colour is the shape?", "images": [red_square]}
    assert "red" in (client.chat("mlx-demo-vision", [message]).message.content or "")


def test_the_models_are_listed_and_described(client: ollama.Client) -> None:
    assert f"{MODEL}:latest" in [model.model for model in client.list().models]
    assert {"thinking", "tools"} <= set(client.show(MODEL).capabilities or ())


def test_a_wrong_model_is_an_error_of_the_sdk(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="is not served here") as raised:
        client.chat("nope", [WEATHER])
    assert raised.value.status_code == 404


def test_an_error_in_mid_stream_is_raised(scripted_url: str, headers: dict[str, str]) -> None:
    scripted = ollama.Client(host=scripted_url, headers=headers)
    with pytest.raises(ollama.ResponseError, match="The device is gone"):
        list(scripted.chat("scripted", [{"role": "user", "content": "Break off."}], stream=True))


@pytest.mark.parametrize("reasoning", [None, True, "high", False])
def test_langchain_calls_a_tool_and_shows_reasoning(
    url: str, headers: dict[str, str], reasoning: bool | str | None
) -> None:
    chat = ChatOllama(
        base_url=url, model=MODEL, reasoning=reasoning, client_kwargs={"headers": headers}
    ).bind_tools([tool(get_weather)])
    asked = HumanMessage(WEATHER["content"])
    first = chat.invoke([asked])
    result = tool(get_weather).invoke(first.tool_calls[0])
    second = chat.invoke([asked, first, result])
    assert "-3 C in Oslo" in second.text
    assert bool(second.additional_kwargs.get("reasoning_content")) == bool(reasoning)


def test_litellm_calls_a_tool(url: str, key: str) -> None:
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    common: Any = {
        "model": f"ollama_chat/{MODEL}",
        "api_base": url,
        "api_key": key,
        "tools": [{"type": "function", "function": function}],
    }
    message = litellm.completion(messages=[WEATHER], **common).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "-3 C"}
    second = litellm.completion(messages=[WEATHER, message, result], **common)
    assert "-3 C" in second.choices[0].message.content
