"""A second look at histories: texts made to break a reader, sentences about markup, headers cut anywhere."""

import json
from typing import Any

import pytest

from mlx_backend.conversation.dialects.base import HistoryPolicy
from mlx_backend.conversation.effort import Effort, parse_effort
from mlx_backend.conversation.effort_sources import resolve, take_lines
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.template import GPT_OSS_TRAITS, for_template

MANY = 20_000  # a reader that looks at a text again for every tag in it would not come to an end here
HOSTILE = {
    "opening tags": "<think>" * MANY,
    "closing tags": "</think>" * MANY,
    "words and closing tags": "x</think>" * MANY,
    "blocks": "<think>a</think>" * MANY,
    "unclosed blocks of Dify's": "x<think>\n" * MANY,
    "details": '<details type="reasoning">' * MANY,
    "old details": "<details><summary>Thinking</summary>" * MANY,
    "blanks": " " * 5 * MANY + "x",
    "line breaks": "\n" * 5 * MANY + "x",
    "ticks": "`" * 5 * MANY,
    "starts": "<|start|>assistant" * MANY,
    "ends": "x<|end|>" * MANY,
    "calls": "<|channel|>commentary to=functions.f<|message|>{}<|call|>" * 2_000,
    "wrappings": "<think>a</think><|channel|>final<|message|>" * 2_000,
    "the word analysis": "analysis" * MANY,
}


def spoken(text: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "r"},
    ]


def answer(text: str) -> str:
    """What is left of an assistant's text in an answered turn."""
    return "".join(m["content"] for m in sanitise(spoken(text)) if m["role"] == "assistant")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_read_to_its_end(text: str) -> None:
    questions = [m["content"] for m in sanitise(spoken(text)) if m["role"] == "user"]
    assert questions == ["q", "r"]


@pytest.mark.parametrize(
    "text",
    [
        "The </think> tag closes it.",
        "Close it with </think>, then go on.",
        "Text. <|end|> is the end marker and <|start|>assistant begins.",
        "I would write <|channel|>analysis<|message|>x<|end|> here.",
        "Write <|start|>assistant<|channel|>final<|message|>hi<|return|> to end the turn.",
        "analysis of the data shows that assistantfinal is a word",
        "Final analysis: assistantfinal is a strange word",
        "< think >x</ think >",
    ],
)
def test_a_sentence_about_markup_is_an_answer(text: str) -> None:
    assert answer(text) == text
    assert answer(f"<think>\nHm.\n</think>\n\n{text}") == text
    raw = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert answer(raw + text) == text


@pytest.mark.parametrize(
    "word", ["The user greets me.", "I should greet", "First.\n\nSecond.\n", "ok", "そうだ。"]
)
@pytest.mark.parametrize("behind", ["\n\n", "", " "])
def test_what_stands_before_a_lone_closer_was_thought(word: str, behind: str) -> None:
    assert answer(f"{word}</think>{behind}Hello").strip() == "Hello"


@pytest.mark.parametrize(
    "header", ["<|start|>assistant<|channel|>final<|message|>", "<|channel|>commentary<|message|>"]
)
def test_a_header_that_was_cut_anywhere_is_never_an_answer(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    for size in range(header.index(">") + 1, len(header)):
        assert answer(thought + header[:size]) == ""


def test_a_raw_call_keeps_what_was_stored_behind_it() -> None:
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    result = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>seven<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>It is seven.<|return|>"
    whole = sanitise(spoken(call + result + final))
    parted = sanitise(
        [
            *spoken(call)[:2],
            {"role": "tool", "content": "seven"},
            *spoken(final)[1:],
        ]
    )
    assert whole == parted
    assert [m["role"] for m in whole] == ["user", "assistant", "tool", "assistant", "user"]


def test_arguments_that_json_cannot_write_stay_text() -> None:
    for arguments in ('{"a": NaN}', '{"a": 1e999}', "[" * 50_000, '{"a":' * 50_000):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [*spoken("x")[:1], {"role": "assistant", "content": None, "tool_calls": [call]}]
        (_, rendered) = for_template(sanitise(history), GPT_OSS_TRAITS)
        assert rendered["tool_calls"][0]["function"]["arguments"] == arguments
        json.dumps(rendered, allow_nan=False)


def test_full_width_words_are_words() -> None:
    assert parse_effort("ＨＩＧＨ") is Effort.HIGH
    assert take_lines([{"role": "system", "content": "Reasoning：ｌｏｗ"}]).efforts == [Effort.LOW]


def test_a_field_of_blanks_is_absent() -> None:
    assert resolve({"reasoning_effort": "  ", "think": " "}, spoken("x")).source == "default"


def test_a_line_goes_with_its_line_break_of_either_kind() -> None:
    messages = take_lines(
        [{"role": "system", "content": "Reasoning: high\r\nBe brief.\r\nAnd kind.\r\n"}]
    ).messages
    assert messages[0]["content"] == "Be brief.\r\nAnd kind."


def _calls(count: int) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": "{}"}
    return [{"id": f"c{at}", "type": "function", "function": function} for at in range(count)]


def test_many_messages_that_hold_only_reasoning_are_read_in_one_go() -> None:
    thoughts = [{"role": "assistant", "content": "", "reasoning_content": f"r{at}."} for at in range(MANY)]
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": f"r{MANY - 1}. So yes."}
    history = sanitise([{"role": "user", "content": "q"}, *thoughts, answer], policy=HistoryPolicy())
    reasoning = history[-1]["reasoning_content"]
    assert reasoning.startswith("r0.\n\nr1.\n\n")
    assert reasoning.endswith(f"r{MANY - 2}.\n\nr{MANY - 1}. So yes.")
    assert len(history) == 2


def test_many_parts_of_one_message_are_told_apart_in_one_go() -> None:
    uses = [{"type": "tool_use", "id": f"c{at}", "name": "f", "input": {}} for at in range(MANY)]
    results = [{"type": "tool_result", "tool_use_id": f"c{at}", "content": str(at)} for at in range(MANY)]
    history = sanitise(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [*uses, {"type": "text", "text": "I call."}]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
        ]
    )
    assert [message["role"] for message in history] == ["user", "assistant", *["tool"] * MANY, "user"]
    assert history[-2]["content"] == str(MANY - 1)


def test_many_calls_of_one_message_go_to_a_template_that_takes_one_each() -> None:
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": str(at)} for at in range(MANY)]
    history = sanitise(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": _calls(MANY)},
            *results,
        ]
    )
    rewritten = for_template(history, GPT_OSS_TRAITS)
    assert [message["role"] for message in rewritten] == ["user", *["assistant", "tool"] * MANY]
