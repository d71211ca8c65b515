"""OpenAI's own Python client, unchanged, against the real server: on transcripts, and on the demo model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from running_server import running
from scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI, Stream
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

ANSWER = (
    "<|channel|>analysis<|message|>Capital of France.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The capital is Paris.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
RESULT = (
    "<|channel|>analysis<|message|>It is cold.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>-3 degrees.<|return|>"
)
USER: Any = {"role": "user", "content": "hello"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def scripts(prompt: str) -> str:
    if "-3 C" in prompt:
        return RESULT
    return CALL if "functions.get_weather" in prompt else ANSWER


def test_several_prompts_and_several_choices_arrive_as_the_clients_own_objects(client: OpenAI) -> None:
    completions = client.completions.create(model="scripted", prompt=["a", "b"], n=2, echo=True)
    assert [choice.index for choice in completions.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in completions.choices] == ["a<", "a<", "b<", "b<"]
    chats = client.chat.completions.create(model="scripted", messages=[USER], n=2)
    assert [choice.message.content for choice in chats.choices] == ["The capital is Paris."] * 2
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="scripted", messages=[USER], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["The capital is Paris."] * 2


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(scripts, context_length=4096) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[OpenAI]:
    with (
        running(engine, api_key="sesame") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0) as client,
    ):
        yield client


def complete(client: OpenAI, **fields: Any) -> ChatCompletion:
    completion: ChatCompletion = client.chat.completions.create(
        **{"model": "default", "messages": [USER], **fields}
    )
    return completion


def stream(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    chunks: Stream[ChatCompletionChunk] = client.chat.completions.create(
        **{"model": "default", "messages": [USER], "stream": True, **fields}
    )
    return list(chunks)


def extra(model: Any, name: str) -> Any:
    return (model.model_extra or {}).get(name)


def test_a_completion(client: OpenAI) -> None:
    completion = complete(client, reasoning_effort="high")
    (choice,) = completion.choices
    assert choice.message.content == "The capital is Paris."
    assert extra(choice.message, "reasoning_content") == "Capital of France."
    assert choice.finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens
    assert completion.usage.prompt_tokens_details is not None


def test_a_stream_gives_the_same_message(client: OpenAI) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "The capital is Paris."
    assert "".join(extra(delta, "reasoning_content") or "" for delta in deltas) == "Capital of France."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0


def test_the_clients_own_accumulator_accepts_the_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model="default", messages=[USER], tools=[WEATHER]) as events:
        completion = events.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_over_two_rounds_keeps_the_reasoning_that_the_client_loses(
    engine: ScriptedEngine, client: OpenAI, streaming: bool
) -> None:
    call: dict[str, Any]
    if streaming:
        deltas = [chunk.choices[0].delta for chunk in stream(client, tools=[WEATHER]) if chunk.choices]
        named, *more = [call for delta in deltas for call in delta.tool_calls or ()]
        assert {named.index, *(piece.index for piece in more)} == {0}
        call = named.model_dump(exclude={"index"})
        call["function"]["arguments"] += "".join(
            piece.function.arguments or "" for piece in more if piece.function
        )
    else:
        first = complete(client, tools=[WEATHER])
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.choices[0].message.content is None
        (only,) = first.choices[0].message.tool_calls or []
        call = only.model_dump()
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}

    # What a plain client sends back: the call and the result, nothing of the reasoning.
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "-3 C"},
    ]
    second = complete(client, messages=history, tools=[WEATHER])
    assert second.choices[0].message.content == "-3 degrees."
    assert "<|channel|>analysis<|message|>Look it up.<|end|>" in engine.requests[-1].prompt


def test_completions(client: OpenAI) -> None:
    completion = client.completions.create(model="default", prompt="<|start|>assistant", max_tokens=8)
    assert completion.choices[0].text.startswith("<|channel|>analysis")
    assert completion.choices[0].finish_reason == "length"
    chunks = client.completions.create(model="default", prompt="<|start|>assistant", stream=True)
    assert "Paris" in "".join(chunk.choices[0].text for chunk in chunks)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


@pytest.mark.parametrize(
    ("fields", "kind", "mention"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"reasoning_effort": "banana"}, openai.BadRequestError, "medium"),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"messages": []}, openai.BadRequestError, ""),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError, "4096"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "scripted"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_errors_arrive_as_the_clients_own_exceptions(
    client: OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], mention: str, streaming: bool
) -> None:
    with pytest.raises(kind) as raised:
        complete(client, stream=streaming, **fields)
    assert mention in raised.value.message
    assert isinstance(raised.value.body, dict)
    more = {"prompt_tokens", "max_model_len"} if "messages" in fields and mention else set()
    assert raised.value.body.keys() == {"message", "type", "param", "code"} | more


def test_a_wrong_key_is_an_authentication_error(client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_an_error_in_mid_stream_is_raised_by_the_client() -> None:
    with (
        ScriptedEngine([]) as engine,
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="no transcript left"),
    ):
        stream(client)
