"""What `connect --write` puts into the files of Codex, Claude Code and OpenCode is all that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clients.scripted_models import FAMILIES, MODEL
from mlx_backend.cli import main
from mlx_backend.clients import KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from clients.client_process import Sandbox
    from clients.scripted_models import ScriptedServer

CLIENTS = [
    pytest.param(
        "codex", ("codex", "exec", "--skip-git-repo-check"), marks=pytest.mark.client("codex"), id="codex"
    ),
    pytest.param("claude-code", ("claude", "--print"), marks=pytest.mark.client("claude"), id="claude-code"),
    pytest.param(
        "opencode",
        ("opencode", "run", "--model", f"mlx/{MODEL}"),
        marks=pytest.mark.client("opencode"),
        id="opencode",
    ),
]


@pytest.mark.parametrize("key", [None, "K9"], ids=["no key", "a key"])
@pytest.mark.parametrize(("name", "command"), CLIENTS)
def test_a_client_that_was_connected_answers(
    server: Callable[..., ScriptedServer],
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    command: tuple[str, ...],
    key: str | None,
) -> None:
    scripted = server([FAMILIES["harmony"].says("I am connected.")] * 4, api_key=key)
    monkeypatch.setenv("HOME", str(sandbox.home))
    assert (
        main(["connect", name, "--write", "-y", "--url", scripted.url, *(["--key", key] if key else [])]) == 0
    )
    variables = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", **({KEY_VARIABLE: key} if key else {})}
    finished = sandbox.run_client(*command, "Are you connected?", environment=variables)
    assert "I am connected." in finished.output
    assert {exchange.status for exchange in scripted.exchanges if exchange.path.startswith("/v1/")} <= {
        200,
        404,
    }
