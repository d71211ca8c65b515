"""`mlx-backend parse` knows every family: by name, by alias, with schemas, and in lines that mix them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from mlx_backend.commands.parse import parse_lines
from mlx_backend.conversation.dialects import DIALECTS

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
    },
}
NAMES = [
    "harmony",
    "hermes-json",
    "qwen-xml",
    "glm",
    "gemma4",
    "gemma3-tool_code",
    "mistral",
    "llama3-json",
    "llama-pythonic",
    "deepseek-v3",
    "deepseek-v3.1",
    "dsml",
    "kimi-k2",
    "kimi-k3",
    "minimax-m2",
    "minimax-m3",
    "lfm2",
    "hunyuan",
    "seed-oss",
    "nemotron",
    "granite",
    "olmo",
    "apertus",
    "cohere",
    "step",
    "ling",
    "longcat",
    "laguna",
    "mimo",
    "plain",
]


def run(standard_input: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_backend", "parse", *options],
        input=standard_input.encode(),
        capture_output=True,
        check=True,
    )
    return done.stdout.decode()


def results(*rows: object, **options: Any) -> list[dict[str, Any]]:
    return list(parse_lines((json.dumps(row).encode() for row in rows), **options))


def test_every_dialect_is_listed_with_an_example_that_it_reads() -> None:
    listed = run("", "--list", "--jsonl")
    rows = [json.loads(line) for line in listed.splitlines()]
    assert [row["dialect"] for row in rows] == list(DIALECTS)
    messages = [json.loads(line) for line in run(listed, "--jsonl").splitlines()]
    for row, message in zip(rows, messages, strict=True):
        assert [call["name"] for call in message["tool_calls"]] == ["get_weather"] * (
            row["dialect"] != "plain"
        )


def test_people_see_names_aliases_and_examples() -> None:
    listed = run("", "--list")
    assert "qwen-xml (qwen3-coder, " in listed
    assert "\n    <function=get_weather>\n" in listed


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_name_that_people_know(name: str) -> None:
    assert name in list(DIALECTS)


@pytest.mark.parametrize(
    "name", ["think", "qwen3-coder", "glm-4.5", "qwen3.5", "deepseek-r1", "deepseek-v4", "kimi"]
)
def test_a_family_is_found_by_its_models(name: str) -> None:
    [row] = results({"raw_text": DIALECTS[name].example, "dialect": name})
    assert [call["name"] for call in row["tool_calls"]] == ["get_weather"]


def test_lines_have_their_own_dialect_tools_and_beginning() -> None:
    call = "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    typed, untyped, answer, cut = results(
        {"dialect": "glm", "raw_text": f"hm</think>{call}", "opens_in": "reasoning", "tools": [WEATHER]},
        {
            "dialect": "qwen-xml",
            "raw_text": "<function=get_weather><parameter=days>3</parameter></function>",
            "tools": ["get_weather"],
        },
        {"dialect": "hermes-json", "raw_text": "<think>a</think>", "opens_in": "answer"},
        {"raw_text": "<|channel|>final<|message|>a", "ended_by": "length"},
    )
    assert typed["reasoning"] == "hm"
    assert typed["tool_calls"] == [{"name": "get_weather", "arguments": '{"days": 3}'}]
    assert untyped["tool_calls"] == [{"name": "get_weather", "arguments": '{"days": "3"}'}]
    assert answer["content"] == "<think>a</think>"
    assert (cut["content"], cut["finish"]) == ("a", "length")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"dialect": "klingon"}, "dialect: 'klingon' is not one of harmony, "),
        ({"dialect": 3}, "dialect: a name is expected, not a number"),
        ({"opens_in": "middle"}, 'opens_in: "reasoning" or "answer" is expected'),
        ({"tools": [{"function": {}}]}, "tools[0]: a name is expected"),
    ],
)
def test_a_line_that_cannot_be_is_named(row: dict[str, Any], says: str) -> None:
    [result] = results({"raw_text": "x", **row})
    assert says in result["error"]["message"]


def test_an_option_says_what_the_prompt_has_opened() -> None:
    message = json.loads(run("hm</think>Hi", "--dialect", "qwen3.5", "--opens-in", "reasoning"))
    assert (message["reasoning"], message["content"]) == ("hm", "Hi")
