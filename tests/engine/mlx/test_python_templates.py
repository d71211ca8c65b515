"""Models whose chat template is a Python function of mlx-lm's: a stand-in tells what it takes, the function renders."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from families.tiny_models import write_family

from mlx_backend.chat.request import ChatRequest, ToolChoice
from mlx_backend.chat.service import Service
from mlx_backend.engine.mlx import load_engine
from mlx_backend.models import files, templates
from mlx_backend.models.templates import STAND_INS, stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "How warm is it?"}
CALL = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "They ask for the weather.",
    "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a1", "content": "Cold."}
ANSWER = {"role": "assistant", "content": "It is cold.", "reasoning_content": "It said so."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
HISTORIES: list[list[dict[str, Any]]] = [
    [QUESTION],
    [SYSTEM, QUESTION, CALL, RESULT],
    [SYSTEM, QUESTION, CALL, RESULT, ANSWER, {"role": "user", "content": "And now?"}],
    [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}],
]
TEXTS = [
    "Be brief.",
    "How warm is it?",
    "They ask",
    "I look.",
    "Oslo",
    "Cold.",
    "It said so.",
    "It is cold.",
    "And now?",
]


def places(prompt: str) -> list[str]:
    """The texts that a prompt has, in its order."""
    return sorted((text for text in TEXTS if text in prompt), key=prompt.index)


@pytest.mark.parametrize("history", HISTORIES, ids=range(len(HISTORIES)))
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_keeps_drops_and_opens_what_the_function_does(
    name: str, thinking: bool | None, history: list[dict[str, Any]]
) -> None:
    function = importlib.import_module(f"mlx_lm.chat_templates.{name}").apply_chat_template
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    theirs = function([dict(message) for message in history], add_generation_prompt=True, **arguments)
    ours = templates.render(STAND_INS[name], history, arguments)
    assert places(ours) == places(theirs)
    assert ours.rpartition(">")[0].rpartition("<")[2] == theirs.rpartition(">")[0].rpartition("<")[2]
    assert ours.count("<think>") == theirs.count("<think>")
    assert ours.count("</think>") == theirs.count("</think>")


def test_of_a_function_without_a_stand_in_nothing_is_said() -> None:
    assert stand_in("muse_spark") is stand_in(None) is stand_in(["deepseek_v32"]) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_family(tmp_path_factory.mktemp("models") / "tiny", "dsml")
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template_type": "deepseek_v32"})
    )
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with load_engine(folder, model_id="tiny") as engine:
        yield Service(engine)


def prompt(service: Service, messages: list[dict[str, Any]], **fields: Any) -> str:
    request = ChatRequest(messages=messages, tools=TOOLS, fields=fields)
    return service.engine.tokenizer.decode(service.prompt(request).tokens)


def test_it_is_listed_as_what_it_is_when_it_is_loaded(folder: Path, service: Service) -> None:
    assert files.chat_template(folder) == service.engine.tokenizer.chat_template
    description = service.description()
    assert {"tools", "tool_choice", "thinking"} <= set(description.capabilities)
    assert [effort.value for effort in description.efforts] == ["none", "low", "medium", "high"]


@pytest.mark.parametrize(("effort", "opened"), [("none", "</think>"), ("high", "<think>"), (None, "<think>")])
def test_the_functions_prompt_follows_the_effort_and_tells_the_tools(
    service: Service, effort: str | None, opened: str
) -> None:
    text = prompt(service, [QUESTION], **({} if effort is None else {"reasoning_effort": effort}))
    assert text.endswith(f"<｜Assistant｜>{opened}")
    assert '"name": "weather"' in text
    assert "<｜DSML｜function_calls>" in text  # the function explains the format, the stand-in does not


def test_calls_results_and_reasoning_reach_the_model(service: Service) -> None:
    text = prompt(service, [QUESTION, CALL, RESULT], reasoning_effort="high")
    assert places(text[text.rindex("How warm") :]) == [
        "How warm is it?",
        "They ask",
        "I look.",
        "Oslo",
        "Cold.",
    ]
    assert text.endswith("<think>")


def test_a_required_call_is_written(service: Service) -> None:
    request = ChatRequest(
        messages=[QUESTION],
        tools=TOOLS,
        fields={"reasoning_effort": "none"},
        tool_choice=ToolChoice(name="weather"),
        max_tokens=200,
    )
    assert "name='weather'" in str(list(service.chat(request).events()))
