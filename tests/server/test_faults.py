"""Faults: whatever goes wrong, its client is told, health is true, and the next request is served.

One server has them all, one after another. Faults of a process are in tests/commands/test_process_faults.py.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import socket
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, RunningServer, served
from scripted_engine import Transcript
from scripted_server import ANSWER
from served_models import models_of_every_type

from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scripted_engine import Script

CHAT = "/v1/chat/completions"
SLOW_READERS, IDLE_CONNECTIONS = 200, 500
LONG = "<|channel|>final<|message|>" + "word " * 500 + "<|return|>"

FAILURES: dict[str, Exception] = {
    "the engine breaks": RuntimeError("[METAL] Command buffer execution failed"),
    "the device is full": RuntimeError("[metal::malloc] Unable to allocate 99 bytes"),
    "Python's memory is out": MemoryError(),
}


def script(prompt: str) -> Script:
    for words, failure in FAILURES.items():
        if words in prompt:
            return Transcript(text="<|channel|>final<|message|>Par", failure=failure)
    if "at length" in prompt:
        return LONG
    return Transcript(text=ANSWER, prefill=50)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = Settings(port=0, max_queue=256, temperature=0.0)
    with (
        models_of_every_type(tmp_path_factory.mktemp("models"), settings, script) as models,
        served(models, settings, send_buffer=4096) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def _served_afterwards(server: RunningServer) -> Iterator[None]:
    yield
    status, health = server.call("/health")
    assert (status, health["status"]) == (200, "ok")
    assert server.chat()["choices"][0]["message"]["content"] == "The capital is Paris."
    while any(model["running"] or model["waiting"] for model in server.call("/health")[1]["models"]):
        pass  # nobody is left behind


def asking(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def reset(connection: socket.socket) -> None:
    """Close with a reset: what a program that crashes leaves behind."""
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


BODY = json.dumps(asking("hello", stream=True)).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closes", "resets"])
def test_a_client_leaves_at_every_byte_of_its_request(
    server: RunningServer, leave: Callable[[socket.socket], None]
) -> None:
    sent = HEAD + BODY
    for length in range(len(sent) + 1):
        connection = socket.create_connection(server.address, timeout=60)
        connection.sendall(sent[:length])
        leave(connection)


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closes", "resets"])
def test_a_client_leaves_at_every_part_of_the_answer(
    server: RunningServer, leave: Callable[[socket.socket], None]
) -> None:
    with closing(server.send(asking("hello", stream=True))) as whole:
        length = 0
        while b"[DONE]" not in (piece := whole.recv(65536)):
            length += len(piece)
    for read in range(0, length, max(1, length // 40)):
        connection = server.send(asking("hello", stream=True))
        got = 0
        while got < read and (piece := connection.recv(read - got)):
            got += len(piece)
        leave(connection)


def test_hundreds_of_clients_do_not_read_their_answers(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(SLOW_READERS):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(server.address)
            connection.sendall(HEAD.replace(b"%d" % len(BODY), b"%d" % len(LENGTHY)) + LENGTHY)
        assert server.call("/health")[0] == 200
        assert server.chat()["choices"][0]["finish_reason"] == "stop"


LENGTHY = json.dumps(asking("Answer at length", stream=True)).encode()


def test_hundreds_of_connections_are_idle(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            stack.enter_context(socket.create_connection(server.address, timeout=60))
        assert server.call("/health")[0] == 200
        assert server.chat()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fault", FAILURES)
def test_the_engine_fails_in_mid_reply(server: RunningServer, fault: str) -> None:
    status, body = server.call(CHAT, asking(fault))
    assert status == 503
    assert body["error"]["code"] == "engine_failed"
    assert type(FAILURES[fault]).__name__ in body["error"]["message"]
    wait_until_healthy(server)
    with server.open(CHAT, asking(fault, stream=True)) as response:
        *_, last, nothing = response.read().decode().split("\n\n")
    assert nothing == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    wait_until_healthy(server)


def wait_until_healthy(server: RunningServer) -> None:
    """Wait for the engine's restart: a first one comes at once, one behind it after a second."""
    while server.call("/health")[0] != 200 or server.call(CHAT, {"messages": HELLO})[0] != 200:
        pass


def test_the_engines_thread_dies(server: RunningServer) -> None:
    server.chat()
    # The newest: one of a server before may be about to end.
    *_, thread = [each for each in threading.enumerate() if each.name == "engine"]
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    status, body = server.call(CHAT, {"messages": HELLO})  # wakes it
    assert status == 503, body
    assert "The engine has died: SystemExit" in body["error"]["message"]
    thread.join(60)
    assert not thread.is_alive()


def test_the_clock_jumps_with_every_look_at_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    years = itertools.cycle([-20, 0, 20, -1, 5])
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + next(years) * 365 * 86_400.0)
    with closing(socket.create_connection(server.address, timeout=60)) as half:
        half.sendall(HEAD)
        assert server.chunks()[-1]["choices"][0]["finish_reason"] == "stop"
        assert server.call("/v1/embeddings", {"model": "embedder", "input": "hello"})[0] == 200
        assert server.call("/v1/models")[0] == 200
        half.sendall(BODY)  # its deadlines did not pass
        assert half.recv(12) == b"HTTP/1.1 200"
        while b"[DONE]" not in half.recv(65536):
            pass
