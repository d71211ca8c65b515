"""`mlx-backend render`: the prompt that a model would get, from a model's folder or a chat template alone."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_backend.cli import main
from mlx_backend.demo import MODEL_PATH

type Run = Callable[..., tuple[int, list[dict[str, Any]]]]

QUESTION = {"role": "user", "content": "How far?"}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>
{%- endfor -%}
{{- bos_token + "" -}}
{%- if reasoning_effort not in ["low", "max"] and reasoning_effort -%}
{{- raise_exception("Unexpected reasoning effort " ~ reasoning_effort) -}}
{%- endif -%}
Effort: {{ reasoning_effort or "max" }}.
{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>{%- endif -%}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run_command(given: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8"))
        status = main(["render", *options])
        return status, [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]

    return run_command


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "chat_template.jinja"
    file.write_text(TEMPLATE)
    return file


def test_a_template_alone_shows_the_prompt_and_the_models_own_level(run: Run, template: Path) -> None:
    request = {"messages": [QUESTION], "reasoning_effort": "medium"}
    assert run(json.dumps(request), "--template", str(template)) == (
        0,
        [
            {
                "prompt": "<|im_start|>user\nHow far?<|im_end|>Effort: low.<|im_start|>assistant\n<think>",
                "template_kwargs": {"reasoning_effort": "low"},
                "effort": {"asked": "medium", "level": "low", "source": "reasoning_effort", "budget": None},
                "levels": ["none", "low", "max"],
                "default": "max",
                "dialect": "hermes-json",
            }
        ],
    )


def test_an_effort_that_nobody_states_is_null_and_comes_to_the_templates_default(
    run: Run, template: Path
) -> None:
    _, [result] = run(json.dumps([QUESTION]), "--template", str(template))
    assert result["effort"] == {"asked": None, "level": "max", "source": "default", "budget": None}
    assert "Effort: max." in result["prompt"]


def test_a_model_folder_needs_its_tokenizer_and_no_weights(run: Run, tmp_path: Path) -> None:
    for file in MODEL_PATH.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    _, [result] = run(
        json.dumps({"messages": [QUESTION], "reasoning_effort": "none"}), "--model", str(tmp_path)
    )
    assert "<|start|>user<|message|>How far?<|end|><|start|>assistant" in result["prompt"]
    assert result["effort"] == {"asked": "none", "level": "none", "source": "reasoning_effort", "budget": 0}
    assert result["dialect"] == "harmony"
    _, [result] = run(json.dumps({"messages": [QUESTION]}), "--model", f"{tmp_path}:high")
    assert (result["effort"]["asked"], result["effort"]["source"]) == ("high", "model name")


def test_markers_that_people_write_are_shown_as_they_wrote_them(run: Run, template: Path) -> None:
    written = "What is <|im_end|> good for? <thi"
    _, [result] = run(json.dumps([{"role": "user", "content": written}]), "--template", str(template))
    assert f"<|im_start|>user\n{written}<|im_end|>" in result["prompt"]


def test_each_line_may_name_its_template_and_errors_stand_in_their_places(run: Run, template: Path) -> None:
    broken = template.with_name("broken.jinja")
    broken.write_text("{% if %}")
    audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}
    named = {"template_file": str(template)}
    rows = [
        {"id": 1, **named, "messages": [QUESTION]},
        {"id": 2, "messages": [QUESTION]},
        {"id": 3, "template_file": str(broken), "messages": [QUESTION]},
        {"id": 4, "template_file": str(template.with_name("none")), "messages": [QUESTION]},
        {"id": 5, **named, "messages": [audio]},
        {"id": 6, **named, "messages": [QUESTION], "reasoning_effort": "extreme"},
        {"id": 7, **named, "messages": []},
        {"id": 8, "template_file": 8, "messages": [QUESTION]},
    ]
    status, results = run("\n".join([*map(json.dumps, rows), "no JSON"]), "--jsonl")
    assert status == 1
    assert [result.get("id") for result in results] == [1, 2, 3, 4, 5, 6, 7, 8, None]
    assert "prompt" in results[0]
    assert [result["error"]["line"] for result in results[1:]] == [2, 3, 4, 5, 6, 7, 8, 9]
    params = [result["error"].get("param") for result in results[1:]]
    assert params == [
        None,
        None,
        None,
        "messages[0].content[0]",
        "reasoning_effort",
        "messages",
        "template_file",
        None,
    ]


def test_without_a_model_or_a_template_the_command_line_is_refused(run: Run) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(json.dumps([QUESTION]))
    assert exit_.value.code == 2


def test_a_template_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    assert run(json.dumps([QUESTION]), "--template", str(tmp_path / "none"))[0] == 2


SWITCHED = """\
{%- for m in messages -%}[{{ m.role }}]{{ m.content }}{%- endfor -%}
{%- if thinking_budget -%}At most {{ thinking_budget }}.{%- endif -%}
[assistant]{%- if enable_thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
"""


@pytest.mark.parametrize(
    ("fields", "told", "end"),
    [
        ({"reasoning_effort": "low"}, {"thinking_budget": 1024}, "At most 1024.[assistant]<think>"),
        (
            {"reasoning_effort": "low", "thinking_budget": 500},
            {"thinking_budget": 500},
            "At most 500.[assistant]<think>",
        ),
        ({"reasoning_effort": "low", "thinking_budget": -1}, {}, "far?[assistant]<think>"),
        (
            {"chat_template_kwargs": {"thinking_budget": 70}},
            {"thinking_budget": 70},
            "At most 70.[assistant]<think>",
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            {},
            "far?[assistant]<think>",
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": False},
            "[assistant]<think></think>",
        ),
    ],
)
def test_the_stronger_source_and_the_budget_that_will_be_held_are_told(
    run: Run, template: Path, fields: dict[str, Any], told: dict[str, Any], end: str
) -> None:
    template.write_text(SWITCHED)
    status, [result] = run(json.dumps({"messages": [QUESTION], **fields}), "--template", str(template))
    assert status == 0
    assert result["template_kwargs"] == told
    assert result["prompt"].endswith(end)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe{{ 1 }}", "is not text in UTF-8"),
        (b"x" * 2_000_000, "more than 131,072 characters"),
        (b"{% if %}", "cannot be parsed"),
        (b"{{ 'a' * 10 ** 10 }}", "it takes too much memory"),
        (b"{{ raise_exception('Never.') }}", "Never."),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_that_says_why(
    run: Run, template: Path, content: bytes, words: str
) -> None:
    template.write_bytes(content)
    line = json.dumps({"messages": [QUESTION], "template_file": str(template)})
    status, [result] = run(line, "--jsonl")
    assert status == 1
    assert words in result["error"]["message"]


def test_only_a_file_is_read_as_a_template(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        line = json.dumps({"messages": [QUESTION], "template_file": str(path)})
        _, [result] = run(line, "--jsonl")
        assert "is not a file" in result["error"]["message"]
