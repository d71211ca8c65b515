"""Ollama's own Python client, unchanged, against the real server with the demo model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from pydantic import BaseModel
from running_server import RunningServer, running

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ollama import Client

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH, model_id=MODEL_NAME) as engine, running(engine) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_a_listed_model_answers_under_its_name(client: Client) -> None:
    [listed] = client.list().models
    assert listed.model == f"{MODEL_NAME}:latest"
    assert client.show(listed.model).capabilities == ["completion", "tools", "thinking"]
    [running_model] = client.ps().models
    assert running_model.context_length == 16_384
    reply = client.chat(listed.model, FRANCE, think="high")
    assert reply.message.content == ANSWER
    assert reply.message.thinking
    assert reply.model == listed.model
    assert reply.done_reason == "stop"


def test_a_reply_is_streamed_also_without_waiting(server: RunningServer) -> None:
    async def said() -> str:
        async with ollama.AsyncClient(host=server.url) as client:
            parts = await client.chat(MODEL_NAME, FRANCE, think=False, stream=True)
            return "".join([part.message.content or "" async for part in parts])

    assert asyncio.run(said()) == ANSWER


def get_weather(city: str) -> str:
    """The weather in a city

    Args:
      city: where
    """
    return f"-3 C in {city}, snow"


def test_a_function_is_called_and_its_result_goes_back(client: Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat(MODEL_NAME, messages, tools=[get_weather]).message
    messages.append(first)
    for call in first.tool_calls or ():
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    assert "-3 C in Oslo" in (client.chat(MODEL_NAME, messages, tools=[get_weather]).message.content or "")


def test_a_pydantic_model_is_filled_in(client: Client) -> None:
    class Country(BaseModel):
        name: str
        capital: str

    reply = client.chat(MODEL_NAME, FRANCE, format=Country.model_json_schema())
    assert Country.model_validate_json(reply.message.content or "").capital == "Paris"


def test_log_probabilities_are_those_of_the_answer_streamed_and_whole(client: Client) -> None:
    whole = client.generate(MODEL_NAME, FRANCE[0]["content"], logprobs=True, top_logprobs=2)
    parts = client.generate(MODEL_NAME, FRANCE[0]["content"], logprobs=True, top_logprobs=2, stream=True)
    streamed = [each for part in parts for each in part.logprobs or ()]
    assert "".join(each.token for each in whole.logprobs or ()) == whole.response == ANSWER
    assert [each.token for each in streamed] == [each.token for each in whole.logprobs or ()]
    assert all(len(each.top_logprobs or ()) == 2 for each in streamed)


def test_options_hold_and_a_limit_is_the_reason_for_the_end(client: Client) -> None:
    reply = client.generate(MODEL_NAME, "1, 2, 3", raw=True, options={"num_predict": 3, "num_ctx": 512})
    assert (reply.done_reason, reply.eval_count, reply.thinking) == ("length", 3, None)


def test_an_error_is_a_sentence_with_its_status(client: Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'nobody' is not served here") as raised:
        client.chat("nobody", FRANCE)
    assert raised.value.status_code == 404
    assert client.pull(MODEL_NAME).status == "success"
