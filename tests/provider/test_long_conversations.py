"""Conversations longer than the context, with the real server on the model that ships: they go on.

The server is started with a small context, so that forty turns outgrow it several times.
"""

from __future__ import annotations

import base64
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import LOADED, listening
from daemon import PluginError
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from daemon import PluginProcess

CONTEXT = 1024
ROOM = CONTEXT - CONTEXT // 4
"""Tokens for a prompt: a quarter of the context is kept for the answer."""

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Germany": "Berlin"}
INSTRUCTIONS = {"role": "system", "content": "You are a helpful assistant. Answer with one sentence."}
CURRENT_TIME = {
    "name": "current_time",
    "description": "A tool for getting the current time.",
    "parameters": {"type": "object", "properties": {}},
}
LOW = {"reasoning_effort": "low"}
SERVER = [sys.executable, "-m", "mlx_backend", "--port", "0", "--context-length", str(CONTEXT)]


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """`mlx-backend` with a context of 1024 tokens."""
    with listening(SERVER, ready=LOADED) as address:
        yield address


@pytest.fixture
def small(small_server: str) -> dict[str, str]:
    """The form for it."""
    return {"endpoint_url": small_server, "api_key": ""}


def question(turn: int) -> dict[str, Any]:
    return user(f"What is the capital of {list(CAPITALS)[turn % len(CAPITALS)]}?")


def capital(turn: int) -> str:
    return list(CAPITALS.values())[turn % len(CAPITALS)]


def turns(count: int) -> list[dict[str, Any]]:
    """A history of that many turns, with the thinking blocks that Dify sends back."""
    thought = "<think>\nThe capital I learned for it is this one.\n</think>"
    return [
        message
        for turn in range(count)
        for message in (question(turn), assistant(f"{thought}The capital is {capital(turn)}."))
    ]


def answer_of(
    plugin: PluginProcess, form: dict[str, str], messages: list[dict[str, Any]], **more: Any
) -> Any:
    return list(plugin.invoke(messages, credentials=form, **{"parameters": LOW, **more}))


def usage_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    usage: dict[str, Any] = chunks[-1]["delta"]["usage"]
    return usage


def refusal(plugin: PluginProcess, form: dict[str, str], messages: list[dict[str, Any]], **more: Any) -> str:
    with pytest.raises(PluginError) as caught:
        answer_of(plugin, form, messages, **more)
    assert caught.value.kind == "InvokeBadRequestError"
    return caught.value.message


def logged(plugin: PluginProcess) -> list[dict[str, int]]:
    """The numbers in each line of the log on a conversation that was shortened."""
    sentence = re.compile(
        r"no longer fits the context of (?P<context>\d+) tokens with room for an answer: the oldest (?P<left_out>\d+) "
        r"of its (?P<turns>\d+) turns were left out, and about (?P<after>\d+) of about (?P<before>\d+) tokens were sent"
    )
    found = (sentence.search(line) for line in plugin.logs)
    return [{name: int(number) for name, number in match.groupdict().items()} for match in found if match]


def test_a_conversation_of_forty_turns_goes_on_in_steps_that_keep_the_prefix_cache(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    earlier_lines = len(logged(plugin))
    history = [INSTRUCTIONS]
    with listening(SERVER, ready=LOADED, log=log) as address:
        for turn in range(40):
            history.append(question(turn))
            chunks = answer_of(plugin, {"endpoint_url": address}, history)
            assert capital(turn) in split_reasoning(text_of(chunks))[0]
            history.append(assistant(text_of(chunks)))
    lines = logged(plugin)[earlier_lines:]
    left_out = [0] * (40 - len(lines)) + [line["left_out"] for line in lines]
    assert all(line["after"] <= ROOM < line["before"] for line in lines)
    assert [line["turns"] for line in lines] == list(range(41 - len(lines), 41))
    assert left_out == sorted(left_out)
    assert 2 <= len(set(left_out)) <= 5
    served = [
        (int(prompt), int(cached))
        for prompt, cached in re.findall(r"prompt=(\d+) cached=(\d+) ", log.read_text(encoding="utf-8"))
    ]
    assert len(served) == 40
    for turn in range(1, 40):
        prompt, cached = served[turn]
        assert prompt <= ROOM
        if left_out[turn] == left_out[turn - 1]:
            # All but what is new: the last answer, without its thinking, and the question.
            assert cached > served[turn - 1][0] - 20, f"turn {turn}"


def test_an_answer_in_one_piece_is_shortened_too(plugin: PluginProcess, small: dict[str, str]) -> None:
    (whole,) = answer_of(plugin, small, [INSTRUCTIONS, *turns(60), question(0)], stream=False)
    assert split_reasoning(whole["delta"]["message"]["content"])[0] == "The capital of France is Paris."
    assert whole["delta"]["usage"]["prompt_tokens"] <= ROOM


def test_a_short_conversation_is_neither_counted_nor_logged(
    plugin: PluginProcess, small: dict[str, str]
) -> None:
    before = len(plugin.logs)
    chunks = answer_of(plugin, small, [INSTRUCTIONS, *turns(3), question(0)])
    assert "Paris" in text_of(chunks)
    assert plugin.logs[before:] == []


def test_max_tokens_below_a_quarter_of_the_context_leave_more_room_for_the_history(
    plugin: PluginProcess, small: dict[str, str]
) -> None:
    before = len(logged(plugin))
    answer_of(plugin, small, [*turns(60), question(0)], parameters={**LOW, "max_tokens": 40})
    (line,) = logged(plugin)[before:]
    assert ROOM * 3 // 4 < line["after"] <= CONTEXT - 40


def test_the_last_question_keeps_its_tool_rounds_and_older_rounds_go_with_their_turn(
    plugin: PluginProcess, small: dict[str, str]
) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "current_time", "arguments": "{}"}}

    history = [INSTRUCTIONS]
    for turn in range(30):
        old = call(f"old-{turn}")
        history += [
            user("Use current_time."),
            assistant("<think>\nI need the tool.\n</think>", [old]),
            result(old, f"2026-11-21 10:00:{turn:02}"),
            assistant(f"The tool says: 2026-11-21 10:00:{turn:02}"),
        ]
    history.append(user("Use current_time."))
    first = answer_of(plugin, small, history, tools=[CURRENT_TIME])
    (now,) = calls_of(first)
    history += [assistant(text_of(first), [now]), result(now, "2027-01-02 03:04:05")]
    second = answer_of(plugin, small, history, tools=[CURRENT_TIME])
    assert "2027-01-02 03:04:05" in split_reasoning(text_of(second))[0]
    assert usage_of(second)["prompt_tokens"] <= ROOM


def test_refuse_is_an_error_that_says_what_to_do(plugin: PluginProcess, small: dict[str, str]) -> None:
    settings = {**LOW, "long_conversations": "refuse"}
    message = refusal(plugin, small, [INSTRUCTIONS, *turns(60), question(0)], parameters=settings)
    assert re.search(r"The prompt has \d{4} tokens; the context holds 1024", message)
    assert "Start a new conversation, or set Long conversations to shorten" in message


LONG = "What is the capital of France? " * 200
NUMBERS = re.compile(
    r"prompt has (\d+) tokens; the context holds 1024.* ha(?:s|ve) (\d+) tokens, and there is room for (\d+)\."
)


@pytest.mark.parametrize(
    ("messages", "more", "part"),
    [
        ([*turns(5), user(LONG)], {}, "The last question has"),
        (
            [{"role": "system", "content": LONG}, *turns(5), question(0)],
            {},
            "instructions, retrieved knowledge",
        ),
        (
            [question(0)],
            {"tools": [{**CURRENT_TIME, "name": f"tool_{n}"} for n in range(80)]},
            "The descriptions of the 80 tools have",
        ),
        (
            [
                *turns(5),
                user("Use current_time."),
                assistant(
                    "", [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]
                ),
                result({"id": "a", "function": {"name": "clock"}}, LONG),
            ],
            {"tools": [CURRENT_TIME]},
            "The result of the tool clock has",
        ),
        (
            [
                *turns(5),
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "data": "What does this say?"},
                        {
                            "type": "document",
                            "format": "txt",
                            "mime_type": "text/plain",
                            "filename": "notes.txt",
                            "base64_data": base64.b64encode(LONG.encode()).decode(),
                        },
                    ],
                },
            ],
            {},
            "The file notes.txt has",
        ),
    ],
    ids=["question", "instructions", "tools", "tool result", "file"],
)
def test_what_is_too_long_by_itself_is_named_with_its_tokens_and_the_room_there_is(
    plugin: PluginProcess,
    small: dict[str, str],
    messages: list[dict[str, Any]],
    more: dict[str, Any],
    part: str,
) -> None:
    message = refusal(plugin, small, messages, **more)
    assert part in message
    found = NUMBERS.search(message)
    assert found is not None, message
    whole, size, room = map(int, found.groups())
    assert 0 < room < size < whole
    assert whole - size + room == ROOM


def test_a_question_that_just_fits_is_answered_without_its_history(
    plugin: PluginProcess, small: dict[str, str]
) -> None:
    words = "word " * 800
    chunks = answer_of(plugin, small, [*turns(20), user(f"{words} What is the capital of France?")])
    assert ROOM < usage_of(chunks)["prompt_tokens"] < CONTEXT
