"""Faults of the process and the machine: full disks behind its output, few open files, models that disappear.

One process has them all, one after another; each ends with health and the next request.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from free_ports import free_port
from server_process import COMMAND, ENVIRONMENT

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN_FILES = 256
FULL = Path("/dev/full")


@dataclass
class Server:
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            url = f"http://127.0.0.1:{self.port}{path}"
            with urllib.request.urlopen(urllib.request.Request(url, data), timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def chat(self, model: str) -> tuple[int, Any]:
        question = {"role": "user", "content": "What is the capital of France?"}
        return self.call("/v1/chat/completions", {"model": model, "messages": [question]})


def limited(port: int, folder: Path) -> list[str]:
    """The command that serves with few open files."""
    served = [*COMMAND, "--config", str(folder / "models.toml"), "--port", str(port)]
    lines = f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({OPEN_FILES}, {OPEN_FILES}))"
    return [sys.executable, "-c", f"{lines}; os.execv({served[0]!r}, {served!r})"]


def pause(process: subprocess.Popen[bytes]) -> None:
    """Leave the processor to a server for a moment, or until it ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    lines = []
    for name, extra in (("first", "pinned = true\n"), ("second", "")):
        shutil.copytree(MODEL_PATH, folder / name)
        lines.append(f'[models.{name}]\nmodel = "{folder / name}"\n{extra}')
    (folder / "models.toml").write_text("".join(lines))
    port = free_port()
    with FULL.open("wb") if FULL.exists() else (folder / "output").open("wb") as full:
        process = subprocess.Popen(limited(port, folder), stdout=full, stderr=full, env=ENVIRONMENT)
    server = Server(port, folder, process)
    try:
        while process.poll() is None:
            try:
                if server.call("/health")[0] == 200:
                    break
            except OSError:  # it does not listen yet
                pause(process)
        assert process.poll() is None
        yield server
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 0


@pytest.fixture(autouse=True)
def _served_afterwards(server: Server) -> Iterator[None]:
    yield
    assert server.call("/health")[1]["status"] == "ok"
    status, reply = server.chat("first")
    assert status == 200
    assert "Paris" in reply["choices"][0]["message"]["content"]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no device that is always full")
def test_nothing_can_be_printed_and_nothing_logged(server: Server) -> None:
    assert server.call("/v1/chat/completions", {"messages": []})[0] == 400  # which is logged


def test_there_are_more_connections_than_files(server: Server) -> None:
    refused = 0
    with ExitStack() as stack:
        held = []
        for _ in range(2 * OPEN_FILES):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            held.append(connection)
        for connection in held:  # the first ones are kept, the others told so and closed
            connection.setblocking(False)
        while not refused:
            for connection in held:
                with suppress(BlockingIOError, ConnectionResetError):
                    refused += connection.recv(12) == b"HTTP/1.1 503"
        held[0].setblocking(True)
        held[0].sendall(b"Host: localhost\r\n\r\n")
        assert held[0].recv(12) == b"HTTP/1.1 200"
    answer = 503
    while answer == 503:  # until it has seen that they have gone
        with suppress(OSError):
            answer, _ = server.call("/health")


def test_the_folder_of_a_running_model_is_deleted(server: Server) -> None:
    hidden = server.folder / "hidden"
    assert server.chat("second")[0] == 200
    for name in ("first", "second"):
        shutil.rmtree(server.folder / name)
    assert server.chat("first")[0] == server.chat("second")[0] == 200  # they are in memory
    assert {model["id"] for model in server.call("/v1/models")[1]["data"]} == {"first", "second"}
    assert server.call("/v1/models/second/unload", {})[0] == 200
    status, refusal = server.chat("second")
    assert status in (404, 500, 503)
    assert "second" in refusal["error"]["message"]
    assert "internal" not in (refusal["error"]["code"] or "")
    shutil.copytree(MODEL_PATH, hidden)
    hidden.rename(server.folder / "second")
    while server.chat("second")[0] != 200:  # it is tried again after a while
        pause(server.process)


def test_a_second_server_on_its_port_says_so_and_harms_nobody(server: Server) -> None:
    second = subprocess.run(
        [*COMMAND, "--port", str(server.port)], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
    )
    assert second.returncode == 1
    assert str(server.port) in second.stderr
    assert "Traceback" not in second.stderr
