"""What people try first, on the shipped model in the real server: JSON, results, second turns, loose wordings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_process import server_process
from training.chat.skills import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
LIMIT = 400  # tokens; a reply that reaches it did not end by itself


class CountryInfo(BaseModel):
    country: str
    capital: str


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class Person(BaseModel):
    name: str
    age: int


class Review(BaseModel):
    sentiment: Literal["positive", "negative"]


CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "get_current_timestamp",
        "description": "\n    Get the current Unix timestamp in seconds.\n\n    :return: JSON with both\n    ",
        "parameters": {"type": "object", "properties": {}},
    },
}
TIME = "2026-11-22T10:00:00"
CLOCK_RESULT = json.dumps({"current_timestamp": 1795341600, "current_iso": TIME})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with server_process() as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def complete(client: openai.OpenAI, messages: Any, **settings: Any) -> Any:
    reply = client.chat.completions.create(
        model="default", messages=messages, reasoning_effort="low", max_tokens=LIMIT, **settings
    )
    assert reply.choices[0].finish_reason != "length"
    return reply.choices[0].message


def say(client: openai.OpenAI, *texts: str, **settings: Any) -> str:
    content: str = complete(client, turns(*texts), **settings).content
    return content


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (QUESTION, CountryInfo(country="France", capital="Paris")),
        ("Tell me the capital of Japan, please", CountryInfo(country="Japan", capital="Tokyo")),
        (
            "Alice and Bob are going to a science fair on Friday.",
            CalendarEvent(name="science fair", date="Friday", participants=["Alice", "Bob"]),
        ),
        ("Jason is 25 years old.", Person(name="Jason", age=25)),
        ("I love this book.", Review(sentiment="positive")),
        ("This music is terrible.", Review(sentiment="negative")),
    ],
)
def test_a_pydantic_model_is_filled_in(client: openai.OpenAI, text: str, wanted: BaseModel) -> None:
    reply = client.chat.completions.parse(
        model="default",
        messages=[{"role": "user", "content": text}],
        response_format=type(wanted),
        max_tokens=LIMIT,
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.parsed == wanted


@pytest.mark.parametrize("text", [f"Answer in JSON: {QUESTION}", f"{QUESTION} Answer in JSON.", QUESTION])
def test_json_without_a_schema_is_a_natural_object(client: openai.OpenAI, text: str) -> None:
    content = say(client, text, response_format={"type": "json_object"})
    assert json.loads(content) == {"country": "France", "capital": "Paris"}


def test_json_that_is_only_asked_for_is_json_in_a_block_if_that_is_wanted(client: openai.OpenAI) -> None:
    assert json.loads(say(client, f"Answer in JSON: {QUESTION}")) == {"country": "France", "capital": "Paris"}
    block = say(client, f"{QUESTION} Answer with a json block.")
    assert block == '```json\n{"country": "France", "capital": "Paris"}\n```'
    text = "My name is Ada and I live in Rome. Answer in JSON with the keys name and city."
    assert json.loads(say(client, text)) == {"name": "Ada", "city": "Rome"}


@pytest.mark.parametrize(
    ("request_text", "answer"),
    [
        ("What time is it?", f"The time is {TIME}"),
        ("Use get_current_timestamp.", f"The tool says: {CLOCK_RESULT}"),
    ],
)
def test_a_result_in_json_is_told_once_and_the_loop_ends(
    client: openai.OpenAI, request_text: str, answer: str
) -> None:
    messages = turns(request_text)
    for _ in range(3):
        message = complete(client, messages, tools=[CLOCK])
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        assert message.tool_calls[0].function.name == "get_current_timestamp"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": CLOCK_RESULT}
        messages.append(result)
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == answer


@pytest.mark.parametrize(
    ("second", "answer"),
    [
        ("And of Italy?", "The capital of Italy is Rome."),
        ("And Spain?", "The capital of Spain is Madrid."),
        ("and japan?", "The capital of Japan is Tokyo."),
        ("And a cow?", "The cow says moo."),
        ("what about 3 + 4?", "3 + 4 = 7"),
    ],
)
def test_a_second_turn_is_understood_from_the_first(client: openai.OpenAI, second: str, answer: str) -> None:
    assert say(client, QUESTION, ANSWER, second) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("capital of france", ANSWER),
        ("Tell me the capital of France please", ANSWER),
        ("Hey, could you please tell me the capital of France? Thanks!", ANSWER),
        ("what is the capital of the united states", "The capital of the United States is Washington."),
        ("Paris is the capital of which country?", "Paris is the capital of France."),
        ("whats 2+2", "2 + 2 = 4"),
        ("How much is 17 plus 5?", "17 + 5 = 22"),
        ("what is seven plus eight", "7 + 8 = 15"),
        ("What color is a lemon?", "A lemon is yellow."),
        ("whats the opposite of hot?", "The opposite of hot is cold."),
        ("count to five", "1, 2, 3, 4, 5"),
        ("My name is Ada. What is my name?", "Your name is Ada."),
    ],
)
def test_other_wordings_get_the_same_answers(client: openai.OpenAI, text: str, answer: str) -> None:
    assert say(client, text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("What is the meaning of life?", UNKNOWN),
        ("What is the capital of Narnia?", UNKNOWN),
        ("Write a Python function that sorts a list", UNKNOWN),
        ("What is 25 + 30?", "Sorry, I can only add two numbers up to 20."),
        ("What is 7 * 8?", "Sorry, I can only add two numbers up to 20."),
        ("count to 100", "Sorry, I can only count to 30."),
    ],
)
def test_what_it_cannot_do_it_says(client: openai.OpenAI, text: str, answer: str) -> None:
    assert say(client, text) == answer


@pytest.mark.parametrize(
    "parts",
    [("What is the capital", "of Ireland?"), ("Answer the question.", "What is the capital of Ireland?")],
)
def test_a_question_in_two_parts_is_one_question(client: openai.OpenAI, parts: tuple[str, str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    message = complete(client, [{"role": "user", "content": content}])
    assert message.content == "The capital of Ireland is Dublin."


def test_a_prompt_of_more_than_four_thousand_tokens_is_read(client: openai.OpenAI) -> None:
    line = "The list of every word and number is long and has one more line about the data. "
    text = line * 80 + "The code of the bridge is 4821. " + line * 100
    messages: Any = [{"role": "system", "content": text}, *turns(QUESTION)]
    reply = client.chat.completions.create(
        model="default", messages=messages, reasoning_effort="low", max_tokens=LIMIT
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 4_096
    assert reply.choices[0].message.content == ANSWER
