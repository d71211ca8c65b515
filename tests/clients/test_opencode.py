"""Tasks of OpenCode over each of the three APIs that it speaks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

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
TEXT = "one\ntwo\nthree\n"


def opencode(sandbox: Sandbox, server: ScriptedServer, wire: str, *arguments: str, **limit: int) -> Finished:
    """Run a task with an OpenCode that knows this server, and an MCP server."""
    limits = {"context": 200_000, "output": 32_000} | limit
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
    return sandbox.run_client("opencode", "run", "--model", f"local/{MODEL}", *arguments)


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
    assert average_share(scripted) >= GOAL, scripted.misses()
