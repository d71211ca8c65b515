"""A server that sends exactly the given bytes, packet by packet, and notices when its client disconnects."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any, Self

from free_ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TLS_HANDSHAKE = 0x16
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


def at_an_unused_port[Server](make: Callable[[tuple[str, int]], Server]) -> Server:
    """Make a server at a port that no server had before: a plugin remembers what answered at an address."""
    return make(("127.0.0.1", free_port()))


def status(line: str, body: bytes = b"", *headers: str) -> bytes:
    """A whole answer with a status line, such as `503 Service Unavailable`."""
    head = [f"HTTP/1.1 {line}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """A chunk as an event."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n".encode()


DONE = event({}, "stop") + b"data: [DONE]\n\n"


class RawServer:
    """Answers one connection after another, each with a list of pieces; `None` waits for the client to disconnect.

    `requests` holds heads and bodies as they came; `left` is set when a client disconnects before the end. With
    `chats_only` every GET is a 404 and uses up no answer: the plugin probes servers first.
    """

    def __init__(self, *answers: Sequence[bytes | None], chats_only: bool = False) -> None:
        self._chats_only = chats_only
        self._answers = answers
        self._socket = at_an_unused_port(socket.create_server)
        self.requests: list[bytes] = []
        self.left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, as a base URL without /v1."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        self._socket.close()

    def _serve(self) -> None:
        answers = list(self._answers)
        while answers:
            connection, _ = self._socket.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                request = read_request(connection)
                if self._chats_only and not request.startswith(b"POST /v1/chat"):
                    connection.sendall(status("404 Not Found"))
                    continue
                self.requests.append(request)
                self._answer(connection, answers.pop(0))

    def _answer(self, connection: socket.socket, pieces: Sequence[bytes | None]) -> None:
        try:
            for piece in pieces:
                if piece is not None:
                    connection.sendall(piece)
                elif connection.recv(1) == b"":
                    self.left.set()
        except OSError:
            self.left.set()


def read_request(connection: socket.socket) -> bytes:
    """Read one request, head and body."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65_536)
        if not request or request[0] == TLS_HANDSHAKE:
            return request
    head, _, body = request.partition(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ),
        0,
    )
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body
