"""A client that stores what a model wrote as it was sends its markup back: it is read as the output was.

What is only talked about, in code, in quotation marks, in a sentence or by the user, stays text.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversation_cases import OFFERED

from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.events import ToolCall
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.parser import parse_text

KEPT = DIALECTS["kimi-k3"].history  # all reasoning is handed to the template
# A call that nothing marks is text to anyone who does not know that it was a model's turn.
MARKED = [dialect for dialect in DIALECTS.values() if dialect.name != "gemma3-tool_code"]
REASONING = [dialect for dialect in DIALECTS.values() if dialect.blocks]


def sent(dialect: Dialect, *contents: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the assistant's messages of a history in which these were posted."""
    posted = [{"role": "user", "content": "Go on."}]
    for content in contents:
        posted += [{"role": "assistant", "content": content, **fields}, {"role": "user", "content": content}]
    history = sanitise(posted, tools=OFFERED, policy=KEPT, dialect=dialect)
    assert [message["content"] for message in history if message["role"] == "user"][1:] == [*contents]
    return [message for message in history if message["role"] == "assistant"]


def written(dialect: Dialect, text: str) -> str:
    opener, closer = next(iter(dialect.blocks.items()))
    return text.replace("{o}", opener).replace("{c}", closer)


@pytest.mark.parametrize("dialect", MARKED, ids=lambda dialect: dialect.name)
def test_a_turn_as_the_model_wrote_it_is_its_reasoning_its_answer_and_its_calls(dialect: Dialect) -> None:
    meant = parse_text(dialect.example, dialect, tools=OFFERED)
    [message] = sent(dialect, dialect.example)
    assert message["content"] == meant.content
    assert message.get("reasoning_content", "") == meant.reasoning
    functions = [call["function"] for call in message["tool_calls"]]
    assert [ToolCall(each["name"], each["arguments"]) for each in functions] == [
        ToolCall(call.name, call.arguments) for call in meant.tool_calls
    ]


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("{o}\nHm.\n{c}\n\nHi.", "Hm.", "Hi."),
        ("Hm.\n{c}\n\nHi.", "Hm.", "Hi."),
        ("{o}Hm.{c}Hi.\n\n{o}Yes.{c}\n\nBye.", "Hm.\n\nYes.", "Hi.\n\nBye."),
        ("{o}Hm.{c}Write `{o}`, then\n```\n{c}\n```\n", "Hm.", "Write `{o}`, then\n```\n{c}\n```\n"),
        ('{o}They say "hi"{c}Hi.', 'They say "hi"', "Hi."),
        ("{o}So ```{c}Hi there.", "So ```", "Hi there."),
        ("Write `{o}` and {c} around it.", "", "Write `{o}` and {c} around it."),
        ('The {o} marker and the "{c}" marker.', "", 'The {o} marker and the "{c}" marker.'),
    ],
)
def test_reasoning_as_the_model_wrote_it_is_no_part_of_the_answer(
    dialect: Dialect, text: str, reasoning: str, content: str
) -> None:
    [message] = sent(dialect, written(dialect, text))
    assert message["content"] == written(dialect, content)
    assert message.get("reasoning_content", "") == reasoning


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_a_marker_in_the_middle_of_a_line_is_no_part_of_a_sentence_that_does_not_go_on(
    dialect: Dialect,
) -> None:
    [message] = sent(dialect, written(dialect, "{o}Let me answer {c}Hi.\nLet me see {o}Hm.{c} Yes."))
    assert message["reasoning_content"].split() == ["Let", "me", "answer", "Hm."]
    assert message["content"].split() == ["Hi.", "Let", "me", "see", "Yes."]


@pytest.mark.parametrize("dialect", REASONING, ids=lambda dialect: dialect.name)
def test_a_reasoning_field_may_hold_the_markup_of_its_block(dialect: Dialect) -> None:
    [message] = sent(dialect, "Hi.", reasoning_content=written(dialect, "{o}\nHm.\n{c}"))
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi.")


def test_a_call_in_the_text_is_not_called_twice() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    for name in ("gemma4", "qwen-xml", "kimi-k2"):
        [message] = sent(DIALECTS[name], DIALECTS[name].example, tool_calls=[call])
        assert message["reasoning_content"] == "I need the weather."
        assert [each["id"] for each in message["tool_calls"]] == ["c1"]


def test_a_result_belongs_to_the_call_in_the_text_before_it() -> None:
    dialect = DIALECTS["kimi-k2"]
    result = {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "Sun."}
    history = sanitise(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": dialect.example}, result],
        tools=OFFERED,
        dialect=dialect,
    )
    _, called, answered = history
    [call] = called["tool_calls"]
    assert call["id"] == answered["tool_call_id"] == "functions.get_weather:0"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 3}


def test_the_markup_of_another_family_is_text() -> None:
    for own, other in (("gemma4", "apertus"), ("cohere", "kimi-k3"), ("minimax-m3", "gemma4")):
        [message] = sent(DIALECTS[own], DIALECTS[other].example)
        assert message["content"] == DIALECTS[other].example


def test_words_that_people_write_tell_nothing_until_a_block_begins_with_them() -> None:
    granite = DIALECTS["granite"]
    [message] = sent(granite, "Well. Here is my response: no.")
    assert message["content"] == "Well. Here is my response: no."
    [message] = sent(granite, "Here is my thought process: Hm. Here is my response: no.")
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("Hm.", "no.")


def test_a_call_whose_value_has_markup_and_code_is_read_whole() -> None:
    dialect = DIALECTS["qwen-xml"]
    value = "Say `</tool_call>` and\n```\n</think> <think>"
    call = (
        f"<tool_call>\n<function=search>\n<parameter=query>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    [message] = sent(dialect, f"<think>\nHm.\n</think>\n\nI look.\n{call}")
    [called] = message["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == {"query": value}
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")


def test_a_call_in_the_history_of_a_request_without_tools_is_text_to_a_model_without_a_family() -> None:
    plain = DIALECTS["plain"]
    posted = [{"role": "user", "content": "?"}, {"role": "assistant", "content": plain.example}]
    assert sanitise(posted, tools=(), dialect=plain)[-1]["content"] == plain.example
