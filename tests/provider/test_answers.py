"""Answers of every shape, as they reach Dify: thinking blocks, leaked markup, calls, usage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from daemon import PluginError, PluginProcess
from dify_view import PAGE_BLOCK, assistant, calls_of, split_reasoning, text_of, user
from invocations import CALL, CLOCK, ask

if TYPE_CHECKING:
    from conftest import Stub


# -- thinking blocks ---------------------------------------------------------------------------------


def test_reasoning_becomes_one_block_with_its_tags_in_chunks_of_their_own(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream(
        {"role": "assistant"},
        {"reasoning_content": "Think"},
        {"reasoning_content": "ing."},
        {"content": "Hi"},
    )
    pieces = [chunk["delta"]["message"]["content"] for chunk in ask(plugin, stub)]
    assert pieces == ["<think>\n", "Think", "ing.", "\n</think>", "\n\nHi", ""]


def test_reasoning_sent_under_both_names_is_shown_once(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why", "reasoning": "why"}, {"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_empty_and_keyless_deltas_do_not_split_a_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream(
        {"reasoning_content": "a"}, {}, {"reasoning_content": "", "content": ""}, {"content": None}, {"reasoning": "b"},
        {"content": "Hi"},
    )  # fmt: skip
    assert text_of(ask(plugin, stub)) == "<think>\nab\n</think>\n\nHi"


def test_blank_reasoning_makes_no_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "\n"}, {"reasoning_content": "  "}, {"content": "Hi"})
    assert text_of(ask(plugin, stub)) == "Hi"


@pytest.mark.parametrize(
    "pieces", [["a </think> b"], ["a </th", "ink> b"], list("a </think> b"), ["a <THINK> b"]]
)
def test_tags_inside_the_reasoning_do_not_break_the_block(
    plugin: PluginProcess, stub: Stub, pieces: list[str]
) -> None:
    stub.will_stream(*({"reasoning_content": piece} for piece in pieces), {"content": "Hi"})
    answer, reasoning = split_reasoning(text_of(ask(plugin, stub)))
    assert answer == "Hi"
    assert reasoning.replace("\u200b", "") == "".join(pieces)


def test_an_open_code_fence_is_closed_before_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream(
        {"reasoning_content": "Try:\n```py"}, {"reasoning_content": "thon\nx = 1"}, {"content": "Hi"}
    )
    assert text_of(ask(plugin, stub)) == "<think>\nTry:\n```python\nx = 1\n```\n</think>\n\nHi"


def test_reasoning_without_an_answer_is_a_closed_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "so be it"})
    assert text_of(ask(plugin, stub)) == "<think>\nso be it\n</think>"


def test_the_page_and_the_engine_agree_on_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why\n\n"}, {"content": "Hi"})
    text = text_of(ask(plugin, stub))
    assert PAGE_BLOCK.findall(text) == ["why"]
    assert split_reasoning(text) == ("Hi", "why")


# -- servers that leak -------------------------------------------------------------------------------

LEAK = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_leaked_harmony_is_parsed(plugin: PluginProcess, stub: Stub, size: int) -> None:
    stub.will_stream(*({"content": LEAK[at : at + size]} for at in range(0, len(LEAK), size)))
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_a_leaked_call_becomes_a_call(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream(
        {"content": "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"}
    )
    chunks = ask(plugin, stub, tools=[CLOCK])
    (call,) = calls_of(chunks)
    assert call["function"] == {"name": "clock", "arguments": "{}"}
    assert call["id"]
    assert text_of(chunks) == ""
    assert chunks[-1]["delta"]["finish_reason"] == "tool_calls"


def test_a_think_block_in_the_content_is_the_block(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "<thi"}, {"content": "nk>why</think>\n\nHi"})
    assert text_of(ask(plugin, stub)) == "<think>\nwhy\n</think>\n\nHi"


def test_markers_are_text_if_the_server_separates_reasoning(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "<|channel|> begins a header"})
    assert text_of(ask(plugin, stub)).endswith("</think>\n\n<|channel|> begins a header")


def test_an_answer_that_only_starts_like_a_marker_is_text(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "<"}, {"content": "|cha"})
    assert text_of(ask(plugin, stub)) == "<|cha"


# -- tool calls --------------------------------------------------------------------------------------


def test_interleaved_calls_are_assembled_by_index_after_the_closed_block(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream(
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
    stub.will_stream(
        {"tool_calls": [{"id": "a", "function": {"name": "clock", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "b", "function": {"name": "clock", "arguments": "{}"}}]},
    )
    assert [call["id"] for call in calls_of(ask(plugin, stub, tools=[CLOCK]))] == ["a", "b"]


def test_calls_with_neither_index_nor_id_are_kept_apart_by_their_names(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream(
        {"tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"tool_calls": [{"function": {"name": "clock", "arguments": '{"zone"'}}]},
        {"tool_calls": [{"function": {"arguments": ': "JST"}'}}]},
    )
    calls = calls_of(ask(plugin, stub, tools=[CLOCK]))
    assert [call["function"]["arguments"] for call in calls] == ['{"zone": "UTC"}', '{"zone": "JST"}']
    assert len({call["id"] for call in calls}) == 2


def test_a_call_cut_by_the_token_limit_is_not_made(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream(
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
    stub.will_send(json.dumps(answer), type="application/json")
    chunks = ask(plugin, stub, tools=[CLOCK])
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nHi"
    assert calls_of(chunks)[0]["id"] == "call_1"
    assert chunks[-1]["delta"]["usage"]["total_tokens"] == 7


def test_blocking_mode_is_the_same_answer_in_one_piece(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"}, prompt_tokens=5, completion_tokens=2)
    (whole,) = ask(plugin, stub, stream=False)
    assert whole["delta"]["message"]["content"] == "<think>\nwhy\n</think>\n\nHi"
    assert whole["delta"]["usage"]["prompt_tokens"] == 5


def test_without_usage_the_tokens_are_estimated(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "こんにちは"})
    usage = ask(plugin, stub)[-1]["delta"]["usage"]
    assert usage["completion_tokens"] >= 5
    assert usage["prompt_tokens"] >= 1


# -- hidden, opened early, too large -----------------------------------------------------------------


def test_a_node_may_hide_its_thinking(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"})
    assert text_of(ask(plugin, stub, parameters={"reasoning_format": "hide"})) == "Hi"
    assert stub.take_requests()[0]["body"]["reasoning_effort"] == "medium"


@pytest.mark.parametrize("stream", [True, False])
def test_hidden_thinking_that_leaves_no_room_for_an_answer_is_an_error_with_advice(
    plugin: PluginProcess, stub: Stub, *, stream: bool
) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "\n"}, finish="length")
    with pytest.raises(PluginError, match="Raise Max tokens, or lower the reasoning effort") as caught:
        ask(plugin, stub, parameters={"reasoning_format": "hide"}, stream=stream)
    assert caught.value.kind == "InvokeBadRequestError"


# -- cut off by the token limit ----------------------------------------------------------------------


def test_thinking_that_leaves_no_room_for_an_answer_is_shown_closed_and_then_an_error(
    plugin: PluginProcess, stub: Stub
) -> None:
    stub.will_stream({"reasoning_content": "never ends"}, finish="length", completion_tokens=12)
    answer = plugin.invoke([user("hi")], credentials=stub.credentials, parameters={"max_tokens": 12})
    chunks = [next(answer) for _ in range(3)]
    with pytest.raises(PluginError) as caught:
        next(answer)
    assert text_of(chunks) == "<think>\nnever ends\n</think>"
    assert caught.value.kind == "InvokeBadRequestError"
    assert caught.value.message == (
        "[MLX] there is no answer: the limit of Max tokens (12) was reached, and the model had spent all of its tokens "
        "thinking. Raise Max tokens, or lower the reasoning effort."
    )


def test_an_agents_round_without_a_whole_call_says_that_too(plugin: PluginProcess, stub: Stub) -> None:
    cut = {"index": 0, "id": "a", "function": {"name": "clock", "arguments": '{"zo'}}
    stub.will_stream({"reasoning_content": "why"}, {"tool_calls": [cut]}, finish="length")
    with pytest.raises(PluginError, match=r"thinking, or on a tool call that it could not finish. Raise Max"):
        ask(plugin, stub, tools=[CLOCK])


def test_a_context_that_was_full_before_the_limit_is_named(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, finish="length", completion_tokens=90)
    with pytest.raises(PluginError, match=r"the model's context was full, .* Start a new conversation"):
        ask(plugin, stub, parameters={"max_tokens": 4000})


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_that_went_round_in_circles_is_blamed_on_nothing_else(
    plugin: PluginProcess, stub: Stub, *, stream: bool
) -> None:
    choices = [{"index": 0, "delta": {"reasoning_content": "Wait. " * 9}}]
    last = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
        "usage": {"completion_tokens": 90},
    }
    chunks = ({"choices": choices}, {**last, "timings": {"stopped_by": "repetition", "repeated_n": 2}})
    stub.will_send(*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n")
    with pytest.raises(PluginError, match=r"repeated the same words over and over.* Ask again"):
        ask(plugin, stub, parameters={"max_tokens": 4000}, stream=stream)


def test_a_text_cut_by_the_limit_is_an_answer(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "It is"}, finish="length")
    chunks = ask(plugin, stub)
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nIt is"
    assert chunks[-1]["delta"]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "setting", [{"response_format": "json_object"}, {"json_schema": '{"type": "object"}'}]
)
def test_json_cut_by_the_limit_is_an_error_that_names_max_tokens(
    plugin: PluginProcess, stub: Stub, *, stream: bool, setting: dict[str, str]
) -> None:
    stub.will_stream({"content": '{"n": "1616'}, {"content": "1616"}, finish="length")
    with pytest.raises(PluginError) as caught:
        ask(plugin, stub, parameters={**setting, "max_tokens": 20}, stream=stream)
    assert caught.value.kind == "InvokeBadRequestError"
    assert caught.value.message == (
        "[MLX] the answer was to be JSON, and it was cut off before its end: the limit of Max tokens (20) was reached. "
        "Raise Max tokens, or ask for less."
    )


def test_whole_json_is_an_answer_whatever_ended_it(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": '{"n": [1, 2]}'}, {"content": "\n\n\n"}, finish="length")
    assert (
        text_of(ask(plugin, stub, parameters={"response_format": "json_object"})).strip() == '{"n": [1, 2]}'
    )


def test_json_that_dify_asks_for_in_words_may_not_be_cut_either(plugin: PluginProcess, stub: Stub) -> None:
    words = "### Job Description\nYou are a text classification engine that analyzes text data …"
    messages = [{"role": "system", "content": words}, user("What is 2 + 2?")]
    fenced = '```json\n{"category_id": "1"'
    stub.will_stream({"content": fenced}, finish="length")
    with pytest.raises(PluginError, match="was to be JSON"):
        list(plugin.invoke(messages, credentials=stub.credentials))
    stub.will_stream({"content": fenced}, {"content": "}"}, finish="length")
    assert text_of(list(plugin.invoke(messages, credentials=stub.credentials))) == fenced + "}"


WHOLE = '```json\n{"category_id": "`1`"}\n```'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (WHOLE, WHOLE),
        (WHOLE.removeprefix("```json\n"), WHOLE),
        (WHOLE.removesuffix("\n```"), WHOLE),
        (f"Well, {{so}}: {WHOLE[8:-4]} is it.", WHOLE),
        (f"Here it is:\n{WHOLE}\nGood?", f"Here it is:\n{WHOLE}\nGood?"),
        ("[" * 100_000, "[" * 100_000),
        ("I cannot.", "I cannot."),
    ],
    ids=[
        "whole",
        "no opening fence",
        "no closing fence",
        "in words",
        "whole in words",
        "brackets",
        "no JSON",
    ],
)
def test_json_for_which_a_prompt_shows_a_block_comes_in_a_whole_one(
    plugin: PluginProcess, stub: Stub, said: str, shown: str, stream: bool
) -> None:
    words = "### Job Description\nYou are a text classification engine that analyzes text data …"
    shot = [user("bad service"), assistant('```json\n{"category_id": "7"}\n```')]
    stub.will_stream({"content": said[:9]}, {"content": said[9:]})
    messages = [{"role": "system", "content": words}, *shot, user("What is 2 + 2?")]
    assert text_of(list(plugin.invoke(messages, credentials=stub.credentials, stream=stream))) == shown


def test_an_answer_that_starts_inside_a_block_is_parsed_at_once_or_from_the_second_time(
    plugin: PluginProcess, stub: Stub
) -> None:
    form = {**stub.credentials, "server_kind": "other"}
    deltas = [{"content": "wh"}, {"content": "y</th"}, {"content": "ink>\n\nHi"}]

    def text(model: str, *, stream: bool) -> str:
        stub.will_stream(*deltas)
        return text_of(list(plugin.invoke([user("hi")], credentials=form, model=model, stream=stream)))

    assert text("opens-its-block", stream=False) == "<think>\nwhy\n</think>\n\nHi"
    assert text("opens-its-block", stream=True) == "<think>\nwhy\n</think>\n\nHi"
    assert text("opens-its-block-too", stream=True) == "why\n\nHi"
    assert text("opens-its-block-too", stream=True) == "<think>\nwhy\n</think>\n\nHi"
    assert text("DeepSeek-R1-Distill-Qwen-7B", stream=True) == "<think>\nwhy\n</think>\n\nHi"


def test_an_answer_too_large_for_one_piece_is_an_error(plugin: PluginProcess, stub: Stub) -> None:
    stub.will_stream({"content": "x" * 5_000_000})
    with pytest.raises(PluginError, match="more than Dify takes in one piece"):
        ask(plugin, stub, stream=False)
    stub.will_stream({"content": "x" * 5_000_000})
    assert len(text_of(ask(plugin, stub))) == 5_000_000
