"""What the plugin makes of every way a server may answer, and what it sends; a scripted server on a real socket."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import PAGE_BLOCK, assistant, calls_of, result, split_reasoning, text_of, user

if TYPE_CHECKING:
    from conftest import Stub

CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CLOCK = {
    "name": "clock",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {}},
}


def ask(plugin: PluginProcess, stub: Stub, **more: Any) -> list[dict[str, Any]]:
    return list(plugin.invoke([user("hi")], credentials=stub.credentials, **more))


def partial_answer(plugin: PluginProcess, stub: Stub) -> tuple[str, PluginError]:
    """The text that reached Dify before the answer broke off, and the error."""
    chunks: list[dict[str, Any]] = []
    with pytest.raises(PluginError) as caught:
        chunks.extend(plugin.invoke([user("hi")], credentials=stub.credentials))
    return text_of(chunks), caught.value


# -- thinking blocks ---------------------------------------------------------------------------------


def test_reasoning_becomes_one_block_with_its_tags_in_chunks_of_their_own(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.streams(
        {"role": "assistant"},
        {"reasoning_content": "Think"},
        {"reasoning_content": "ing."},
        {"content": "Hi"},
    )
    pieces = [chunk["delta"]["message"]["content"] for chunk in ask(plugin, stub)]
    assert pieces == ["<think>\n", "Think", "ing.", "\n</think>", "\n\nHi", ""]


def test_reasoning_sent_under_both_names_is_shown_once(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "why", "reasoning": "why"}, {"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_empty_and_keyless_deltas_do_not_split_a_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams(
        {"reasoning_content": "a"}, {}, {"reasoning_content": "", "content": ""}, {"content": None}, {"reasoning": "b"},
        {"content": "Hi"},
    )  # fmt: skip
    assert text_of(ask(plugin, stub)) == "<think>\nab\n</think>\n\nHi"


def test_blank_reasoning_makes_no_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "\n"}, {"reasoning_content": "  "}, {"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"


@pytest.mark.parametrize(
    "pieces", [["a </think> b"], ["a </th", "ink> b"], list("a </think> b"), ["a <THINK> b"]]
)
def test_tags_inside_the_reasoning_do_not_break_the_block(
    plugin: PluginProcess, stub: Stub, pieces: list[str]
) -> None:
    stub.streams(*({"reasoning_content": piece} for piece in pieces), {"content": "Hi"})
    answer, reasoning = split_reasoning(text_of(ask(plugin, stub)))
    assert answer == "Hi"
    assert reasoning.replace("\u200b", "") == "".join(pieces)


def test_an_open_code_fence_is_closed_before_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams(
        {"reasoning_content": "Try:\n```py"}, {"reasoning_content": "thon\nx = 1"}, {"content": "Hi"}
    )
    assert text_of(ask(plugin, stub)) == "<think>\nTry:\n```python\nx = 1\n```\n</think>\n\nHi"


def test_reasoning_without_an_answer_is_still_a_closed_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "never ends"}, finish="length")
    chunks = ask(plugin, stub)
    assert text_of(chunks) == "<think>\nnever ends\n</think>"
    assert chunks[-1]["delta"]["finish_reason"] == "length"


def test_the_page_and_the_engine_agree_on_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "why\n\n"}, {"content": "Hi"})
    text = text_of(ask(plugin, stub))
    assert PAGE_BLOCK.findall(text) == ["why"]
    assert split_reasoning(text) == ("Hi", "why")


# -- servers that leak -------------------------------------------------------------------------------

LEAK = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_leaked_harmony_is_read_like_any_other_answer(plugin: PluginProcess, stub: Stub, size: int) -> None:
    stub.streams(*({"content": LEAK[at : at + size]} for at in range(0, len(LEAK), size)))
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_a_leaked_call_becomes_a_call(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams(
        {"content": "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"}
    )
    chunks = ask(plugin, stub, tools=[CLOCK])
    (call,) = calls_of(chunks)
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    assert call["id"]
    assert text_of(chunks) == ""
    assert chunks[-1]["delta"]["finish_reason"] == "tool_calls"


def test_a_think_block_in_the_content_is_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "<thi"}, {"content": "nk>why</think>\n\nHi"})
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_markers_quoted_by_a_server_that_separates_are_text(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "why"}, {"content": "<|channel|> begins a header"})
    assert text_of(ask(plugin, stub)).endswith("</think>\n\n<|channel|> begins a header")


def test_an_answer_that_only_begins_like_a_marker_is_text(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "<"}, {"content": "|cha"})
    assert text_of(ask(plugin, stub)) == "<|cha"


# -- tool calls --------------------------------------------------------------------------------------


def test_interleaved_calls_are_put_together_by_index_behind_the_closed_block(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.streams(
        {"reasoning_content": "two"},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "clock", "arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "clock", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        finish="tool_calls",
    )
    chunks = ask(plugin, stub, tools=[CLOCK])
    assert text_of(chunks) == "<think>\ntwo\n</think>"
    assert [(call["id"], call["function"]["arguments"]) for call in calls_of(chunks)] == [
        ("a", '{"x": 1}'),
        ("b", "{}"),
    ]


def test_calls_without_an_index_are_kept_apart_by_their_ids(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams(
        {"tool_calls": [{"id": "a", "function": {"name": "clock", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "clock", "arguments": "{}"}}]},
    )
    assert [call["id"] for call in calls_of(ask(plugin, stub, tools=[CLOCK]))] == ["a", "b"]


def test_calls_with_neither_index_nor_id_are_kept_apart_by_their_names(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.streams(
        {"tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"tool_calls": [{"function": {"name": "clock", "arguments": '{"zone"'}}]},
        {"tool_calls": [{"function": {"arguments": ': "JST"}'}}]},
    )
    calls = calls_of(ask(plugin, stub, tools=[CLOCK]))
    assert [call["function"]["arguments"] for call in calls] == ['{"zone": "UTC"}', '{"zone": "JST"}']
    assert len({call["id"] for call in calls}) == 2


def test_a_call_cut_by_the_token_limit_is_not_made(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams(
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "clock", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "clock", "arguments": '{"zo'}}]},
        finish="length",
    )
    chunks = ask(plugin, stub, tools=[CLOCK])
    assert [call["id"] for call in calls_of(chunks)] == ["a"]
    assert chunks[-1]["delta"]["finish_reason"] == "length"


# -- whole answers, usage ----------------------------------------------------------------------------


def test_a_server_that_answers_with_json_is_understood(plugin: PluginProcess, stub: Stub) -> None:
    message = {"role": "assistant", "content": "Hi", "reasoning": "why", "tool_calls": [CALL]}
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    stub.says(json.dumps(answer), type="application/json")
    chunks = ask(plugin, stub, tools=[CLOCK])
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nHi"
    assert calls_of(chunks)[0]["id"] == "call_1"
    assert chunks[-1]["delta"]["usage"]["total_tokens"] == 7


def test_blocking_mode_is_the_same_answer_in_one_piece(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "why"}, {"content": "Hi"}, prompt_tokens=5, completion_tokens=2)
    (whole,) = ask(plugin, stub, stream=False)
    assert whole["delta"]["message"]["content"] == "<think>\nwhy\n</think>\n\nHi"
    assert whole["delta"]["usage"]["prompt_tokens"] == 5


def test_without_usage_the_tokens_are_estimated(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "こんにちは"})
    usage = ask(plugin, stub)[-1]["delta"]["usage"]
    assert usage["completion_tokens"] >= 5
    assert usage["prompt_tokens"] >= 1


# -- what is sent ------------------------------------------------------------------------------------


def sent(plugin: PluginProcess, stub: Stub, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    stub.streams({"content": "ok"})
    list(plugin.invoke(messages, credentials=stub.credentials, **more))
    (request,) = stub.asked()
    body: dict[str, Any] = request["body"]
    return body


def test_a_first_turn_sends_what_was_set_and_nothing_empty(plugin: PluginProcess, stub: Stub) -> None:
    body = sent(plugin, stub, [user("hi")], parameters={"temperature": 0.5})
    assert body == {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "medium",
        "reasoning_format": "separate",
        "temperature": 0.5,
    }


def test_stop_words_go_without_those_that_are_empty(plugin: PluginProcess, stub: Stub) -> None:
    assert sent(plugin, stub, [user("hi")], stop=["", "END"])["stop"] == ["END"]
    assert "stop" not in sent(plugin, stub, [user("hi")], stop=[""])


def test_thinking_that_dify_sends_back_stays_out_of_answered_turns(plugin: PluginProcess, stub: Stub) -> None:
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


def test_an_answered_tool_loop_loses_its_thinking_whatever_ids_dify_invents(
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


def test_each_round_of_an_agent_keeps_its_own_thinking_until_there_is_an_answer(
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
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert [" ".join(text.split()) for text in said] == ([" ".join(answer.split())] if answer else [])


def test_what_newer_daemons_send_beside_a_request_does_no_harm(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "Hi"})
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


def test_another_server_is_asked_for_its_model_when_it_does_not_know_default(
    plugin: PluginProcess, stub: Stub
) -> None:
    unknown = {
        "error": {"message": "no model default", "type": "invalid_request_error", "code": "model_not_found"}
    }
    stub.says(json.dumps(unknown), status=404, type="application/json")
    stub.streams({"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"
    assert [request["body"]["model"] for request in stub.asked()] == ["default", "served-model"]


def test_an_address_that_is_wrong_is_not_taken_for_a_missing_model(plugin: PluginProcess, stub: Stub) -> None:
    stub.says(json.dumps({"error": {"message": "Nothing here; try /v1/models."}}), status=404)
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
def test_other_servers_say_in_other_ways_that_they_do_not_know_default(
    plugin: PluginProcess, stub: Stub, answer: dict[str, Any]
) -> None:
    stub.says(json.dumps(answer), status=404, type="application/json")
    stub.streams({"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"


TITLE = "You are asked to generate a concise chat title by decomposing the user’s input into two parts: …"
QUESTIONS = (
    "Human: hi\nPlease help me predict the three most likely questions that human would ask …\nquestions:\n"
)


CODE = "You are an expert programmer. Generate code based on the following instructions:\n\nInstructions: add"
GPT_OSS = "mlx-community/gpt-oss-20b-MXFP4-Q8"


@pytest.mark.parametrize("errand", [TITLE, QUESTIONS])
def test_difys_own_errands_are_done_at_the_lowest_effort_and_answered_without_a_block(
    plugin: PluginProcess, stub: Stub, errand: str
) -> None:
    stub.streams({"reasoning_content": "{}"}, {"content": '{"Your Output": "<think> tags"}'})
    settings = {"temperature": 1, "max_tokens": 500}
    chunks = list(
        plugin.invoke(
            [user(errand)], credentials=stub.credentials, model=GPT_OSS, parameters=settings, stream=False
        )
    )
    assert text_of(chunks) == '{"Your Output": "<think> tags"}'
    body = stub.asked()[0]["body"]
    assert (body["reasoning_effort"], body["priority"], body["answer_reserve"]) == ("low", 1, 300)


def test_an_aside_for_a_model_that_can_do_without_thinking_does_without(
    plugin: PluginProcess, stub: Stub
) -> None:
    settings = {"max_tokens": 256}
    body = sent(plugin, stub, [user("hi")], model="default", parameters=settings, stream=False)
    assert body["reasoning_effort"] == "none"


def test_a_generator_without_a_limit_is_an_errand_too(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "easy"}, {"content": "def main(): ..."})
    chunks = list(plugin.invoke([user(CODE)], credentials=stub.credentials, model=GPT_OSS, stream=False))
    assert text_of(chunks) == "def main(): ..."
    body = stub.asked()[0]["body"]
    assert (body["reasoning_effort"], body["priority"]) == ("low", 1)
    assert "answer_reserve" not in body


def test_an_effort_that_was_chosen_is_kept_in_an_errand(plugin: PluginProcess, stub: Stub) -> None:
    settings = {"reasoning_effort": "medium", "max_tokens": 500}
    body = sent(plugin, stub, [user(CODE)], model=GPT_OSS, parameters=settings, stream=False)
    assert body["reasoning_effort"] == "medium"
    assert "priority" not in body


def test_little_room_is_enough_for_what_is_streamed_to_a_user(plugin: PluginProcess, stub: Stub) -> None:
    body = sent(plugin, stub, [user("hi")], model=GPT_OSS, parameters={"max_tokens": 500})
    assert body["reasoning_effort"] == "medium"
    assert not {"priority", "answer_reserve"} & body.keys()


def test_other_servers_are_not_sent_what_only_ours_knows(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "ok"})
    form = {**stub.credentials, "server_kind": "other"}
    settings = {"max_tokens": 500}
    list(plugin.invoke([user(TITLE)], credentials=form, model=GPT_OSS, parameters=settings, stream=False))
    body = stub.asked()[0]["body"]
    assert body["reasoning_effort"] == "low"
    assert not {"priority", "answer_reserve"} & body.keys()


def test_the_same_words_in_a_conversation_are_no_errand(plugin: PluginProcess, stub: Stub) -> None:
    assert sent(plugin, stub, [user(TITLE)])["reasoning_effort"] == "medium"
    assert sent(plugin, stub, [user("hi")], stream=False)["reasoning_effort"] == "medium"


def test_json_that_dify_asks_for_in_the_prompt_comes_without_a_block_although_it_is_streamed(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.streams({"reasoning_content": '{"b": 0}'}, {"content": '{"a": 1}'})
    words = (
        "You’re a helpful AI assistant. You could answer questions and output in JSON format.\nconstraints:"
    )
    messages = [{"role": "system", "content": words}, user("My name is John.")]
    assert text_of(list(plugin.invoke(messages, credentials=stub.credentials))) == '{"a": 1}'


def test_a_node_may_hide_its_thinking(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": "why"}, {"content": "Hi"})
    assert text_of(ask(plugin, stub, parameters={"reasoning_format": "hide"})) == "Hi"
    assert stub.asked()[0]["body"]["reasoning_effort"] == "medium"


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_that_is_hidden_and_leaves_no_room_for_an_answer_is_an_error_with_what_to_do(
    plugin: PluginProcess, stub: Stub, *, stream: bool
) -> None:
    stub.streams({"reasoning_content": "why"}, {"content": "\n"}, finish="length")
    with pytest.raises(PluginError, match="Raise Max tokens, or lower the reasoning effort") as caught:
        ask(plugin, stub, parameters={"reasoning_format": "hide"}, stream=stream)
    assert caught.value.kind == "InvokeBadRequestError"


def test_a_server_that_answers_from_inside_the_block_is_read_right_at_once_or_from_the_second_time(
    plugin: PluginProcess, stub: Stub
) -> None:
    form = {**stub.credentials, "server_kind": "other"}
    deltas = [{"content": "wh"}, {"content": "y</th"}, {"content": "ink>\n\nHi"}]

    def text(model: str, *, stream: bool) -> str:
        stub.streams(*deltas)
        return text_of(list(plugin.invoke([user("hi")], credentials=form, model=model, stream=stream)))

    assert text("opens-its-block", stream=False) == "<think>\nwhy\n</think>\n\nHi"
    assert text("opens-its-block", stream=True) == "<think>\nwhy\n</think>\n\nHi"
    assert text("opens-its-block-too", stream=True) == "why\n\nHi"
    assert text("opens-its-block-too", stream=True) == "<think>\nwhy\n</think>\n\nHi"
    assert text("DeepSeek-R1-Distill-Qwen-7B", stream=True) == "<think>\nwhy\n</think>\n\nHi"


def test_an_answer_too_large_for_one_piece_says_so(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"content": "x" * 5_000_000})
    with pytest.raises(PluginError, match="more than Dify takes in one piece"):
        ask(plugin, stub, stream=False)
    stub.streams({"content": "x" * 5_000_000})
    assert len(text_of(ask(plugin, stub))) == 5_000_000


def test_a_structured_answer_holds_nothing_but_the_answer(plugin: PluginProcess, stub: Stub) -> None:
    stub.streams({"reasoning_content": '{"b": 0}'}, {"content": '{"a": 1}'})
    schema = {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "name": "llm_response"}
    chunks = list(
        plugin.invoke(
            [user("hi")],
            credentials={**stub.credentials, "structured_output": "supported"},
            model="my-model",
            parameters={"response_format": "json_schema", "json_schema": json.dumps(schema)},
        )
    )
    assert text_of(chunks) == '{"a": 1}'
    assert stub.asked()[0]["body"]["response_format"] == {"type": "json_schema", "json_schema": schema}


def test_a_schema_alone_is_wanted_and_a_format_without_its_schema_is_refused(
    plugin: PluginProcess, stub: Stub
) -> None:
    schema = {"schema": {"type": "object"}, "name": "mine"}
    stub.streams({"reasoning_content": "why"}, {"content": "{}"})
    form = {"structured_output": "supported"}
    alone = plugin.invoke(
        [user("hi")],
        credentials={**stub.credentials, **form},
        model="my-model",
        parameters={"json_schema": json.dumps(schema)},
    )
    assert text_of(list(alone)) == "{}"
    assert stub.asked()[0]["body"]["response_format"] == {"type": "json_schema", "json_schema": schema}
    with pytest.raises(PluginError, match="JSON schema is empty"):
        ask(plugin, stub, parameters={"response_format": "json_schema"})
    assert stub.asked() == []


def test_the_key_is_sent_and_never_told(plugin: PluginProcess, stub: Stub) -> None:
    stub.says(json.dumps({"error": {"message": "wrong key"}}), status=401, type="application/json")
    with pytest.raises(PluginError) as caught:
        ask(plugin, stub)
    assert stub.asked()[0]["headers"]["Authorization"] == "Bearer secret-key"
    assert "secret-key" not in json.dumps(caught.value.data)


# -- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "InvokeBadRequestError"),
        (401, "InvokeAuthorizationError"),
        (403, "InvokeAuthorizationError"),
        (404, "InvokeBadRequestError"),
        (413, "InvokeBadRequestError"),
        (429, "InvokeRateLimitError"),
        (500, "InvokeServerUnavailableError"),
        (503, "InvokeServerUnavailableError"),
    ],
)
def test_each_status_is_one_of_difys_kinds_in_the_servers_words(
    plugin: PluginProcess, stub: Stub, status: int, kind: str
) -> None:
    stub.says(json.dumps({"error": {"message": "because of this"}}), status=status, type="application/json")
    with pytest.raises(PluginError) as caught:
        ask(plugin, stub)
    assert caught.value.kind == kind
    assert "because of this" in caught.value.message
    assert caught.value.message.startswith("[MLX] ")


def test_nobody_at_the_address_is_a_connection_error_that_says_what_to_do(plugin: PluginProcess) -> None:
    with pytest.raises(PluginError) as caught:
        list(plugin.invoke([user("hi")], credentials={"endpoint_url": "http://127.0.0.1:9/v1"}))
    assert caught.value.kind == "InvokeConnectionError"
    assert "start it with `mlx-backend`" in caught.value.message


@pytest.mark.parametrize("answer", ['{"detail": "Not Found"}', "<html>no such page</html>", ""])
def test_an_address_without_an_api_is_named_as_such(plugin: PluginProcess, stub: Stub, answer: str) -> None:
    stub.says(answer, status=404, type="application/json")
    with pytest.raises(PluginError, match="it usually ends in /v1"):
        ask(plugin, stub)


def test_a_page_instead_of_an_api_is_named_as_such(plugin: PluginProcess, stub: Stub) -> None:
    stub.says("<html>welcome</html>", type="text/html")
    with pytest.raises(PluginError, match="not an OpenAI-compatible server") as caught:
        ask(plugin, stub)
    assert caught.value.kind == "InvokeBadRequestError"


def sse(delta: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (
            'data: {"error": {"message": "out of memory", "type": "server_error"}}\n\n',
            "InvokeServerUnavailableError",
        ),
        (
            'data: {"error": {"message": "too long", "type": "invalid_request_error"}}\n\n',
            "InvokeBadRequestError",
        ),
        (
            'data: {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}\n\n',
            "InvokeRateLimitError",
        ),
        ('data: {"choices": [{"delta": {"cont', "InvokeServerUnavailableError"),
        ("data: nonsense\n\n", "InvokeServerUnavailableError"),
        ("", "InvokeServerUnavailableError"),
    ],
    ids=["server error", "bad request", "rate limit", "half a line", "no JSON", "cut"],
)
def test_an_answer_that_breaks_off_closes_its_block_and_says_why(
    plugin: PluginProcess, stub: Stub, ending: str, kind: str
) -> None:
    stub.says(sse({"reasoning_content": "I was just"}), ending, cut=True)
    text, error = partial_answer(plugin, stub)
    assert text == "<think>\nI was just\n</think>"
    assert error.kind == kind


def test_comments_keep_the_line_open_and_say_nothing(plugin: PluginProcess, stub: Stub) -> None:
    done = 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    stub.says(": keepalive 1/80\n\n", sse({"content": "Hi"}), ": keepalive\r\n\r\n", done)
    assert text_of(ask(plugin, stub)) == "Hi"


# -- files -------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": "aaaa"}


def document(name: str, data: bytes, kind: str) -> dict[str, Any]:
    """A document as Dify sends it."""
    encoded = base64.b64encode(data).decode()
    form = name.rpartition(".")[2]
    return {"type": "document", "format": form, "mime_type": kind, "base64_data": encoded, "filename": name}


def parts_sent(plugin: PluginProcess, stub: Stub, *parts: dict[str, Any], **form: str) -> Any:
    stub.streams({"content": "ok"})
    message = {"role": "user", "content": list(parts)}
    list(plugin.invoke([message], credentials={**stub.credentials, **form}, model="seeing"))
    (request,) = stub.asked()
    return request["body"]["messages"][0]["content"]


def test_pictures_go_as_they_came_and_where_they_stood(plugin: PluginProcess, stub: Stub) -> None:
    address = {**IMAGE, "base64_data": "", "url": "http://dify/files/a.png", "detail": "high"}
    sent_parts = parts_sent(
        plugin, stub, {"type": "text", "data": "one"}, IMAGE, {"type": "text", "data": "two"}, address
    )
    assert sent_parts == [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa", "detail": "low"}},
        {"type": "text", "text": "two"},
        {"type": "image_url", "image_url": {"url": "http://dify/files/a.png", "detail": "high"}},
    ]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.md", "# 題\n".encode(), "text/markdown"),
        ("a.csv", "\ufeff# 題\n".encode(), "text/csv; charset=utf-8"),
        ("a.json", "# 題\n".encode(), "application/json"),
        ("a.log", "# 題\n".encode("utf-16"), "application/octet-stream"),
    ],
)
def test_a_document_of_plain_text_goes_as_its_text(
    plugin: PluginProcess, stub: Stub, name: str, data: bytes, kind: str
) -> None:
    read = parts_sent(plugin, stub, {"type": "text", "data": "Summarise:"}, document(name, data, kind))
    assert read == f"Summarise:\n{name}:\n\n# 題\n"


def test_another_document_goes_as_a_file(plugin: PluginProcess, stub: Stub) -> None:
    (part,) = parts_sent(plugin, stub, document("a.pdf", b"%PDF", "application/pdf"))
    assert part == {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
    }


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (document("a.txt", "表".encode("cp932"), "text/plain"), "'a.txt' is not text in UTF-8"),
        ({**document("a.txt", b"", "text/plain"), "url": "http://x"}, "MULTIMODAL_SEND_FORMAT=base64"),
    ],
)
def test_a_document_that_cannot_be_read_is_refused_with_what_to_do(
    plugin: PluginProcess, stub: Stub, part: dict[str, Any], words: str
) -> None:
    with pytest.raises(PluginError, match=words) as caught:
        list(plugin.invoke([{"role": "user", "content": [part]}], credentials=stub.credentials))
    assert caught.value.kind == "InvokeBadRequestError"


def test_a_picture_for_a_model_that_the_form_calls_blind_is_refused_in_words(
    plugin: PluginProcess, stub: Stub
) -> None:
    form = {**stub.credentials, "vision": "unsupported"}
    with pytest.raises(PluginError, match="reads text only") as caught:
        list(plugin.invoke([{"role": "user", "content": [IMAGE]}], credentials=form))
    assert caught.value.kind == "InvokeBadRequestError"
