"""An agent with tools over three rounds and a second turn, on models of two families: plugin and server as processes.

What is compared is the prompt: all that the model is told.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import GEMMA_3, GEMMA_3_MARKERS, QWEN_XML_MARKERS, qwen_xml
from conftest import listening
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daemon import PluginProcess

WEATHER = {
    "name": "get-weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name."},
            "days": {"type": "integer"},
            "zip": {"type": "string"},
        },
        "required": ["city"],
    },
}
ROUNDS = ({"city": "Paris", "days": 3, "zip": "01234"}, {"city": "Rome", "days": 1, "zip": "00118"})
RESULTS = ('{"sky": "sunny"}', "warm & <dry>")
QUESTION, ANSWER, THANKS = "Weather in Paris and Rome?", "Paris is sunny, Rome is warm.", "Thank you!"
REASONING = ("I need Paris.", "Now Rome.", "I have both.")


def agent(
    plugin: PluginProcess, folder: Path, template: str, markers: Sequence[str], replies: Sequence[str]
) -> tuple[list[str], list[list[dict[str, Any]]]]:
    """Go through two turns as Dify's agent does; return the model's prompts, and the chunks of every answer."""
    specification, prompts = folder / "model.json", folder / "prompts.jsonl"
    specification.write_text(json.dumps({"template": template, "markers": markers, "replies": replies}))
    server = [
        sys.executable,
        str(Path(__file__).parent / "family_server.py"),
        str(specification),
        str(prompts),
    ]
    history: list[dict[str, Any]] = [user(QUESTION)]
    answers: list[list[dict[str, Any]]] = []
    with listening(server) as address:
        for at in range(4):
            chunks = list(
                plugin.invoke(history, credentials={"endpoint_url": f"{address}/v1"}, tools=[WEATHER])
            )
            answers.append(chunks)
            calls = calls_of(chunks)
            history.append(assistant(text_of(chunks), calls))
            history += [result(call, RESULTS[at]) for call in calls]
            if not calls:
                history.append(user(THANKS))
    return [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()], answers


def called(answers: list[list[dict[str, Any]]]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for chunks in answers
        for call in calls_of(chunks)
    ]


def check_order(prompt: str, *texts: str) -> None:
    """Assert that a prompt holds these texts, each once after the one before."""
    at = prompt.index(QUESTION)
    for text in texts:
        found = prompt.find(text, at)
        assert found >= 0, f"{text!r} is missing, or not in its place, in {prompt[at:]!r}"
        at = found + len(text)


# -- Qwen's XML -----------------------------------------------------------------------------------


def xml(arguments: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=get-weather>\n{parameters}</function>\n</tool_call>"


QWEN_REPLIES = [
    *(
        f"{reasoning}\n</think>\n\n{xml(arguments)}<|im_end|>"
        for reasoning, arguments in zip(REASONING[:2], ROUNDS, strict=True)
    ),
    f"{REASONING[2]}\n</think>\n\n{ANSWER}<|im_end|>",
    "Polite.\n</think>\n\nYou are welcome.<|im_end|>",
]


@pytest.mark.parametrize("keeps", ["true", "loop.index0 > last.user"], ids=["all", "the loop's"])
def test_a_qwen_agent_sees_its_own_calls_and_the_reasoning_that_its_template_keeps(
    plugin: PluginProcess, tmp_path: Path, keeps: str
) -> None:
    prompts, answers = agent(plugin, tmp_path, qwen_xml(keeps), QWEN_XML_MARKERS, QWEN_REPLIES)
    assert called(answers) == [("get-weather", arguments) for arguments in ROUNDS]
    assert split_reasoning(text_of(answers[2])) == (ANSWER, REASONING[2])

    thinking = [f"<think>\n{text}\n</think>" for text in REASONING]
    rounds = [
        (thinking[at], xml(ROUNDS[at]), f"<tool_response>\n{RESULTS[at]}\n</tool_response>") for at in (0, 1)
    ]
    check_order(prompts[1], *rounds[0], "<|im_start|>assistant\n<think>\n")
    check_order(prompts[2], *rounds[0], *rounds[1], "<|im_start|>assistant\n<think>\n")

    if keeps == "true":
        check_order(prompts[3], *rounds[0], *rounds[1], thinking[2], ANSWER, THANKS)
        assert prompts[3].startswith(prompts[2]), "the cache holds all of it"
    else:
        check_order(prompts[3], *rounds[0][1:], *rounds[1][1:], ANSWER, THANKS)
        assert not any(text in prompts[3] for text in REASONING)
    assert text_of(answers[3]).endswith("You are welcome.")


# -- Gemma 3 --------------------------------------------------------------------------------------


def python(arguments: dict[str, Any]) -> str:
    words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"```tool_code\nget_weather({words})\n```"


GEMMA_REPLIES = [
    f"Paris first.\n{python(ROUNDS[0])}<end_of_turn>",
    f"{python(ROUNDS[1])}<end_of_turn>",
    f"{ANSWER}<end_of_turn>",
    "You are welcome.<end_of_turn>",
]


def test_a_gemma_3_agent_is_told_python_and_sees_what_it_wrote(plugin: PluginProcess, tmp_path: Path) -> None:
    prompts, answers = agent(plugin, tmp_path, GEMMA_3, GEMMA_3_MARKERS, GEMMA_REPLIES)
    assert called(answers) == [("get-weather", arguments) for arguments in ROUNDS]
    assert text_of(answers[0]).strip() == "Paris first."
    assert text_of(answers[2]).strip() == ANSWER

    told = "def get_weather(city: str, days: int = None, zip: str = None) -> Any:"
    for prompt in prompts:
        assert prompt.index(told) < prompt.index("Get the weather of a city.") < prompt.index(QUESTION)
    rounds = [
        (f"{python(ROUNDS[at])}<end_of_turn>", f"```tool_output\n{RESULTS[at]}\n```<end_of_turn>")
        for at in (0, 1)
    ]
    check_order(prompts[1], GEMMA_REPLIES[0], rounds[0][1])
    check_order(prompts[2], GEMMA_REPLIES[0], rounds[0][1], *rounds[1])
    check_order(prompts[3], GEMMA_REPLIES[0], rounds[0][1], *rounds[1], ANSWER, THANKS)
    assert all(later.startswith(earlier) for earlier, later in pairwise(prompts)), "the cache holds all of it"
