"""Beside somebody who sends hundreds of requests everybody else is served, over real sockets."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from running_server import HELLO, RunningServer, running, served
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER
from single_model import SingleModelRegistry

from mlx_backend.chat.service import Service
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.settings import Settings

KEYS = (("many", "m"), ("one", "o"))
BODY = json.dumps({"messages": HELLO}).encode()


def sent(
    server: RunningServer, key: str, body: bytes = BODY, length: int | None = None, address: str = "127.0.0.1"
) -> socket.socket:
    """A connection on which a request with this key has been sent."""
    connection = socket.create_connection(server.address, timeout=60, source_address=(address, 0))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n"
    with suppress(OSError):  # refused before all of it was sent
        connection.sendall(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    return connection


def status_of(connection: socket.socket) -> int:
    with connection, connection.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def test_beside_two_hundred_requests_of_one_key_another_keys_are_all_answered() -> None:
    with ScriptedEngine(lambda _: ANSWER, gated=True, max_concurrent=2, max_waiting=6) as engine:
        settings: dict[str, Any] = {"api_keys": KEYS, "max_concurrent": 2, "max_queue": 6}
        with running(engine, **settings) as server:
            flood = [sent(server, "m") for _ in range(200)]
            while engine.status().running + engine.status().waiting < 8:
                pass
            mine = [sent(server, "o") for _ in range(3)]
            select.select(flood, [], [])  # until one of them is refused: the engine has not begun to answer
            engine.advance(100_000)
            assert [status_of(each) for each in mine] == [200, 200, 200]
            counted = Counter(status_of(each) for each in flood)
            assert set(counted) == {200, 503}
            assert counted[200] >= 5  # and the rest is told to come again


def test_beside_clients_who_leave_at_once_and_come_again_everybody_is_answered() -> None:
    with ScriptedEngine(lambda _: ANSWER, max_concurrent=2, max_waiting=6) as engine:
        settings: dict[str, Any] = {"api_keys": KEYS, "max_concurrent": 2, "max_queue": 6}
        with running(engine, **settings) as server:
            stopped = threading.Event()

            def leave() -> None:
                while not stopped.is_set():
                    sent(server, "m").close()

            leavers = [threading.Thread(target=leave) for _ in range(3)]
            for each in leavers:
                each.start()
            try:
                assert [status_of(sent(server, "o")) for _ in range(5)] == [200] * 5
            finally:
                stopped.set()
                for each in leavers:
                    each.join()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.1 alone is an address of the loopback here")
def test_one_addresss_large_bodies_leave_room_for_others() -> None:
    engine = ScriptedEngine(lambda _: ANSWER)
    settings = Settings(port=0, max_queue=4, max_concurrent=4, api_keys=KEYS)
    limits = ConnectionLimits(max_body_bytes=1 << 20, max_held_bytes=200_000)
    with engine, served(SingleModelRegistry(Service(engine)), settings, limits) as server:
        unfinished = sent(server, "m", b"x" * 60_000, length=1 << 20)
        refused = sent(server, "m", b"x" * 60_000, length=1 << 20)
        assert status_of(refused) == 503
        other = sent(server, "o", b"x" * 60_000, length=len(BODY) + 60_000, address="127.0.0.2")
        other.sendall(BODY)
        assert status_of(other) == 400  # whole, and not JSON
        unfinished.close()


class Loading(SingleModelRegistry):
    """A registry of which one model is loaded, and another is not for as long as the test wants."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.is_loaded = threading.Event()
        self.waiting = threading.Semaphore(0)

    def acquire(self, name: str | None, wait: float) -> Any:
        if name == "loading":
            self.waiting.release()
            assert self.is_loaded.wait(60)
        return super().acquire(None, wait)


def test_requests_of_one_client_that_wait_for_a_model_leave_others_theirs() -> None:
    with ScriptedEngine(lambda _: ANSWER) as engine, ExitStack() as stack:
        models = Loading(Service(engine))
        settings = Settings(port=0, max_queue=1, max_concurrent=1, api_keys=(("a", "a"), ("b", "b")))
        server = stack.enter_context(served(models, settings))
        stack.callback(models.is_loaded.set)
        body = json.dumps({"model": "loading", "messages": HELLO}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nx-api-key: a\r\nContent-Length: %d\r\n\r\n"
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(server.address, timeout=60))
            connection.sendall(head % len(body) + body)
        for _ in range(settings.max_concurrent + settings.max_queue):
            assert models.waiting.acquire(timeout=60)
        assert connection.recv(12) == b"HTTP/1.1 503"  # of so many
        status, _ = server.call("/v1/chat/completions", {"messages": HELLO}, **{"x-api-key": "b"})
        assert status == 200
