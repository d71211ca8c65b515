"""Anthropic's own SDK."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

FAIR = "Alice and Bob are going to a science fair on Friday."


class Event(BaseModel):
    name: str
    date: str
    participants: list[str]


EVENT = Event(name="science fair", date="Friday", participants=["Alice", "Bob"])


@pytest.fixture
def client(url: str, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
def scripted(scripted_url: str, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted_url, api_key=key, max_retries=1) as client:
        yield client


def asked(content: Any, model: str = "mlx-demo", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "max_tokens": 1000, "messages": messages, **fields}


def test_effort_is_how_much_is_thought(client: anthropic.Anthropic) -> None:
    tokens = []
    for effort in ("low", "high"):
        message = client.messages.create(
            **asked("What is the capital of France?", output_config={"effort": effort})
        )
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[-1].text == "The capital of France is Paris."
        tokens.append(message.usage.output_tokens_details.thinking_tokens)
    assert tokens[0] < tokens[1]


def test_without_thinking_the_first_block_is_the_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**asked("What is the capital of France?", thinking={"type": "disabled"}))
    assert message.content[0].text == "The capital of France is Paris."


def test_the_helper_for_streams_has_every_kind_of_event(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked("What is the capital of France?")) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "content_block_stop", "message_stop"} <= kinds
    assert final.stop_reason == "end_turn"


def test_answers_are_parsed_into_the_programs_own_type(client: anthropic.Anthropic) -> None:
    assert client.messages.parse(**asked(FAIR, output_format=Event)).parsed_output == EVENT
    with client.messages.stream(**asked(FAIR, output_format=Event)) as stream:
        assert stream.get_final_message().parsed_output == EVENT


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner_runs_a_function_until_there_is_an_answer(
    client: anthropic.Anthropic, streamed: bool
) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"-3 C in {city}"

    tool = anthropic.beta_tool(get_weather)
    runner: Any = client.beta.messages.tool_runner(
        **asked("What is the weather in Oslo?", tools=[tool], stream=streamed)
    )
    messages = [each.get_final_message() if streamed else each for each in runner]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[-1].text.startswith("The weather in Oslo: -3 C")  # knows the question


def test_images_and_documents(client: anthropic.Anthropic, red_square: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": red_square}
    image = [{"type": "image", "source": source}, {"type": "text", "text": "What colour is the shape?"}]
    assert "red" in client.messages.create(**asked(image, "mlx-demo-vision")).content[-1].text
    text = {"type": "text", "media_type": "text/plain", "data": "The code of Bridgeton is 4821."}
    question = {"type": "text", "text": "What is the code of Bridgeton?"}
    document = [{"type": "document", "source": text}, question]
    assert "4821" in client.messages.create(**asked(document)).content[-1].text


def test_a_key_may_be_sent_as_a_token(url: str, key: str) -> None:
    with anthropic.Anthropic(base_url=url, auth_token=key, api_key=None) as client:
        assert client.messages.count_tokens(
            model="mlx-demo", messages=[{"role": "user", "content": "hello"}]
        ).input_tokens


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "nope"}, anthropic.NotFoundError),
        ({"content": "word " * 20_000}, anthropic.BadRequestError),
    ],
)
def test_errors_are_the_sdks_own(
    client: anthropic.Anthropic, fields: Any, error: type[anthropic.APIStatusError]
) -> None:
    with pytest.raises(error):
        client.messages.create(**asked(**{"content": "hello", **fields}))


def test_a_wrong_key_is_an_authentication_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**asked("hello"))


def test_a_server_that_is_busy_is_asked_again(scripted: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.OverloadedError, match="All are busy"):
        scripted.with_options(max_retries=0).messages.create(**asked("Be busy with one.", "scripted"))
    assert scripted.messages.create(**asked("Be busy with two.", "scripted")).content[-1].text == "Done."


def test_an_error_in_mid_stream_is_raised(scripted: anthropic.Anthropic) -> None:
    with (
        pytest.raises(anthropic.APIError, match="The device is gone"),
        scripted.messages.stream(**asked("Break off.", "scripted")) as stream,
    ):
        stream.get_final_message()


def test_a_stream_that_is_closed_early_ends_the_reply(scripted: anthropic.Anthropic) -> None:
    with scripted.messages.stream(**asked("Go on.", "scripted", max_tokens=8000)) as stream:
        assert next(stream.text_stream)
    assert scripted.messages.create(**asked("hello", "scripted")).content[-1].text == "Done."
