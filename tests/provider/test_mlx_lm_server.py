"""The plugin against the real `mlx_lm.server` on the model that ships: another make, with fields of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user
from free_ports import free_port

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.upstream.credentials import Credentials, ServerKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daemon import PluginProcess

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "mlx_backend/demo/model"
QUESTION = "What is the capital of France?"
CLOCK = {
    "name": "current_time",
    "description": "A tool for getting the current time.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`mlx_lm.server` without any downloads."""
    port = free_port()
    home = tmp_path_factory.mktemp("downloads")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", "--model", str(MODEL), "--port", str(port)],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = f"http://127.0.0.1:{port}"
        assert any("Starting httpd" in line for line in process.stderr), "mlx_lm.server did not start"
        with urllib.request.urlopen(f"{address}/health") as answer:
            assert json.load(answer) == {"status": "ok"}
        yield address
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture
def form(server: str) -> dict[str, str]:
    return {"endpoint_url": server}


def ask(
    plugin: PluginProcess, form: dict[str, str], *messages: dict[str, Any], **more: Any
) -> list[dict[str, Any]]:
    return list(plugin.invoke(list(messages), credentials=form, **more))


def test_it_is_recognised(server: str) -> None:
    discovery.forget_servers()
    assert discovery.find_server(Credentials.from_form({"endpoint_url": server})).kind is ServerKind.MLX_LM


def test_its_credentials_are_accepted(plugin: PluginProcess, form: dict[str, str]) -> None:
    answer = list(plugin.request("validate_provider_credentials", provider="mlx", credentials=form))
    assert answer[0]["result"] is True


def test_effort_reaches_the_model_although_the_server_has_no_such_field(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    read = {
        effort: split_reasoning(
            text_of(
                ask(plugin, form, user(QUESTION), parameters={"reasoning_effort": effort, "temperature": 0.0})
            )
        )
        for effort in ("low", "medium", "high")
    }
    assert {answer for answer, _ in read.values()} == {"The capital of France is Paris."}
    assert len(read["low"][1]) < len(read["medium"][1]) < len(read["high"][1])


def test_the_second_turn_works(plugin: PluginProcess, form: dict[str, str]) -> None:
    first = text_of(ask(plugin, form, user(QUESTION), parameters={"temperature": 0.0}))
    assert "<think>" in first
    second = ask(
        plugin,
        form,
        user(QUESTION),
        assistant(first),
        user("What is the capital of Italy?"),
        parameters={"temperature": 0.0},
    )
    assert split_reasoning(text_of(second))[0] == "The capital of Italy is Rome."


def test_a_tool_loop_works(plugin: PluginProcess, form: dict[str, str]) -> None:
    greedy = {"temperature": 0.0}
    request = user("Use current_time.")
    first = ask(plugin, form, request, tools=[CLOCK], parameters=greedy)
    (call,) = calls_of(first)
    assert call["function"]["name"] == "current_time"
    second = ask(
        plugin,
        form,
        request,
        assistant(text_of(first), [call]),
        result(call, "2026-11-21 10:00:00"),
        tools=[CLOCK],
        parameters=greedy,
    )
    assert "2026-11-21 10:00:00" in split_reasoning(text_of(second))[0]


def test_a_text_before_a_call_comes_back_though_the_template_takes_one_text(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    greedy = {"temperature": 0.0}
    request = user("First say what you do, then use current_time.")
    first = ask(plugin, form, request, tools=[CLOCK], parameters=greedy)
    assert split_reasoning(text_of(first))[0] == "I will use current_time now."
    (call,) = calls_of(first)
    turns = [request, assistant(text_of(first), [call]), result(call, "2026-11-21 10:00:00")]
    second = ask(plugin, form, *turns, tools=[CLOCK], parameters=greedy)
    assert "2026-11-21 10:00:00" in split_reasoning(text_of(second))[0]


def test_a_stop_word_ends_the_answer_and_not_the_reasoning(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    """The server would look for it in the reasoning too, and end there."""
    answer, thinking = split_reasoning(text_of(ask(plugin, form, user(QUESTION), stop=["Paris", " is"])))
    assert answer == "The capital of France"
    assert "question is about" in thinking


def test_a_request_for_json_is_answered_without_a_block(plugin: PluginProcess, form: dict[str, str]) -> None:
    wanted = {"response_format": "json_object", "temperature": 0.0, "max_tokens": 200}
    chunks = ask(plugin, form, user(QUESTION), parameters=wanted)
    assert "<think>" not in text_of(chunks)
    assert chunks[-1]["delta"]["finish_reason"] in ("stop", "length")


def test_there_is_a_schema_although_the_server_lists_nothing(
    plugin: PluginProcess, form: dict[str, str]
) -> None:
    (answer,) = plugin.request(
        "get_ai_model_schemas", provider="mlx", model_type="llm", model=str(MODEL), credentials=form
    )
    described = answer["model_schema"]
    names = {rule["name"] for rule in described["parameter_rules"]}
    assert "reasoning_effort" in names
    assert not {"thinking_budget", "response_format"} & names
