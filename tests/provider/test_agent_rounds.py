"""An agent's rounds: shown one after the other, and understood when they come back.

Dify calls the plugin once for each round and shows the texts as one, with nothing between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user, web_page
from invocations import CALL, CLOCK, sent
from test_real_server import CURRENT_TIME

if TYPE_CHECKING:
    from conftest import Stub
    from daemon import PluginProcess

QUESTION = user("What time is it?")


def second_round(plugin: PluginProcess, stub: Stub, first: str, **more: Any) -> list[str]:
    """Return the pieces of the round after a first one that has shown this text."""
    messages = [QUESTION, assistant(first, [CALL]), result(CALL, "12:00")]
    chunks = plugin.invoke(messages, credentials=stub.credentials, tools=[CLOCK], **more)
    return [chunk["delta"]["message"]["content"] for chunk in chunks]


@pytest.mark.parametrize("first", ["<think>\na clock\n</think>", "Let me look."])
def test_a_round_after_another_begins_with_a_blank_line_in_a_chunk_of_its_own(
    plugin: PluginProcess, stub: Stub, first: str
) -> None:
    stub.will_stream({"reasoning_content": "noon"}, {"content": "It is noon."})
    pieces = second_round(plugin, stub, first)
    assert pieces == ["\n\n", "<think>\n", "noon", "\n</think>", "\n\nIt is noon.", ""]
    shown = web_page(first + "".join(pieces))
    assert all(before.endswith("\n\n") for before in shown.split("<details")[:-1] if before)


def test_an_answer_after_a_rounds_text_does_not_run_into_it(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "It is noon."})
    assert second_round(plugin, stub, "Let me look.")[0] == "\n\nIt is noon."


def test_nothing_goes_before_the_first_text_that_is_shown(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "noon"}, {"content": "It is noon."})
    assert second_round(plugin, stub, "")[0] == "<think>\n"


def test_json_after_a_rounds_text_stays_json(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": '{"time": 12}'})
    form = {"response_format": "json_object"}
    assert second_round(plugin, stub, "Let me look.", parameters=form)[0] == '{"time": 12}'


def test_the_blank_lines_do_not_go_back_to_the_model(plugin: PluginProcess, stub: Stub) -> None:
    other = {**CALL, "id": "call_2"}
    messages = [
        QUESTION,
        assistant("<think>\na clock\n</think>\n\nLet me look.", [CALL]),
        result(CALL, "12:00"),
        assistant("\n\nOnce more.", [other]),
        result(other, "12:01"),
        assistant("\n\n<think>\nlater\n</think>\n\nIt is 12:01."),
        user("And now?"),
    ]
    history = sent(plugin, stub, messages, tools=[CLOCK])["messages"]
    said = [message["content"] for message in history if message["role"] == "assistant"]
    assert said == ["Let me look.", "Once more.", "It is 12:01."]


@pytest.mark.parametrize("between", ["", "\n"])
def test_rounds_that_dify_joined_into_one_text_are_parted_again(
    plugin: PluginProcess, stub: Stub, between: str
) -> None:
    """An agent's node keeps its rounds as one answer; an agent's app adds a line break after each."""
    rounds = [
        "<think>\na clock\n</think>\n\nLet me look.",
        "\n\n<think>\nnoon\n</think>",
        "\n\n<think>\nsure\n</think>\n\nIt is noon.",
    ]
    history = sent(plugin, stub, [QUESTION, assistant(between.join(rounds)), user("And now?")])["messages"]
    assert history[1] == {"role": "assistant", "content": "Let me look.\n\nIt is noon."}


def test_an_agent_with_the_real_server(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    def ask(*messages: dict[str, Any]) -> list[dict[str, Any]]:
        return list(plugin.invoke(list(messages), credentials=credentials, tools=[CURRENT_TIME]))

    request = user("Use current_time.")
    first = ask(request)
    (call,) = calls_of(first)
    second = text_of(ask(request, assistant(text_of(first), [call]), result(call, "2026-11-21 10:00:00")))
    whole = text_of(first) + second
    assert second.startswith("\n\n<think>\n")
    answer, thinking = split_reasoning(whole)
    assert answer == "The tool says: 2026-11-21 10:00:00"
    assert "Use current_time." in thinking
    assert "Tell the result." in thinking
    later = ask(request, assistant(whole), user("What is the capital of France?"))
    assert split_reasoning(text_of(later))[0] == "The capital of France is Paris."
