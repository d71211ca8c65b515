"""LiteLLM: completion() and responses() by each of its providers that speaks an API of this server."""

import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

FAIR = "Alice and Bob are going to a science fair on Friday."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PROVIDERS = {
    "openai/": "/v1",
    "openai/responses/": "/v1",
    "hosted_vllm/": "/v1",
    "litellm_proxy/": "/v1",
    "anthropic/": "",
}

type Complete = Callable[..., Any]


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def complete(provider: str, url: str, key: str) -> Complete:
    """litellm.completion() with this server's address and key."""

    def ask(content: Any, *more: Any, model: str = "mlx-demo", **fields: Any) -> Any:
        return litellm.completion(
            model=provider + model,
            messages=[user(content), *more],
            api_base=url + PROVIDERS[provider],
            api_key=key,
            max_retries=0,
            **fields,
        )

    return ask


def test_an_answer_with_its_reasoning(complete: Complete, provider: str) -> None:
    message = complete("What is the capital of France?").choices[0].message
    assert message.content == "The capital of France is Paris."
    # By openai/responses/ LiteLLM reads summaries only, and asks for none.
    shown = "" if provider == "openai/responses/" else "The capital of France."
    assert (message.get("reasoning_content") or "").startswith(shown)


def test_an_answer_that_is_streamed(complete: Complete) -> None:
    pieces = list(complete("What is the capital of France?", stream=True))
    assert (
        litellm.stream_chunk_builder(pieces).choices[0].message.content == "The capital of France is Paris."
    )


def test_effort_is_how_much_is_reasoned(complete: Complete, provider: str) -> None:
    if provider == "anthropic/":  # LiteLLM has reasoning_effort only for the names of Anthropic's own models
        fields = [{"output_config": {"effort": effort}} for effort in ("low", "high")]
    else:
        fields = [{"reasoning_effort": effort} for effort in ("low", "high")]
    low, high = (complete("What is the capital of France?", **field).usage for field in fields)
    assert low.completion_tokens < high.completion_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_and_its_result_are_read_from_the_cache(complete: Complete, streamed: bool) -> None:
    first = complete("What is the weather in Oslo?", tools=[TOOL], stream=streamed)
    if streamed:
        first = litellm.stream_chunk_builder(list(first))
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "-3 C"}
    second = complete("What is the weather in Oslo?", message, result, tools=[TOOL])
    assert "-3 C" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 80


def test_a_call_can_be_required(complete: Complete) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        assert complete("Hello!", tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls


def test_an_answer_is_held_to_a_schema(complete: Complete, provider: str) -> None:
    if provider == "anthropic/":
        pytest.skip("LiteLLM makes a tool of the schema, whose call the demonstration model fills badly")
    answer = complete(FAIR, response_format=Event).choices[0].message.content
    assert Event.model_validate_json(answer).participants == ["Alice", "Bob"]


def test_images_are_seen(complete: Complete, red_square: str) -> None:
    parts = [
        {"type": "text", "text": "What colour is the shape?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{red_square}"}},
    ]
    assert "red" in complete(parts, model="mlx-demo-vision").choices[0].message.content


@pytest.mark.parametrize(
    ("content", "fields", "error"),
    [
        ("hello", {"model": "nope"}, litellm.NotFoundError),
        ("word " * 20_000, {}, litellm.ContextWindowExceededError),
    ],
    ids=["wrong model", "too long"],
)
def test_errors_are_litellms_own(
    complete: Complete, content: str, fields: dict[str, str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        complete(content, **fields)


def test_responses_go_on_by_the_last_ones_id(provider: str, url: str, key: str) -> None:
    common: Any = {"model": f"{provider}mlx-demo", "api_base": url + PROVIDERS[provider], "api_key": key}
    tools = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    first = litellm.responses(input="What is the weather in Oslo?", tools=tools, **common)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "-3 C"}
    second = litellm.responses(input=[result], previous_response_id=first.id, tools=tools, **common)
    assert "-3 C" in second.output[-1].content[0].text
