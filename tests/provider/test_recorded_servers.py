"""Answers of real servers, recorded (`recorded/` says of which version), and played back to the plugin's process.

The real `mlx_lm.server` is tested as it runs (`test_mlx_lm_server`); these two have environments of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError
from dify_view import calls_of, split_reasoning, text_of, user
from fake_servers import FakeServer

if TYPE_CHECKING:
    from daemon import PluginProcess

FOLDER = Path(__file__).parent / "recorded"
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {
    "name": "current_time",
    "description": "A tool for getting the current time.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
SERVERS = ("mlx_vlm", "rapid_mlx", "rapid_mlx_by_name")


def recorded(
    server: str, answer: str, *, until: int | None = None, changed: tuple[str, str] = ("", "")
) -> FakeServer:
    """A server that gives a recorded answer; `until` leaves out its last events, and `changed` replaces a pattern."""
    record: dict[str, Any] = json.loads((FOLDER / f"{server}.json").read_text(encoding="utf-8"))
    events = [re.sub(*changed, event) for event in record["answers"][answer][:until]]
    stream = "".join(f"{event}\n\n" for event in events).encode()
    return FakeServer({"/v1/models": record["models"]}, header=record["header"], chat=lambda _: (200, stream))


def ask(plugin: PluginProcess, server: FakeServer, *tools: dict[str, Any], **more: Any) -> list[Any]:
    form = {"endpoint_url": server.address}
    return list(plugin.invoke([user("hi")], credentials=form, tools=list(tools), **more))


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_tool_call_arrives_though_the_server_loses_it_or_leaves_it_in_the_text(
    plugin: PluginProcess, server: str, stream: bool
) -> None:
    with recorded(server, "a call") as running:
        chunks = ask(plugin, running, WEATHER, CLOCK, stream=stream)
    (call,) = calls_of(chunks)
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert split_reasoning(text_of(chunks)) == ("", "Use get_weather with city.")


def test_a_text_before_a_call_loses_the_words_of_its_header(plugin: PluginProcess) -> None:
    with recorded("rapid_mlx", "a call after a text") as running:
        chunks = ask(plugin, running, CLOCK)
    assert [call["function"]["name"] for call in calls_of(chunks)] == ["current_time"]
    assert split_reasoning(text_of(chunks))[0] == "I will use current_time now."


@pytest.mark.parametrize("server", ["rapid_mlx", "rapid_mlx_by_name"])
def test_reasoning_that_a_server_sends_as_the_answer_is_none(plugin: PluginProcess, server: str) -> None:
    with recorded(server, "cut in the reasoning") as running, pytest.raises(PluginError) as raised:
        ask(plugin, running, parameters={"max_tokens": 12})
    assert "there is no answer: the limit of Max tokens" in raised.value.message


def test_a_lost_call_that_was_cut_off_is_not_made(plugin: PluginProcess) -> None:
    with recorded("mlx_vlm", "a call", until=-6) as running, pytest.raises(PluginError) as raised:
        ask(plugin, running, WEATHER)
    assert "broke off" in raised.value.message


def test_usage_is_the_servers(plugin: PluginProcess) -> None:
    with recorded("mlx_vlm", "an answer") as running:
        chunks = ask(plugin, running)
    usage = chunks[-1]["delta"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (31, 34)
    assert split_reasoning(text_of(chunks)) == ("The capital of France is Paris.", "The capital of France.")


def test_an_answer_ends_at_a_stop_word_and_reasoning_does_not(plugin: PluginProcess) -> None:
    with recorded("mlx_vlm", "an answer") as running:
        chunks = ask(plugin, running, stop=["Paris", "France"])
    assert split_reasoning(text_of(chunks)) == ("The capital of", "The capital of France.")
    assert chunks[-1]["delta"]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("server", "fields"),
    [
        ("mlx_vlm", {"reasoning_effort": "high", "enable_thinking": True}),
        ("rapid_mlx", {"chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": True}}),
    ],
)
def test_effort_is_sent_in_the_servers_own_field(
    plugin: PluginProcess, server: str, fields: dict[str, Any]
) -> None:
    with recorded(server, "a call") as running:
        ask(plugin, running, parameters={"reasoning_effort": "high"})
    (body,) = running.bodies
    names = {"reasoning_effort", "enable_thinking", "chat_template_kwargs", "reasoning"}
    assert {name: body[name] for name in names & body.keys()} == fields


def test_what_a_server_says_of_its_model_reaches_dify(plugin: PluginProcess) -> None:
    with recorded("rapid_mlx", "a call") as running:
        (answer,) = plugin.request(
            "get_ai_model_schemas",
            provider="mlx",
            model_type="llm",
            model="default",
            credentials={"endpoint_url": running.address},
        )
    schema = answer["model_schema"]
    assert schema["model_properties"]["context_size"] == 16_384
    assert "vision" not in schema["features"]


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r'"bytes":\[108,111\]', '"bytes":[239,191,189]'),
        (r'\{"content":\[\{[^]]*"bytes":\[108,111\],"top_logprobs":\[\]\}\]\}', "null"),
    ],
    ids=["a part of a character", "a token that is not named"],
)
def test_a_lost_call_that_cannot_be_read_as_it_was_written_is_an_error(
    plugin: PluginProcess, pattern: str, instead: str
) -> None:
    with (
        recorded("mlx_vlm", "a call", changed=(pattern, instead)) as running,
        pytest.raises(PluginError) as raised,
    ):
        ask(plugin, running, WEATHER)
    assert "the server did not pass the call on" in raised.value.message
