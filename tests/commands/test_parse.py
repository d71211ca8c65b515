"""`mlx-backend parse`, run as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from mlx_backend.commands.json_lines import answers
from mlx_backend.commands.parse import RawOutput, answer_row, read_row
from mlx_backend.conversation.dialects.harmony import HARMONY

RAW = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
MESSAGE = {"reasoning": "Easy.", "content": "4", "tool_calls": [], "finish": "stop"}
CUT_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":'


def run(standard_input: str | bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    data = standard_input.encode() if isinstance(standard_input, str) else standard_input
    return subprocess.run(
        [sys.executable, "-m", "mlx_backend", "parse", *options],
        input=data,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        check=False,
    )


def results(*rows: object, **options: Any) -> list[dict[str, Any]]:
    lines = (json.dumps(row).encode() for row in rows)
    return list(answers(lines, read_row, partial(answer_row, defaults=RawOutput(dialect=HARMONY), **options)))


def message(**changes: object) -> dict[str, object]:
    return {"reasoning": "", "content": "", "tool_calls": [], "finish": "stop"} | changes


def test_raw_text_becomes_a_message() -> None:
    done = run(RAW)
    assert (json.loads(done.stdout), done.returncode, done.stderr) == (MESSAGE, 0, b"")


def test_text_is_utf_8_whatever_the_locale_says() -> None:
    done = run("<|channel|>final<|message|>日本 👋")
    assert done.stdout.decode("utf-8").count("日本 👋") == 1


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    assert json.loads(run(b"a\xff").stdout)["content"] == "a\ufffd"


def test_options_say_what_the_text_does_not() -> None:
    done = run(
        CUT_CALL.replace("functions.f", "functions.fjson"),
        "--tools",
        "f, g",
        "--ended-by",
        "length",
        "--chunk",
        "1",
    )
    call = {"name": "f", "arguments": '{"a":', "complete": False}
    assert json.loads(done.stdout) == message(tool_calls=[call], finish="length")
    assert json.loads(run("<think>a</think>b", "--dialect", "think").stdout) == message(
        reasoning="a", content="b"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dialect", "klingon"], "not one of harmony, "),
        (["--chunk", "0"], "--chunk"),
        (["--by", "tokens"], "--by is for --jsonl"),
        (["--jsonl", "--by", "tokens", "--chunk", "2"], "--chunk cuts text"),
        (["--tools", ","], "is empty"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], says: str) -> None:
    done = run("", *options)
    assert done.returncode == 2
    assert says in done.stderr.decode()


def test_lines_are_answered_one_by_one_and_bad_ones_named() -> None:
    lines = [
        '{"id": "a", "raw_text": "\\ud800x"}',
        "no JSON",
        "",
        json.dumps({"id": 7, "raw_text": RAW}),
        '{"id": 8}',
    ]
    done = run("\n".join(lines), "--jsonl")
    assert done.returncode == 1
    assert done.stderr == b""
    first, second, third, fourth = map(json.loads, done.stdout.splitlines())
    assert first == {"id": "a", **message(content="\ud800x")}
    assert second["error"]["line"] == 2
    assert third == {"id": 7, **MESSAGE}
    assert (fourth["id"], fourth["error"]["message"]) == (8, "raw_text is missing")


def test_tokens_are_used_where_a_line_has_them() -> None:
    row = {
        "raw_text": "<|channel|>final<|message|><|end|> it says<|return|>",
        "tokens": [200005, 17196, 200008, 27, 91, 419, 91, 29, 1, 200002],
        "token_texts": [
            "<|channel|>",
            "final",
            "<|message|>",
            "<",
            "|",
            "end",
            "|",
            ">",
            " it says",
            "<|return|>",
        ],
    }
    assert results(row) == results(row, by="tokens") == [message(content="<|end|> it says")]
    assert results(row, by="text") == results(row, chunk=3) == [message(content="it says")]


def test_tools_that_a_line_does_not_have_are_unknown_and_an_empty_list_is_none() -> None:
    call = {"name": "fjson", "arguments": "{}", "complete": True}
    row = {"raw_text": " to=functions.fjson<|message|>{}<|call|>"}
    assert (
        results(row) == results({**row, "tools": None}) == [message(tool_calls=[call], finish="tool_calls")]
    )
    assert results({**row, "tools": []}) == [message(content="{}")]


@pytest.mark.parametrize(
    "tools", [["f"], [{"name": "f"}], [{"type": "function", "function": {"name": "f", "parameters": {}}}]]
)
def test_tools_are_names_or_openais_objects(tools: object) -> None:
    call = {"name": "f", "arguments": "{}", "complete": True}
    row = {"raw_text": " to=functions.fjson<|message|>{}<|call|>", "tools": tools}
    assert results(row) == [message(tool_calls=[call], finish="tool_calls")]


@pytest.mark.parametrize(
    ("texts", "raw_text", "content"),
    [
        (["a ", "\ufffd", "\ufffd", " b"], "a 🎌 b", "a 🎌 b"),
        (["\ufffd", "\ufffd"], "日", "日"),
        (["a", "\ufffd"], "a\ufffd", "a\ufffd"),
        (["x", "\ufffd"], "something else", "x\ufffd"),
    ],
    ids=["inside", "at the end", "never whole", "raw text of another reply"],
)
def test_a_character_split_over_tokens_is_taken_from_the_raw_text(
    texts: list[str], raw_text: str, content: str
) -> None:
    row = {"raw_text": raw_text, "tokens": list(range(1, len(texts) + 1)), "token_texts": texts}
    assert results(row)[0]["content"] == content


@pytest.mark.parametrize(
    ("word", "finish"), [("length", "length"), ("max_tokens", "length"), ("eos", "stop"), (None, "stop")]
)
def test_what_ended_the_output_has_several_words(word: str | None, finish: str) -> None:
    assert results({"raw_text": "a", "ended_by": word})[0]["finish"] == finish


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([], "an object is expected, not a list"),
        ("text", "an object is expected, not a string"),
        ({"raw_text": 5}, "raw_text must be a string, not a number"),
        ({"raw_text": ["a"]}, "raw_text must be a string, not a list"),
        ({"raw_text": "a", "tools": "f"}, "tools: a list is expected, not a string"),
        ({"raw_text": "a", "tools": [{}]}, "tools[0]: a name is expected, or an object with function.name"),
        ({"raw_text": "a", "ended_by": "boredom"}, "ended_by:"),
        ({"raw_text": "a", "tokens": [1], "token_texts": []}, "there are 1 tokens but 0 token_texts"),
        ({"raw_text": "a", "tokens": [True], "token_texts": ["a"]}, "tokens: a list of integers is expected"),
        (
            {"raw_text": "a", "tokens": [1], "token_texts": [None]},
            "token_texts: a list of strings is expected",
        ),
    ],
)
def test_a_line_that_cannot_be_read_says_why(row: object, says: str) -> None:
    [result] = results(row)
    assert result["error"]["line"] == 1
    assert says in result["error"]["message"]


def test_nesting_without_end_and_bad_bytes_are_errors_too() -> None:
    deep, broken = answers([b"[" * 100_000, b'{"raw_text": "\xff"}'], read_row, dict)
    assert "not JSON" in deep["error"]["message"]
    assert "not UTF-8" in broken["error"]["message"]


def test_tokens_must_be_there_when_they_are_asked_for() -> None:
    assert "needs both" in results({"raw_text": "a"}, by="tokens")[0]["error"]["message"]
