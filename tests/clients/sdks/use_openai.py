"""OpenAI's own SDK: chat completions and responses."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

MODEL = "mlx-demo"
FAIR = "Alice and Bob are going to a science fair on Friday."
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOL: Any = {"type": "function", **FUNCTION}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
WEATHER: Any = {"role": "user", "content": "What is the weather in Oslo?"}


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


EVENT = Event(name="science fair", date="Friday", participants=["Alice", "Bob"])


@pytest.fixture
def client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(scripted_url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_url}/v1", api_key=key, max_retries=1) as client:
        yield client


def test_effort_is_how_much_is_reasoned_and_the_summary_shows_it(client: openai.OpenAI) -> None:
    tokens = []
    for effort in ("low", "high"):
        response = client.responses.create(
            model=MODEL,
            input="What is the capital of France?",
            reasoning={"effort": effort, "summary": "auto"},  # type: ignore[typeddict-item]
        )
        assert response.output_text == "The capital of France is Paris."
        assert response.output[0].type == "reasoning"
        assert response.output[0].summary[0].text.startswith("The capital of France.")
        assert response.usage is not None
        tokens.append(response.usage.output_tokens_details.reasoning_tokens)
    assert tokens[0] < tokens[1]


def test_every_event_of_a_stream_is_typed_and_numbered(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=[WEATHER], tools=[TOOL]) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert all(event.type.startswith("response.") for event in events)
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert "ResponseFunctionCallArgumentsDeltaEvent" in {type(event).__name__ for event in events}
    assert response.output[-1].type == "function_call"
    assert response.output[-1].parsed_arguments == {"city": "Oslo"}


def test_answers_are_parsed_into_the_programs_own_type(client: openai.OpenAI) -> None:
    assert client.responses.parse(model=MODEL, input=FAIR, text_format=Event).output_parsed == EVENT
    with client.responses.stream(model=MODEL, input=FAIR, text_format=Event) as stream:
        assert stream.get_final_response().output_parsed == EVENT
    messages: Any = [{"role": "user", "content": FAIR}]
    completion = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Event)
    assert completion.choices[0].message.parsed == EVENT


@pytest.mark.parametrize(
    "back",
    [
        lambda item: item.model_dump(),
        lambda item: item.model_dump(exclude_none=True),
        lambda item: item.model_dump(exclude={"content"} if item.type == "reasoning" else set()),
    ],
    ids=["with nulls", "without nulls", "reasoning encrypted only"],
)
def test_reasoning_that_comes_back_is_read_from_the_cache(
    client: openai.OpenAI, back: Callable[[Any], dict[str, Any]]
) -> None:
    common: Any = {
        "model": MODEL,
        "tools": [TOOL],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high"},
    }
    first = client.responses.create(input=[WEATHER], **common)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "-3 C"}
    history: Any = [WEATHER, *map(back, first.output), result]
    second = client.responses.create(input=history, **common)
    assert second.output_text == "The weather in Oslo: -3 C"
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_a_conversation_goes_on_by_its_last_id_until_that_is_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is the capital of France?")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(model=MODEL, input="And of Italy?", previous_response_id=first.id)
    assert second.output_text == "The capital of Italy is Rome."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_the_helper_for_streams_of_chat_ends_with_the_whole_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[WEATHER], tools=[CHAT_TOOL]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}


def test_images_are_seen_over_both_apis(client: openai.OpenAI, red_square: str) -> None:
    image = f"data:image/png;base64,{red_square}"
    parts: Any = [
        {"type": "input_text", "text": "What colour is the shape?"},
        {"type": "input_image", "image_url": image, "detail": "auto"},
    ]
    response = client.responses.create(model="mlx-demo-vision", input=[{"role": "user", "content": parts}])
    assert "red" in response.output_text
    chat_parts: Any = [
        {"type": "text", "text": "What colour is the shape?"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    completion = client.chat.completions.create(
        model="mlx-demo-vision", messages=[{"role": "user", "content": chat_parts}]
    )
    assert "red" in (completion.choices[0].message.content or "")


async def ask_in_parallel(url: str, key: str) -> list[str]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        questions = [f"What is {number} + 3?" for number in range(1, 5)]
        asked = [client.responses.create(model=MODEL, input=question) for question in questions]
        texts = [response.output_text for response in await asyncio.gather(*asked)]
        async with client.responses.stream(model=MODEL, input="And 5 + 3?") as stream:
            texts.append((await stream.get_final_response()).output_text)
    return texts


def test_the_asynchronous_client(url: str, key: str) -> None:
    import asyncio

    texts = asyncio.run(ask_in_parallel(url, key))
    assert texts == [f"{number} + 3 = {number + 3}" for number in range(1, 6)]


def test_raw_responses_have_the_requests_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=[WEATHER])
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    with client.responses.with_streaming_response.create(
        model=MODEL, input=[WEATHER], stream=True
    ) as response:
        assert "event: response.completed" in list(response.iter_lines())


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model_not_found"),
        ({"input": "word " * 20_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": 9}, openai.BadRequestError, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_sdks_own(
    client: openai.OpenAI, fields: Any, error: type[openai.APIStatusError], code: str | None, stream: bool
) -> None:
    with pytest.raises(error) as raised:
        client.responses.create(**{"model": MODEL, "input": "hello", "stream": stream, **fields})
    assert raised.value.code == code


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model=MODEL, input="hello")


def test_a_server_that_is_busy_is_asked_again(scripted: openai.OpenAI) -> None:
    message: Any = {"role": "user", "content": "Be busy with chat."}
    with pytest.raises(openai.InternalServerError, match="All are busy"):
        scripted.with_options(max_retries=0).chat.completions.create(model="scripted", messages=[message])
    response = scripted.responses.create(model="scripted", input="Be busy with responses.")
    assert response.output_text == "Done."


def test_an_error_in_mid_stream_is_raised_or_an_event(scripted: openai.OpenAI) -> None:
    message: Any = {"role": "user", "content": "Break off."}
    with pytest.raises(openai.APIError, match="The device is gone"):
        list(scripted.chat.completions.create(model="scripted", messages=[message], stream=True))
    events = list(scripted.responses.create(model="scripted", input="Break off.", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "The device is gone."


def test_a_websocket_answers_in_turn_and_goes_on_from_what_is_not_stored(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:

        def answered(text: str, **fields: Any) -> Any:
            connection.send(
                {"type": "response.create", "model": MODEL, "input": text, "store": False, **fields}
            )
            return next(event for event in connection if event.type in ("response.completed", "error"))

        first = answered("What is the capital of France?").response
        second = answered("What is the capital of Italy?", previous_response_id=first.id).response
        assert second.output[-1].content[0].text == "The capital of Italy is Rome."
        assert second.usage.input_tokens > first.usage.input_tokens
        assert answered("And?", previous_response_id=first.id).error.code == "previous_response_not_found"


def test_a_stream_that_is_closed_early_ends_the_reply(scripted: openai.OpenAI) -> None:
    with scripted.responses.create(model="scripted", input="Go on.", stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
    assert scripted.responses.create(model="scripted", input="hello").output_text == "Done."
