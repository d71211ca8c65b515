"""Stopped runs: when the plugin disconnects from the server, which then stops generating.

Dify's SDK (0.10.2) has no message for it: when a user presses Stop, Dify's daemon drops what the plugin still sends,
and the plugin does not learn of it. Tested here is what it can notice: its output is not read, or it exits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from daemon import PluginProcess
from dify_view import user
from raw_server import STREAM, RawServer, event

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HI = event({"reasoning_content": "Hi"})


@pytest.fixture
def server() -> Iterator[RawServer]:
    """A server in the middle of an answer that waits for its client to disconnect."""
    with RawServer([STREAM, HI, None], chats_only=True) as server:
        yield server


STOP_IN_MID_ANSWER = """
import sys
import dify_plugin
from dify_plugin.entities.model.llm import LLMUsage
from dify_plugin.entities.model.message import UserPromptMessage
from dify_mlx_provider.chat.invocation import invoke
from dify_mlx_provider.chat.messages import ChatInvocation

call = ChatInvocation(
    model="default", form={"endpoint_url": sys.argv[1]}, messages=[UserPromptMessage(content="hi")]
)
answer = invoke(call, lambda *_: LLMUsage.empty_usage())
print(next(answer).delta.message.content.strip(), flush=True)
sys.stdin.readline()
answer.close()
sys.stdin.readline()
"""


def test_closing_the_answer_closes_the_connection(server: RawServer, plugin_root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOP_IN_MID_ANSWER, server.address],
        cwd=plugin_root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "<think>\n"
        assert not server.left.is_set()
        process.stdin.write("close it\n")
        process.stdin.flush()
        assert server.left.wait(60)
        process.stdin.close()


def test_a_plugin_that_exits_closes_the_connection(server: RawServer, plugin_root: Path) -> None:
    with PluginProcess(plugin_root) as plugin:
        answer = plugin.invoke([user("hi")], credentials={"endpoint_url": server.address})
        assert next(answer)["delta"]["message"]["content"] == "<think>\n"
        assert not server.left.is_set()
    assert server.left.wait(60)


def test_a_daemon_that_stops_reading_makes_the_plugin_close_the_connection(plugin_root: Path) -> None:
    request = {
        "session_id": "1",
        "event": "request",
        "data": {
            "user_id": "1",
            "type": "model",
            "action": "invoke_llm",
            "provider": "mlx",
            "model": "default",
            "model_type": "llm",
            "model_parameters": {},
            "prompt_messages": [user("hi")],
            "tools": [],
            "stop": [],
            "stream": True,
        },
    }
    command = [sys.executable, "-m", "dify_mlx_provider"]
    environment = {"INSTALL_METHOD": "local", "PATH": os.environ.get("PATH", "")}
    with (
        RawServer([STREAM, *[HI] * 50_000, None], chats_only=True) as server,
        subprocess.Popen(
            command,
            cwd=plugin_root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as plugin,
    ):
        try:
            assert plugin.stdin is not None
            assert plugin.stdout is not None
            request["data"]["credentials"] = {"endpoint_url": server.address}  # type: ignore[index]  # JSON
            assert any("heartbeat" in line for line in plugin.stdout)
            plugin.stdin.write(json.dumps(request) + "\n")
            plugin.stdin.flush()
            assert any('"stream"' in line for line in plugin.stdout)
            plugin.stdout.close()
            assert server.left.wait(60)
            assert plugin.poll() is None
        finally:
            plugin.kill()
