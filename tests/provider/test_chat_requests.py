"""The request the server gets for a call of Dify: history, settings, structured output, the key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import assistant, result, text_of, user
from invocations import CALL, CLOCK, ask, sent

if TYPE_CHECKING:
    from conftest import Stub


def test_a_first_request_holds_what_was_set_and_nothing_empty(plugin: PluginProcess, stub: Stub) -> None:
    body = sent(plugin, stub, [user("hi")], parameters={"temperature": 0.5})
    assert body == {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
        "reasoning_format": "separate",
        "temperature": 0.5,
        "max_tokens": 32_768,  # what is not read must end: Dify tells no plugin of Stop
        "answer_reserve": 1024,
    }


def test_empty_stop_words_are_left_out(plugin: PluginProcess, stub: Stub) -> None:
    assert sent(plugin, stub, [user("hi")], stop=["", "END"])["stop"] == ["END"]
    assert "stop" not in sent(plugin, stub, [user("hi")], stop=[""])


def test_thinking_is_removed_from_answered_turns(plugin: PluginProcess, stub: Stub) -> None:
    history = [user("q"), assistant("<think>\nwhy\n</think>a"), user("q2")]
    assert sent(plugin, stub, history)["messages"][1] == {"role": "assistant", "content": "a"}


def test_inside_a_tool_loop_the_thinking_goes_back_as_reasoning(plugin: PluginProcess, stub: Stub) -> None:
    history = [
        user("q"),
        assistant("<think>\nI need <\u200bit>\n</think>\n\n", [CALL]),
        result(CALL, "12:00"),
    ]
    turn, answer = sent(plugin, stub, history, tools=[CLOCK])["messages"][1:]
    assert turn["reasoning_content"] == "I need <it>"
    assert turn["content"] == ""
    assert turn["tool_calls"] == [CALL]
    assert answer["content"] == "12:00"


def test_thinking_is_removed_from_an_answered_tool_loop_whatever_its_ids(
    plugin: PluginProcess, stub: Stub
) -> None:
    renamed = {**CALL, "id": "7b0a6c1e"}
    history = [
        user("q"),
        assistant("<think>\nI need it\n</think>", [renamed]),
        result(renamed, "12:00"),
        assistant("<think>\nI have it\n</think>noon"),
        user("thanks"),
    ]
    assert "think" not in json.dumps(sent(plugin, stub, history)["messages"])


def test_each_round_of_an_agent_keeps_its_thinking_until_the_answer(
    plugin: PluginProcess, stub: Stub
) -> None:
    first, second = ({**CALL, "id": identifier} for identifier in ("9f1e-1", "9f1e-2"))
    history = [
        user("an earlier question"),
        assistant("<think>\nold\n</think>\n\nan earlier answer"),
        user("q"),
        assistant("<think>\none\n</think>\n\nLet me see.", [first]),
        result(first, "12:00"),
        assistant("<think>\ntwo\n</think>", [second]),
        result(second, "12:01"),
    ]
    turns = sent(plugin, stub, history, tools=[CLOCK])["messages"]
    assert [turn.get("reasoning_content") for turn in turns if turn["role"] == "assistant"] == [
        None,
        "one",
        "two",
    ]
    assert [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"] == ["9f1e-1", "9f1e-2"]
    assert turns[3]["content"] == "Let me see."


@pytest.mark.parametrize(
    ("echoed", "answer"),
    [
        ("<think>\nwhy\n</think>\n\nThe tag <\u200bthink> opens it.", "The tag <think> opens it."),
        ("<think>\nan | row\n- | -\n\n\u200b\n</think>\n\na", "a"),
        ("<think>\nstopped by the us", ""),
        ("<THINK>why</THINK>a", "a"),
        ("one <think>\nb\n</think>\n\ntwo", "one \n\ntwo"),
        ("Thought: I need it\nAction: {}", "Thought: I need it\nAction: {}"),
    ],
)
def test_an_answer_goes_back_as_the_model_gave_it(
    plugin: PluginProcess, stub: Stub, echoed: str, answer: str
) -> None:
    turns = sent(plugin, stub, [user("q"), assistant(echoed), user("q2")])["messages"]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert [" ".join(text.split()) for text in answers] == ([" ".join(answer.split())] if answer else [])


def test_fields_that_newer_daemons_send_are_ignored(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "Hi"})
    request = plugin.request(
        "invoke_llm", provider="mlx", model="default", model_type="llm", credentials=stub.credentials,
        model_parameters={}, prompt_messages=[user("hi")], tools=None, stop=None, stream=True,
        tool_choice="required", json_schema={"type": "object"},
    )  # fmt: skip
    assert text_of(list(request)) == "Hi"


def test_two_turns_within_one_second_leave_an_empty_answer_that_is_dropped(
    plugin: PluginProcess, stub: Stub
) -> None:
    history = [user("q"), assistant(""), user("q")]
    assert [message["role"] for message in sent(plugin, stub, history)["messages"]] == ["user", "user"]


def test_effort_is_sent_as_it_was_chosen(plugin: PluginProcess, stub: Stub) -> None:
    for effort in ("low", "medium", "high"):
        assert (
            sent(plugin, stub, [user("hi")], parameters={"reasoning_effort": effort})["reasoning_effort"]
            == effort
        )


def test_a_server_that_does_not_know_default_gets_its_own_models_name(
    plugin: PluginProcess, stub: Stub
) -> None:
    unknown = {
        "error": {"message": "no model default", "type": "invalid_request_error", "code": "model_not_found"}
    }
    stub.will_send(json.dumps(unknown), status=404, type="application/json")
    stub.will_stream({"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"
    assert [request["body"]["model"] for request in stub.take_requests()] == ["default", "served-model"]


def test_a_wrong_address_is_not_taken_for_a_missing_model(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_send(json.dumps({"error": {"message": "Nothing here; try /v1/models."}}), status=404)
    with pytest.raises(PluginError, match="Nothing here"):
        ask(plugin, stub)


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "The model `default` does not exist.", "type": "NotFoundError", "code": 404}},
        {"error": "model 'default' not found"},
        {"message": "The model `default` does not exist.", "object": "error"},
    ],
)
def test_other_servers_refusals_of_default_are_understood(
    plugin: PluginProcess, stub: Stub, answer: dict[str, Any]
) -> None:
    stub.will_send(json.dumps(answer), status=404, type="application/json")
    stub.will_stream({"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"


_SCHEMA = {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "name": "llm_response"}
_PASTED = {"type": "json_schema", "json_schema": _SCHEMA}


@pytest.mark.parametrize("written", [_SCHEMA, _PASTED, {"name": "outer", "schema": _PASTED}], ids=str)
def test_a_structured_answer_holds_nothing_but_the_answer(
    plugin: PluginProcess, stub: Stub, written: dict[str, Any]
) -> None:
    stub.will_stream({"reasoning_content": '{"b": 0}'}, {"content": '{"a": 1}'})
    chunks = list(
        plugin.invoke(
            [user("hi")],
            credentials={**stub.credentials, "structured_output": "supported"},
            model="my-model",
            parameters={"response_format": "json_schema", "json_schema": json.dumps(written)},
        )
    )
    assert text_of(chunks) == '{"a": 1}'
    assert stub.take_requests()[0]["body"]["response_format"] == _PASTED


def test_a_schema_alone_is_wanted_and_a_format_without_its_schema_is_refused(
    plugin: PluginProcess, stub: Stub
) -> None:
    schema = {"schema": {"type": "object"}, "name": "mine"}
    stub.will_stream({"reasoning_content": "why"}, {"content": "{}"})
    form = {"structured_output": "supported"}
    alone = plugin.invoke(
        [user("hi")],
        credentials={**stub.credentials, **form},
        model="my-model",
        parameters={"json_schema": json.dumps(schema)},
    )
    assert text_of(list(alone)) == "{}"
    assert stub.take_requests()[0]["body"]["response_format"] == {
        "type": "json_schema",
        "json_schema": schema,
    }
    with pytest.raises(PluginError, match="JSON schema is empty"):
        ask(plugin, stub, parameters={"response_format": "json_schema"})
    assert stub.take_requests() == []


def test_the_key_is_sent_and_never_shown(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_send(json.dumps({"error": {"message": "wrong key"}}), status=401, type="application/json")
    with pytest.raises(PluginError) as caught:
        ask(plugin, stub)
    assert stub.take_requests()[0]["headers"]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in json.dumps(caught.value.data)


def test_a_conversation_has_a_name_for_proxies_whatever_documents_stand_before_it(
    plugin: PluginProcess, stub: Stub
) -> None:
    """By it, docs/replicas.md sends a conversation to the machine that has read it before."""
    turns: tuple[list[dict[str, Any]], ...] = (
        [{"role": "system", "content": "Document A"}, user("q")],
        [{"role": "system", "content": "Document B"}, user("q"), assistant("a"), user("q2")],
        [{"role": "system", "content": "Document A"}, user("another")],
    )
    names = []
    for messages in turns:
        stub.will_stream({"content": "ok"})
        list(plugin.invoke(messages, credentials=stub.credentials))
        names.append(stub.take_requests()[-1]["headers"]["X-Session-Id"])
    assert names[0] == names[1] != names[2]
    assert "q" not in names[0]
