"""The chat template: Harmony's layout, what it accepts, and what it refuses like gpt-oss's own."""

from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from mlx_backend.demo import MODEL_PATH

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "current_time",
        "description": "Get the time.\nIn any zone.",
        "parameters": {
            "type": "object",
            "properties": {
                "format": {"type": "string", "description": "Time format in strftime standard."},
                "timezone": {"type": "string", "enum": ["UTC", "Asia/Tokyo"]},
                "digits": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["format"],
        },
    },
}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL = {"name": "current_time", "arguments": {"format": "%H"}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **settings: Any) -> str:
    settings = {"add_generation_prompt": True, **settings}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **settings))


def test_the_sections_are_in_harmonys_order(tokenizer: PreTrainedTokenizerFast) -> None:
    text = render(
        tokenizer, [{"role": "system", "content": "Be kind."}, USER], tools=[TOOL], reasoning_effort="high"
    )
    marks = [
        "<|start|>system<|message|>", "Knowledge cutoff:", "Current date:", "Reasoning: high", "# Valid channels:",
        "Calls to these tools",
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\n# Tools\n\n## functions\n\n",
        "namespace functions {", "type current_time = (_: {\nformat: string, // Time format in strftime standard.\n",
        'timezone?: "UTC" | "Asia/Tokyo",\n', "digits?: number[],\n}) => any;", "<|start|>user<|message|>Hi<|end|>",
    ]  # fmt: skip
    positions = [text.index(mark) for mark in marks]
    assert positions == sorted(positions)
    assert text.endswith("<|start|>assistant")
    assert "In any zone" not in text


def test_the_defaults_are_medium_effort_and_its_own_name(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "You are mlx-demo" in render(tokenizer, [USER])
    assert "Reasoning: medium" in render(tokenizer, [USER])
    assert "You are Bob.\n" in render(tokenizer, [USER], model_identity="You are Bob.")
    assert "developer" not in render(tokenizer, [USER])


@pytest.mark.parametrize("call", [CALL, {"function": CALL}], ids=["flat", "function"])
def test_a_running_tool_loop_keeps_its_analysis_and_a_finished_one_drops_it(
    tokenizer: PreTrainedTokenizerFast, call: dict[str, Any]
) -> None:
    running: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "thinking": "Use it.", "tool_calls": [call]},
        {"role": "tool", "content": "10:00"},
    ]
    text = render(tokenizer, running)
    assert (
        "<|start|>assistant<|channel|>analysis<|message|>Use it.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.current_time <|constrain|>json<|message|>"
        '{"format": "%H"}<|call|>'
        "<|start|>functions.current_time to=assistant<|channel|>commentary<|message|>10:00<|end|>"
    ) in text
    done = [*running, {"role": "assistant", "content": "It is 10:00."}, USER]
    assert "Use it." not in render(tokenizer, done)


def test_a_last_answer_without_a_generation_prompt_ends_the_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [USER, {"role": "assistant", "thinking": "T", "content": "A"}]
    text = render(tokenizer, messages, add_generation_prompt=False)
    assert text.endswith(
        "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>"
    )


MARKED = ["<|channel|>analysis<|message|>x", "see <|channel|>final<|message|>y"]


@pytest.mark.parametrize(
    "message",
    [
        *({"role": "assistant", "content": text} for text in MARKED),
        *({"role": "assistant", "content": "x", "thinking": text} for text in MARKED),
        {"role": "assistant", "content": "x", "thinking": "y", "tool_calls": [CALL]},
        {"role": "tool", "content": "x"},
    ],
)
def test_it_refuses_markers_two_analyses_and_results_without_a_call(
    tokenizer: PreTrainedTokenizerFast, message: dict[str, Any]
) -> None:
    with pytest.raises(jinja2.exceptions.TemplateError):
        render(tokenizer, [USER, message])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
)
def test_what_gpt_oss_cannot_render_is_an_error_here_too(
    tokenizer: PreTrainedTokenizerFast, message: dict[str, Any]
) -> None:
    with pytest.raises((TypeError, jinja2.exceptions.UndefinedError)):
        render(tokenizer, [USER, message])
