"""A web site for tests, on a real socket: each path answers with bytes of the test's own, or as a function does."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    type Answer = bytes | Callable[[socket.socket], object]


def found(body: bytes, *headers: str) -> bytes:
    """A whole response with a body."""
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def moved(location: str, status: int = 302) -> bytes:
    """A redirect."""
    return f"HTTP/1.1 {status} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


class PictureSite:
    """Serves `answers` by path; `heads` are the requests it got. A connection that says nothing is counted too."""

    def __init__(
        self, answers: Mapping[str, Answer], host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        self.answers = dict(answers)
        self.heads: list[str] = []
        self.connections = 0
        self.has_ended = threading.Event()
        self._tls = tls
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]

    def url(self, path: str = "/a.png", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.has_ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._threads:
            each.join()

    def _accept(self) -> None:
        while not self.has_ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (byte := connection.recv(1)):
                    return
                head += byte
            self.heads.append(head.decode())
            answer = self.answers[head.split()[1].decode()]
            if callable(answer):
                answer(connection)
            else:
                connection.sendall(answer)
