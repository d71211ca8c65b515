"""Tasks of Codex, over /v1/responses and with the catalogue of /v1/models."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from picture_files import RED, encoded
from PIL import Image
from scripted_engine import Transcript

from clients import mcp_lookup
from clients.scripted_models import FAMILIES, MODEL, PUBLISHED, Call, average_share, family_of
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clients.client_process import Sandbox
    from clients.scripted_models import ModelFamily, ScriptedServer

    type Serve = Callable[..., ScriptedServer]

pytestmark = pytest.mark.client("codex")

GOAL = 0.985
"""The share of an agent's prompts that the server should have."""
RESPONSES = "/v1/responses"
COMPACTION = "CONTEXT CHECKPOINT COMPACTION"
"""What Codex asks for where a conversation has become long."""
PATCH = """\
*** Begin Patch
*** Update File: notes.txt
@@
 one
-two
+2
 three
*** End Patch
"""
EXEC = ("exec", "--skip-git-repo-check", "--json")


def codex(
    sandbox: Sandbox,
    server: ScriptedServer,
    *arguments: str,
    has_catalogue: bool = True,
    has_websockets: bool = False,
    fails: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run a task with a Codex that knows this server, and an MCP server; what it says of itself."""
    folder = sandbox.home / ".codex"
    folder.mkdir(exist_ok=True)
    values = {
        "model": MODEL,
        "model_provider": "local",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        **settings,
    }
    (folder / "config.toml").write_text(f"""\
{"".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())}
[analytics]
enabled = false
[mcp_servers.demo]
command = {json.dumps(sys.executable)}
args = [{json.dumps(mcp_lookup.__file__)}]
[model_providers.local]
name = "local"
base_url = "{server.url}/v1"
experimental_bearer_token = "any"
wire_api = "responses"
supports_websockets = {json.dumps(has_websockets)}
request_max_retries = 1
stream_max_retries = 2
{f'model_catalog_url = "{server.url}/v1/models"' if has_catalogue else ""}
""")
    finished = sandbox.run_client("codex", *EXEC, *arguments, fails=fails)
    return [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The completed items of one kind."""
    return [
        event["item"]
        for event in events
        if event["type"] == "item.completed" and event["item"]["type"] == kind
    ]


def commands(count: int, family: ModelFamily) -> list[str]:
    """A task of this many commands."""
    return [
        *(
            family.calls(Call("exec_command", {"cmd": f"echo {at}"}), thinking=f"Step {at}.")
            for at in range(count)
        ),
        family.says("All is done.", thinking="That was the last one."),
    ]


@pytest.fixture
def notes(sandbox: Sandbox) -> Path:
    """A file of three lines in the workspace."""
    file = sandbox.workspace / "notes.txt"
    file.write_text("one\ntwo\nthree\n")
    return file


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_reads_edits_by_a_patch_and_asks_an_mcp_server(
    server: Serve, sandbox: Sandbox, notes: Path, family: str
) -> None:
    model = FAMILIES[family]
    script = [
        model.calls(Call("exec_command", {"cmd": "cat notes.txt"}), thinking="I have to see it first."),
        model.calls(Call("apply_patch", {"input": PATCH}), thinking="The second line says “two”."),
        model.calls(Call("mcp__demo__lookup", {"key": "tower"}), thinking="And now the tower."),
        model.says("The second line is 2.", thinking="All is done."),
    ]
    scripted = server(script, family)
    events = codex(sandbox, scripted, "Replace two by 2 in notes.txt")
    assert notes.read_text() == "one\n2\nthree\n"
    assert mcp_lookup.ANSWER in scripted.prompts[-1].prompt
    assert [item["text"] for item in items(events, "agent_message")] == ["The second line is 2."]
    assert not items(events, "error"), "it knows the model"
    assert [exchange.shown for exchange in scripted.exchanges] == [
        "GET /v1/models 200",
        *[f"POST {RESPONSES} 200"] * 4,
    ]
    [sent] = [item for item in scripted.exchanges[-1].json["input"] if item["type"] == "custom_tool_call"]
    assert sent["input"] == PATCH


def test_without_the_catalogue_it_edits_by_a_command(server: Serve, sandbox: Sandbox, notes: Path) -> None:
    model = FAMILIES["harmony"]
    command = f"apply_patch <<'EOF'\n{PATCH}EOF"
    scripted = server([model.calls(Call("exec_command", {"cmd": command})), model.says("Done.")])
    events = codex(sandbox, scripted, "Replace two by 2", has_catalogue=False)
    assert notes.read_text() == "one\n2\nthree\n"
    assert len(items(events, "file_change")) == 1


@pytest.mark.parametrize("provider", ["lmstudio", "ollama"])
def test_its_local_providers(server: Serve, sandbox: Sandbox, provider: str) -> None:
    scripted = server([FAMILIES["harmony"].says("I am here.")])
    finished = sandbox.run_client(
        "codex",
        *(*EXEC, "--oss", "--local-provider", provider, "--model", MODEL, "Are you there?"),
        environment={"CODEX_OSS_BASE_URL": f"{scripted.url}/v1"},
    )
    assert "I am here." in finished.output
    assert {exchange.status for exchange in scripted.exchanges} == {200}


def test_the_effort_is_chosen_of_the_models_own(server: Serve, sandbox: Sandbox) -> None:
    scripted = server([FAMILIES["harmony"].says("Hello.")] * 2)
    codex(sandbox, scripted, "Hello")
    codex(sandbox, scripted, "Hello", model_reasoning_effort="high")
    own, chosen = scripted.requests(RESPONSES)
    assert own.reply_headers["x-mlx-backend-effort"].startswith("medium (reasoning.effort)")
    assert chosen.reply_headers["x-mlx-backend-effort"].startswith("high (reasoning.effort)")


def test_calls_in_parallel_are_run_and_their_results_come_together(server: Serve, sandbox: Sandbox) -> None:
    model = FAMILIES["hermes"]
    calls = [Call("exec_command", {"cmd": f"echo result {at}"}) for at in (1, 2)]
    scripted = server([model.calls(*calls, thinking="Both at once."), model.says("Done.")], "hermes")
    codex(sandbox, scripted, "Go")
    assert len(scripted.prompts) == 2
    assert "result 1" in scripted.prompts[1].prompt
    assert "result 2" in scripted.prompts[1].prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_long_thinking_is_not_cut(server: Serve, sandbox: Sandbox, family: str) -> None:
    model = FAMILIES[family]
    thinking = " ".join(f"Thing {number} to think of." for number in range(1_000))
    scripted = server([model.says("That is all.", thinking=thinking)], family)
    events = codex(sandbox, scripted, "Think")
    assert [item["text"] for item in items(events, "agent_message")] == ["That is all."]
    assert [item["text"] for item in items(events, "reasoning")] == [thinking]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_that_breaks_is_asked_again_with_what_was_done(
    server: Serve, sandbox: Sandbox, family: str
) -> None:
    """The reasoning was done and is in the second request: the model goes on after it, and nothing is read again."""
    model = FAMILIES[family]
    whole = model.calls(Call("exec_command", {"cmd": "echo once more"}), thinking="I have thought.")
    broken = Transcript(text=whole.partition("once")[0], failure=EngineError("The device was lost."))
    call_alone = model.calls(Call("exec_command", {"cmd": "echo once more"}))
    scripted = server([broken, call_alone, model.says("Done.")], family)
    events = codex(sandbox, scripted, "Go")
    assert any("The device was lost." in event.get("message", "") for event in events)
    assert len(items(events, "command_execution")) == 1
    first, second, _ = scripted.prompts
    assert "I have thought." in second.prompt.removeprefix(first.prompt)
    assert scripted.shares[0] >= 0.999, scripted.misses(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_conversation_is_compacted_and_goes_on(server: Serve, sandbox: Sandbox, family: str) -> None:
    """It sends no tools then, and the prompt has them all the same: else all of it would be read anew."""
    model = FAMILIES[family]
    steps = iter(commands(8, model))

    def reply(prompt: str) -> str:
        if COMPACTION in prompt[-8_000:]:
            return model.says("So far: five steps.", thinking="What was it?")
        return next(steps)

    scripted = server(reply, family)
    limit = 10_500 if family == "harmony" else 24_500
    events = codex(sandbox, scripted, "Go", model_auto_compact_token_limit=limit)
    assert [item["text"] for item in items(events, "agent_message")] == ["All is done."]
    assert "So far: five steps." in scripted.prompts[-1].prompt
    asked = [exchange.json for exchange in scripted.requests(RESPONSES)]
    compactions = [prompt for prompt, sent in zip(scripted.prompts, asked, strict=True) if not sent["tools"]]
    assert compactions
    assert min(each.repeated / len(each.request.prompt) for each in compactions) >= 0.9, scripted.misses()


def test_a_prompt_that_is_too_long_is_told_in_the_words_it_knows(server: Serve, sandbox: Sandbox) -> None:
    scripted = server(["never"], context_length=2_000)
    events = codex(sandbox, scripted, "Go", fails=True)
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]
    assert len(scripted.requests(RESPONSES)) == 1, "it does not try again"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_of_many_turns_is_read_once(server: Serve, sandbox: Sandbox, family: str) -> None:
    scripted = server(commands(14, FAMILIES[family]), family)
    codex(sandbox, scripted, "Go")
    assert len(scripted.agent_prompts) == 15
    assert average_share(scripted) >= GOAL, scripted.misses()
    assert min(scripted.shares) >= 0.97, scripted.misses()


@pytest.mark.parametrize("family", [*FAMILIES, *PUBLISHED])
def test_a_session_that_is_resumed_goes_on_where_it_was(server: Serve, sandbox: Sandbox, family: str) -> None:
    """Also where the template drops the reasoning of answered turns: the history without it is read meanwhile."""
    model = family_of(family)
    scripted = server(commands(3, model) + commands(3, model), family)
    codex(sandbox, scripted, "Go")
    codex(sandbox, scripted, "resume", "--last", "And once more")
    assert len(scripted.agent_prompts) == 8
    assert average_share(scripted) >= GOAL, scripted.misses()
    assert min(scripted.shares) >= 0.97, scripted.misses()


@pytest.mark.parametrize("family", FAMILIES)
def test_over_a_websocket_a_turn_sends_only_what_is_new(server: Serve, sandbox: Sandbox, family: str) -> None:
    model = FAMILIES[family]
    scripted = server([model.says("Read before the task is known."), *commands(3, model)], family)
    events = codex(sandbox, scripted, "Say 0, 1 and 2", has_websockets=True)
    assert [item["text"] for item in items(events, "agent_message")] == ["All is done."]
    handshake, read, *turns = scripted.requests(RESPONSES)
    assert (handshake.shown, read.json["generate"]) == (f"GET {RESPONSES} 101", False)
    assert [len(turn.json["input"]) for turn in turns[1:]] == [1] * 3, "the result of a command"
    assert min(scripted.shares[1:]) >= 0.97, scripted.misses()


def test_an_image_that_it_views_is_in_the_result_of_the_call(server: Serve, sandbox: Sandbox) -> None:
    picture = sandbox.workspace / "red.png"
    picture.write_bytes(encoded(Image.new("RGB", (32, 32), RED)))
    model = FAMILIES["harmony"]
    script = [model.calls(Call("view_image", {"path": str(picture)})), model.says("I cannot see it.")]
    scripted = server(script)
    events = codex(sandbox, scripted, "What is in red.png?", has_catalogue=False)
    assert [item["text"] for item in items(events, "agent_message")] == ["I cannot see it."]
    sent = scripted.exchanges[-1].json["input"][-1]
    assert (sent["type"], sent["output"][0]["type"]) == ("function_call_output", "input_image")
