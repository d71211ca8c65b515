"""Instructor: each of its modes for OpenAI's and Anthropic's APIs."""

from collections.abc import Callable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel

FAIR = "Alice and Bob are going to a science fair on Friday."
OPENAI = (Mode.TOOLS, Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
ANTHROPIC = (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON)


class Event(BaseModel):
    """An event"""

    name: str
    date: str
    participants: list[str]


class Search(BaseModel):
    """Search an encyclopedia"""

    query: str


@pytest.fixture(params=[*OPENAI, *ANTHROPIC], ids=lambda mode: mode.name)
def create(request: pytest.FixtureRequest, url: str, key: str) -> Callable[..., Any]:
    """Returns what is found in a text, by a mode."""
    mode = request.param
    client: Any
    fields: dict[str, Any] = {"model": "mlx-demo", "max_retries": 0}
    if mode in ANTHROPIC:
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key=key), mode=mode)
        fields["max_tokens"] = 2000
    else:
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key), mode=mode)

    def ask(text: str, kind: type[BaseModel], *, partial: bool = False) -> Any:
        messages = [{"role": "user", "content": text}]
        if partial:
            *_, last = client.chat.completions.create_partial(
                messages=messages, response_model=kind, **fields
            )
            return last
        return client.chat.completions.create(messages=messages, response_model=kind, **fields)

    return ask


def test_what_is_asked_for_is_of_the_programs_own_type(
    create: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    if "TOOLS" in request.node.name:  # the demonstration model fills a call's first parameter only
        assert create("Use Search for Mount Fuji.", Search).query == "Mount Fuji"
    else:
        event = create(f"Extract the event information: {FAIR}", Event)
        assert (event.name, event.participants) == ("science fair", ["Alice", "Bob"])


def test_parts_of_it_arrive_while_it_is_written(create: Callable[..., Any]) -> None:
    assert create("Use Search for Mount Fuji.", Search, partial=True).query
