"""Tasks of Claude Code over Anthropic's API."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from scripted_engine import Transcript

from clients import mcp_lookup
from clients.scripted_models import FAMILIES, MODEL, Call, average_share
from mlx_backend.errors import EngineBusy, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scripted_engine import Script

    from clients.client_process import Sandbox
    from clients.scripted_models import ScriptedServer

pytestmark = pytest.mark.client("claude")

GOAL, WORST = 0.992, 0.97
"""The share of an agent's prompts that the server should have: of all of them, and of each."""
MESSAGES = "/v1/messages"
SUMMARY = "<analysis>All of it.</analysis>\n<summary>Lines were echoed.</summary>"


def claude(
    sandbox: Sandbox, server: ScriptedServer, prompt: str, *arguments: str, **environment: str
) -> dict[str, Any]:
    """Run a task without a terminal, with an MCP server; return what Claude Code says of it."""
    servers = {"demo": {"command": sys.executable, "args": [mcp_lookup.__file__]}}
    configuration = sandbox.home / "mcp.json"
    configuration.write_text(json.dumps({"mcpServers": servers}))
    finished = sandbox.run_client(
        "claude",
        *("--print", prompt, "--output-format", "json", "--mcp-config", str(configuration)),
        *("--dangerously-skip-permissions", *arguments),
        environment={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
            **environment,
        },
    )
    told: dict[str, Any] = json.loads(finished.output.splitlines()[-1])
    assert not told["is_error"], told["result"]
    return told


def statuses(server: ScriptedServer) -> list[int]:
    return [exchange.status for exchange in server.requests(MESSAGES)]


def echo(text: str) -> Call:
    return Call("Bash", {"command": f"echo {text}", "description": "Echoes"})


@pytest.fixture
def notes(sandbox: Sandbox) -> Path:
    """A file of three lines in the workspace."""
    file = sandbox.workspace / "notes.txt"
    file.write_text("one\ntwo\nthree\n")
    return file


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_reads_edits_runs_and_finds_a_tool_of_an_mcp_server(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, notes: Path, family: str
) -> None:
    says, calls = FAMILIES[family].says, FAMILIES[family].calls
    edit = {"file_path": str(notes), "old_string": "two", "new_string": "2"}
    scripted = server(
        [
            calls(Call("Read", {"file_path": str(notes)}), thinking="I have to see the file first."),
            calls(Call("Edit", edit), thinking="The second line says “two”."),
            calls(Call("Bash", {"command": "wc -l notes.txt", "description": "Counts"})),
            calls(Call("ToolSearch", {"query": "select:mcp__demo__lookup", "max_results": 5})),
            calls(Call("mcp__demo__lookup", {"key": "tower"}), thinking="And now the tower."),
            says("The file has 3 lines, and the second is 2.", thinking="All is done."),
        ],
        family,
    )
    told = claude(sandbox, scripted, "Replace two by 2 in notes.txt, and look the tower up")
    assert told["result"] == "The file has 3 lines, and the second is 2."
    assert notes.read_text() == "one\n2\nthree\n"
    assert mcp_lookup.ANSWER in scripted.prompts[-1].prompt
    assert statuses(scripted) == [200] * 6
    assert str(mcp_lookup.TOOL["description"]) not in scripted.prompts[0].prompt
    assert average_share(scripted) >= GOAL, scripted.misses()
    assert min(scripted.shares) >= WORST, scripted.misses()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_task_goes_on_with_the_first(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, family: str
) -> None:
    says, calls = FAMILIES[family].says, FAMILIES[family].calls
    replies = [
        calls(echo("1"), thinking="First."),
        says("One."),
        calls(echo("2"), thinking="Second."),
        says("Two."),
    ]
    scripted = server(replies, family)
    assert claude(sandbox, scripted, "Echo one")["result"] == "One."
    assert claude(sandbox, scripted, "Now echo two", "--continue")["result"] == "Two."
    assert "Echo one" in scripted.prompts[-1].prompt
    assert average_share(scripted) >= GOAL, scripted.misses()
    assert min(scripted.shares) >= WORST, scripted.misses()


def test_calls_of_one_turn_are_all_run(server: Callable[..., ScriptedServer], sandbox: Sandbox) -> None:
    hermes = FAMILIES["hermes"]
    scripted = server([hermes.calls(echo("first"), echo("second")), hermes.says("Done.")], "hermes")
    assert claude(sandbox, scripted, "Echo twice")["result"] == "Done."
    *_, before, after = scripted.prompts[-1].prompt.split("<tool_response>\n")
    assert (before.partition("\n")[0], after.partition("\n")[0]) == ("first", "second")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_thinking_is_not_cut_and_comes_back(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, family: str
) -> None:
    thinking = " ".join(f"I look at step {step}." for step in range(800))
    says, calls = FAMILIES[family].says, FAMILIES[family].calls
    scripted = server([calls(echo("1"), thinking=thinking), says("Done.", thinking=thinking)], family)
    assert claude(sandbox, scripted, "Think")["result"] == "Done."
    assert thinking in scripted.prompts[-1].prompt


@pytest.mark.parametrize(
    "failure", [EngineError("The engine failed."), EngineBusy("The queue is full.")], ids=["error", "busy"]
)
def test_what_fails_in_mid_stream_is_asked_again(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, failure: Exception
) -> None:
    hermes = FAMILIES["hermes"]
    broken = Transcript(text="<think>\nI begin", failure=failure)
    scripted = server([hermes.calls(echo("1")), broken, hermes.says("Done.")], "hermes")
    assert claude(sandbox, scripted, "Echo one")["result"] == "Done."
    [_, failed, _] = scripted.requests(MESSAGES)
    kind = "overloaded_error" if isinstance(failure, EngineBusy) else "api_error"
    assert f'"type":"error","error":{{"type":"{kind}"'.encode() in failed.reply


def compacting(prompts: list[str], turns: int) -> Callable[[str], Script]:
    """A model that makes a long call in each turn, and a summary where it is asked for one."""
    hermes = FAMILIES["hermes"]

    def reply(prompt: str) -> Script:
        if "Respond with TEXT ONLY" in prompt[-20_000:]:
            prompts.append(prompt)
            return hermes.says(SUMMARY)
        if prompt.count("<tool_response>") >= turns or prompts:
            return hermes.says("Done.")
        return hermes.calls(echo("y" * 6000))

    return reply


def test_a_conversation_that_nears_its_limit_is_compacted(
    server: Callable[..., ScriptedServer], sandbox: Sandbox
) -> None:
    summaries: list[str] = []
    scripted = server(compacting(summaries, 12), "hermes")
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "130000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "80"}
    assert claude(sandbox, scripted, "Echo until you are done", **limits)["result"] == "Done."
    assert len(summaries) == 1
    assert "Lines were echoed." in scripted.prompts[-1].prompt
    assert set(statuses(scripted)) == {200}


@pytest.mark.parametrize("context_length", [110_000, 114_000, 118_000])
def test_a_prompt_that_leaves_no_room_for_a_call_makes_it_compact(
    server: Callable[..., ScriptedServer], sandbox: Sandbox, context_length: int
) -> None:
    summaries: list[str] = []
    scripted = server(compacting(summaries, 12), "hermes", context_length=context_length)
    assert claude(sandbox, scripted, "Echo until you are done")["result"] == "Done."
    assert len(summaries) == 1
    assert 400 in statuses(scripted)
    assert "Lines were echoed." in scripted.prompts[-1].prompt


def test_thinking_that_another_server_signed_is_left_out_and_the_task_goes_on(
    server: Callable[..., ScriptedServer], sandbox: Sandbox
) -> None:
    hermes = FAMILIES["hermes"]
    scripted = server([hermes.says("One.", thinking="Mine."), hermes.says("Two.")], "hermes")
    claude(sandbox, scripted, "Say one")
    [history] = (sandbox.home / ".claude" / "projects").rglob("*.jsonl")
    history.write_text(history.read_text().replace('"signature":"mlx', '"signature":"EuYBCkQ'))
    assert claude(sandbox, scripted, "Say two", "--continue")["result"] == "Two."
    assert statuses(scripted) == [200, 400, 200]
