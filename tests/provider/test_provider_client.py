"""Leaving in mid-answer: closing the client's iterator closes the connection, which is how a server learns of it."""

from __future__ import annotations

import socket
import threading

import pytest

from dify_mlx_provider.client import Client, Unavailable
from dify_mlx_provider.credentials import Credentials

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\n'
)


class Server:
    """Answers one request with the beginning of a stream, then waits for the client to leave."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.left = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, self._socket:
            request = b""
            while not request.endswith(b"{}"):
                request += connection.recv(65_536)
            connection.sendall(ANSWER)
            if connection.recv(1) == b"":
                self.left.set()

    def join(self) -> None:
        self._thread.join(30)


def test_closing_the_iterator_leaves_the_server() -> None:
    server = Server()
    chunks = Client(Credentials(base_url=server.address)).chat({})
    assert next(iter(chunks))["choices"][0]["delta"] == {"content": "Hi"}
    assert not server.left.is_set()
    chunks.close()
    server.join()
    assert server.left.is_set()


def test_a_server_that_falls_silent_is_named_and_left() -> None:
    server = Server()
    chunks = Client(Credentials(base_url=server.address, timeout=0.2)).chat({})
    with pytest.raises(Unavailable, match=r"said nothing for 0\.2 seconds"):
        list(chunks)
    server.join()
    assert server.left.is_set()
