"""A server process that somebody means to keep busy: it answers, others are served, and it ends when it is told to.

What others wait meanwhile is measured by tests/benchmarks/bench_attacks.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ENVIRONMENT, ServerProcess, server_process

if TYPE_CHECKING:
    from collections.abc import Iterator

# Texts that were read again from each of their characters, by patterns that no other thread can interrupt.
LONG = 300_000
REREAD = {
    "details without an end": ("assistant", "<details " * LONG),
    "attributes that are none": ("assistant", f'<details type="tool_calls" {"-" * LONG}>\n</details>'),
    "a header without an end": (
        "assistant",
        f"<|channel|>commentary to=f<|message|>{{}}<|call|><|start|>{'a' * LONG}",
    ),
    "empty lines beside an effort": ("system", f"Reasoning: high\na{chr(10) * LONG}b"),
    "efforts alone": ("system", "Reasoning: high\n" * LONG),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as server:
        yield server


def call(server: ServerProcess, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("name", REREAD)
def test_a_text_takes_as_long_as_it_is(server: ServerProcess, name: str) -> None:
    role, text = REREAD[name]
    question = {"role": "user", "content": "What is the capital of France?"}
    status, body = call(
        server,
        "/v1/chat/completions",
        {"messages": [{"role": role, "content": text}, question], "max_tokens": 8},
    )
    assert status == 200 or body["error"]["code"] == "context_length_exceeded"
    assert call(server, "/health")[0] == 200


STUCK_THREAD = """
import sys, threading
import mlx_backend.commands.serve as serve

threading.Thread(target=threading.Event().wait).start()  # as one in foreign code: nothing interrupts it
serve.STOP_SECONDS = 1e6
from mlx_backend.cli import main
sys.exit(main(["serve", "--port", "0"]))
"""


def test_a_stop_waits_for_no_thread_that_computes() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK_THREAD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("  Try: ") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in errors) == (0, False)
    finally:
        process.kill()
        process.communicate()
