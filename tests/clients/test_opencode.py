"""Tasks of OpenCode over each of the three APIs that it speaks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import Transcript

from clients import mcp_lookup
from clients.scripted_models import FAMILIES, MODEL, Call, average_share

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clients.client_process import Finished, Sandbox
    from clients.scripted_models import ModelFamily, ScriptedServer

pytestmark = pytest.mark.client("opencode")

WIRES = {
    "@ai-sdk/openai-compatible": "/v1/chat/completions",
    "@ai-sdk/openai": "/v1/responses",
    "@ai-sdk/anthropic": "/v1/messages",
}
GOAL = 0.990
"""The share of an agent's prompts that the server should have."""
MIN_SHARE = 0.97
"""And that of each of them."""
TEXT = "one\ntwo\nthree\n"


def opencode(
    sandbox: Sandbox, server: ScriptedServer, wire: str, *arguments: str, fails: bool = False
) -> Finished:
    """Run a task with an OpenCode that knows this server, and an MCP server."""
    limits = {"context": 200_000, "output": 32_000}
    model = {"name": "Scripted", "reasoning": True, "tool_call": True, "limit": limits}
    configuration: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {
            "local": {
                "npm": wire,
                "options": {"baseURL": f"{server.url}/v1", "apiKey": "unused"},
                "models": {MODEL: model},
            }
        },
        "mcp": {"demo": {"type": "local", "command": [sys.executable, mcp_lookup.__file__]}},
    }
    (sandbox.workspace / "opencode.json").write_text(json.dumps(configuration))
    return sandbox.run_client("opencode", "run", "--model", f"local/{MODEL}", *arguments, fails=fails)


def task(family: ModelFamily, notes: Path) -> list[str]:
    """Read, edit and run, then ask the MCP server and answer."""
    read = Call("read", {"filePath": str(notes)})
    edit = Call("edit", {"filePath": str(notes), "oldString": "two", "newString": "2"})
    count = Call("bash", {"command": "wc -l notes.txt", "description": "Counts the lines"})
    return [
        family.calls(read, thinking="I have to see the file first."),
        family.calls(edit, thinking="The second line says “two”."),
        family.calls(count),
        family.calls(Call("demo_lookup", {"key": "tower"}), thinking="And now the tower."),
        family.says("The file has 3 lines, and the second is 2.", thinking="All is done."),
    ]


@pytest.fixture
def notes(sandbox: Sandbox) -> Path:
    """A file of three lines in the workspace."""
    file = sandbox.workspace / "notes.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wire", WIRES)
def test_a_task_reads_edits_runs_and_asks_an_mcp_server(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, notes: Path, wire: str, family: str
) -> None:
    scripted = server(task(FAMILIES[family], notes), family)
    finished = opencode(sandbox, scripted, wire, "Replace two by 2 in notes.txt")
    assert "The file has 3 lines" in finished.output
    assert notes.read_text() == "one\n2\nthree\n"
    assert mcp_lookup.ANSWER in scripted.prompts[-1].prompt
    assert {exchange.path for exchange in scripted.exchanges} == {WIRES[wire]}
    assert {exchange.status for exchange in scripted.exchanges} == {200}
    assert len(scripted.agent_prompts) == 5
    assert len(scripted.prompts) == 6, "and a title"
    assert average_share(scripted) >= GOAL, scripted.misses()
    assert min(scripted.shares) >= MIN_SHARE, scripted.misses(MIN_SHARE)


@pytest.mark.parametrize("wire", WIRES)
def test_calls_of_one_reply_are_run_together_and_their_results_come_back_together(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, notes: Path, wire: str
) -> None:
    family = FAMILIES["hermes"]
    calls = [
        Call("read", {"filePath": str(notes)}),
        Call("bash", {"command": "echo forty-two", "description": "Says a number"}),
        Call("demo_lookup", {"key": "tower"}),
    ]
    scripted = server([family.calls(*calls, thinking="All at once."), family.says("Done.")], "hermes")
    opencode(sandbox, scripted, wire, "Look at everything")
    _, last = scripted.agent_prompts
    for result in ("2: two", "forty-two", mcp_lookup.ANSWER):
        assert result in last.prompt
    assert min(scripted.shares) >= MIN_SHARE, scripted.misses(MIN_SHARE)


@pytest.mark.parametrize("wire", WIRES)
def test_a_second_task_goes_on_from_the_first_after_long_thinking(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, notes: Path, wire: str
) -> None:
    chosen = FAMILIES["harmony"]
    thinking = " ".join(f"Thought {number} is not yet the last." for number in range(120))
    read = Call("read", {"filePath": str(notes)})
    script = [
        chosen.calls(read, thinking=thinking),
        chosen.says("The first is done.", thinking=thinking),
        chosen.calls(read),
        chosen.says("The second is done.", thinking="Short."),
    ]
    scripted = server(script)
    assert "The first is done." in opencode(sandbox, scripted, wire, "Think about notes.txt").output
    finished = opencode(sandbox, scripted, wire, "--continue", "And now once more")
    assert "The second is done." in finished.output
    assert "The first is done." in scripted.agent_prompts[2].prompt
    assert min(scripted.shares) >= MIN_SHARE, scripted.misses(MIN_SHARE)


@pytest.mark.parametrize("wire", WIRES)
def test_a_reply_that_breaks_in_mid_stream_is_asked_for_again(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, wire: str
) -> None:
    family = FAMILIES["harmony"]
    broken = family.says("This is the beginning", thinking="I begin.").removesuffix("<|return|>")
    script = [
        Transcript(text=broken, failure=RuntimeError("The GPU was lost.")),
        family.says("This is the whole answer."),
    ]
    finished = opencode(sandbox, server(script), wire, "Answer")
    assert "This is the whole answer." in finished.output


@pytest.mark.parametrize("wire", WIRES)
def test_a_conversation_that_outgrows_the_context_is_compacted_and_goes_on(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, wire: str
) -> None:
    (sandbox.workspace / "long.txt").write_text("a line of a long file\n" * 2000)
    family = FAMILIES["hermes"]
    read = Call("read", {"filePath": str(sandbox.workspace / "long.txt")})
    scripted = server(
        [family.calls(read), family.says("It is a long file.")],
        "hermes",
        context_length=70_000,
        without_tools=family.says("SUMMARY: the file was read."),
    )
    # It shows the server's error and ends with status 1, although it has gone on.
    finished = opencode(sandbox, scripted, wire, "Read long.txt", fails=True)
    assert "the context holds 70000" in finished.output
    assert "It is a long file." in finished.output
    assert "SUMMARY: the file was read." in scripted.prompts[-1].prompt
