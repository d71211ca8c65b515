"""`mlx-backend sanitise`: a line in, a line out, whatever the line holds."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history_corpus import DEMO_TEMPLATE, history_cases

from mlx_backend.cli import main

QUESTION = {"role": "user", "content": "How far?"}
ECHO = {"role": "assistant", "content": "<think>\nHm.\n</think>225"}

type Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run_command(given: str | bytes, *options: str) -> tuple[int, str, str]:
        given = given if isinstance(given, bytes) else given.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        status = main(["sanitise", *options])
        printed = capsysbinary.readouterr()
        return status, printed.out.decode("utf-8"), printed.err.decode("utf-8")

    return run_command


def test_one_request_is_answered_with_messages_and_template_arguments(run: Run) -> None:
    status, out, err = run(json.dumps({"messages": [QUESTION, ECHO, QUESTION], "reasoning_effort": "max"}))
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "messages": [QUESTION, {"role": "assistant", "content": "225"}, QUESTION],
        "template_kwargs": {"reasoning_effort": "high"},
    }


def test_a_bare_list_of_messages_is_a_request_too(run: Run) -> None:
    status, out, _ = run(json.dumps([QUESTION]))
    assert (status, json.loads(out)["messages"]) == (0, [QUESTION])


def test_an_effort_line_is_taken_out_of_the_system_prompt(run: Run) -> None:
    request = {"messages": [{"role": "system", "content": "Reasoning: high"}, QUESTION]}
    _, out, _ = run(json.dumps(request))
    assert json.loads(out) == {"messages": [QUESTION], "template_kwargs": {"reasoning_effort": "high"}}


def test_a_title_gets_the_effort_that_the_server_gives_it(run: Run) -> None:
    title = {"role": "user", "content": "Generate a concise 3-7 word title for this conversation."}
    for fields, effort in (({}, "low"), ({"reasoning_effort": "high"}, "high")):
        _, out, _ = run(json.dumps({"messages": [title], **fields}))
        assert json.loads(out)["template_kwargs"]["reasoning_effort"] == effort


def test_the_canonical_form_is_printed_on_demand(run: Run) -> None:
    _, out, _ = run(json.dumps({"messages": [QUESTION, {**ECHO, "tool_calls": []}]}), "--canonical")
    assert json.loads(out) == {
        "messages": [QUESTION, {"role": "assistant", "content": "225", "reasoning_content": "Hm."}],
        "effort": "medium",
    }


def test_another_template_may_be_named(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}",
        encoding="utf-8",
    )
    request = json.dumps({"messages": [QUESTION], "think": False})
    assert json.loads(run(request, "--template", str(template))[1])["template_kwargs"] == {
        "enable_thinking": False
    }
    assert run(request, "--template", str(DEMO_TEMPLATE))[0] == 0


def test_a_template_that_cannot_be_read_is_said_so(run: Run, tmp_path: Path) -> None:
    status, out, err = run("{}", "--template", str(tmp_path / "none.jinja"))
    assert (status, out) == (2, "")
    assert err.startswith("mlx-backend: cannot read")


def test_every_line_gets_a_line_with_its_id(run: Run) -> None:
    lines: list[Any] = [
        {"id": "a", "messages": [QUESTION]},
        {"id": 2, "messages": [{"role": "banana", "content": "x"}]},
        {"id": None, "messages": [QUESTION], "reasoning_effort": "banana"},
        {"id": "last", "messages": [ECHO]},
    ]
    status, out, err = run("\n\n".join(map(json.dumps, lines)) + "\n", "--jsonl")
    results = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (1, "")
    assert [result["id"] for result in results] == ["a", 2, None, "last"]
    assert [result.get("error", {}).get("param") for result in results] == [
        None,
        "messages[0].role",
        "reasoning_effort",
        None,
    ]
    assert "banana" in results[1]["error"]["message"]
    assert "banana" in results[2]["error"]["message"]
    assert "messages" in results[0]
    assert "messages" in results[3]


def test_the_whole_corpus_goes_through_line_by_line(run: Run) -> None:
    lines = [json.dumps({"id": case.name, **case.request}, ensure_ascii=False) for case in history_cases()]
    status, out, _ = run("\n".join(lines), "--jsonl")
    assert status == 0
    assert [json.loads(line)["id"] for line in out.splitlines()] == [case.name for case in history_cases()]


def test_line_separators_inside_a_text_do_not_cut_the_line(run: Run) -> None:
    text = "one\u2028two\u0085three\u2029four\x0cfive\x1csix"
    request = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)
    status, out, _ = run(request + "\r\n" + request, "--jsonl")
    assert status == 0
    assert [json.loads(line)["messages"][0]["content"] for line in out.strip().split("\n")] == [text, text]


@pytest.mark.parametrize("text", ["火星まで🚀", "é", "\u2028", '"\\', "\0", "\ufeff", "<|end|>"])
def test_texts_come_back_letter_by_letter(run: Run, text: str) -> None:
    request = {"messages": [{"role": "user", "content": text}]}
    for ensure_ascii in (True, False):
        _, out, _ = run(json.dumps(request, ensure_ascii=ensure_ascii))
        assert json.loads(out)["messages"][0]["content"] == text


def test_half_a_surrogate_pair_comes_back_as_it_went_in(run: Run) -> None:
    status, out, _ = run('{"messages": [{"role": "user", "content": "a\\ud83d"}]}')
    assert (status, json.loads(out)["messages"][0]["content"]) == (0, "a\ud83d")


@pytest.mark.parametrize("options", [[], ["--jsonl"]])
@pytest.mark.parametrize(
    "given",
    [
        *("{", "nonsense", '"text"', "5", "null", "true", "[]", "{}", "[1]", '{"messages": [', "[" * 100_000),
        *(
            '{"messages": 5}',
            '{"messages": "x"}',
            '{"messages": null}',
            '{"messages": {}}',
            '{"messages": [7]}',
        ),
        *('{"messages": [null]}', '{"messages": [{}]}', '{"messages": [{"role": 5}]}', "1" * 5000),
        *('{"messages": [{"role": "user", "content": "q"}], "reasoning_effort": {"a": []}}', '{"id": 1}'),
        *('{"messages": []}', "\0", '{"messages": [{"role": "user"}], "reasoning_effort": "x"}'),
    ],
    ids=lambda given: given[:30].encode("unicode_escape").decode() if isinstance(given, str) else None,
)
def test_what_is_no_request_gets_an_error_object(run: Run, given: str, options: list[str]) -> None:
    status, out, err = run(given, *options)
    assert (status, err) == (1, "")
    result = json.loads(out)
    assert isinstance(result["error"]["message"], str)
    assert len(result["error"]["message"]) < 400


def test_nothing_to_read_is_an_error_but_no_lines_are_no_error(run: Run) -> None:
    assert run("")[0] == 1
    assert run("", "--jsonl") == (0, "", "")


def test_a_byte_order_mark_is_no_part_of_the_request(run: Run) -> None:
    assert run("\ufeff" + json.dumps({"messages": [QUESTION]}))[0] == 0


def test_bytes_that_are_no_text_are_replaced(run: Run) -> None:
    status, out, _ = run(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    assert (status, json.loads(out)["messages"][0]["content"]) == (0, "\ufffd")


@pytest.mark.parametrize(
    "odd",
    [
        *({"tools": 5}, {"tools": "x"}, {"tools": [5]}, {"tools": [{"function": 5}]}, {"tools": {"a": 1}}),
        *({"tools": None}, {"tools": [{"type": "function", "function": {"name": ["far"]}}]}),
        *({"reasoning": {}}, {"chat_template_kwargs": 5}, {"thinking": {"type": 5}}, {"model": 5}),
    ],
    ids=str,
)
def test_odd_fields_beside_the_messages_do_no_harm(run: Run, odd: dict[str, Any]) -> None:
    status, out, _ = run(json.dumps({"messages": [QUESTION], **odd}))
    assert (status, json.loads(out)["messages"]) == (0, [QUESTION])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
@pytest.mark.parametrize(
    "content", [5, True, {}, {"a": 1}, [[]], [5], [{"type": 5}], [{"text": 5}], 1.5], ids=str
)
def test_odd_contents_become_text(run: Run, role: str, content: Any) -> None:
    status, out, _ = run(json.dumps({"messages": [QUESTION, {"role": role, "content": content}, QUESTION]}))
    assert status == 0
    for message in json.loads(out)["messages"]:
        if message["role"] != "tool":  # a tool's result may be data: the template prints it as JSON
            assert isinstance(message["content"], str)


def test_a_deeply_nested_request_is_answered(run: Run) -> None:
    deep = "[" * 900 + "]" * 900
    for place in (
        '"content": %s',
        '"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]',
    ):
        message = place % deep
        status, out, _ = run(f'{{"messages": [{{"role": "assistant", {message}}}, {json.dumps(QUESTION)}]}}')
        assert status in (0, 1)
        json.loads(out)
