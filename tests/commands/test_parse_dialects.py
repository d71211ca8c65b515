"""`mlx-backend parse` knows every family: by name, by alias, with schemas, and in lines that mix them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.commands.json_lines import answers
from mlx_backend.commands.parse import RawOutput, answer_row, read_row
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.harmony import HARMONY

if TYPE_CHECKING:
    from pathlib import Path

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
    lines = (json.dumps(row).encode() for row in rows)
    return list(answers(lines, read_row, partial(answer_row, defaults=RawOutput(dialect=HARMONY), **options)))


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


@pytest.mark.parametrize("name", ["qwen3_coder", "Qwen-XML", "GLM47", "kimi_k2", "deepseek_v31", "gpt-oss"])
def test_other_spellings_of_a_name_are_understood(name: str) -> None:
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
        {"dialect": "hermes-json", "raw_text": "<think>a</think>b", "opens_in": "answer"},
        {"raw_text": "<|channel|>final<|message|>a", "ended_by": "length"},
    )
    assert typed["reasoning"] == "hm"
    assert typed["tool_calls"] == [{"name": "get_weather", "arguments": '{"days": 3}', "complete": True}]
    assert untyped["tool_calls"] == [{"name": "get_weather", "arguments": '{"days": "3"}', "complete": True}]
    assert (answer["reasoning"], answer["content"]) == ("a", "b")
    assert (cut["content"], cut["finish"]) == ("a", "length")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"dialect": "klingon"}, "dialect: 'klingon' is not one of harmony, "),
        ({"dialect": "qwen-xlm"}, "; did you mean qwen-xml?"),
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


PLANS = {
    "start_anchor": "<|bot|>",
    "fields": {
        "thinking": {"open": "<|plan|>", "close": "<|/plan|>"},
        "tool_calls": {
            "open_pattern": r"<\|use\|>(?P<name>\w+) ",
            "close": "<|/use|>",
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
PLANNED = "<|plan|>Look.<|/plan|>I look.<|use|>get_weather days: 3<|/use|>"
MEANT = {
    "reasoning": "Look.",
    "content": "I look.",
    "tool_calls": [{"name": "get_weather", "arguments": '{"days": 3}', "complete": True}],
    "finish": "tool_calls",
}


def test_a_line_may_bring_the_response_template_of_its_model() -> None:
    row = {"raw_text": PLANNED, "response_template": PLANS, "tools": [WEATHER]}
    read, twice, broken = results(row, {**row, "dialect": "glm"}, {**row, "response_template": {"fields": 1}})
    assert read == MEANT
    assert "one of them is expected" in twice["error"]["message"]
    assert "response_template.fields must be" in broken["error"]["message"]


def test_a_models_folder_tells_how_it_writes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages }}<|bot|>", "response_template": PLANS})
    )
    row = json.dumps({"raw_text": PLANNED, "tools": [WEATHER]})
    assert json.loads(run(row, "--jsonl", "--model", str(tmp_path))) == MEANT
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "<arg_key> <arg_value>"}')
    assert json.loads(run(DIALECTS["glm"].example, "--model", str(tmp_path)))["reasoning"]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--model", "no/such/folder"], 1, b"There is no model 'no/such/folder' here"),
        (["--model", ".", "--dialect", "glm"], 2, b"--model finds the dialect"),
    ],
)
def test_a_folder_that_tells_nothing_is_said_so(options: list[str], status: int, said: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_backend", "parse", *options], input=b"", capture_output=True, check=False
    )
    assert done.returncode == status
    assert said in done.stderr
