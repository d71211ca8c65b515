"""What a worker does for one request: waitress's tasks, with what an application may ask for.

    `environ[ON_DISCONNECT]`, with which an application hears at once that its client has disconnected
    `environ[HOLD_BODY]`, with which it counts what it makes of a body that is compressed, and
    `environ[HAS_ROOM_FOR]`, with which it asks whether a large answer may wait for its client to read it
    `environ[PUMP]`, for an answer that waits for an engine: an application that has nothing to send yields b"", and
    calls its `resume` when it has; one thread writes all of these (pump.py)
    `environ[UPGRADE]`, with which an application makes a connection a WebSocket; what comes then are requests, with
    that in `environ[WEBSOCKET]` (websocket.py)

An error that is found before the application is asked has the application's error body. Of what is certain of an
answer before it is known, `expect` of the connection sends some (wsgi_server.py says why); a task leaves that out.
Knows WSGI; of the connection, `channel`, only what it calls.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from waitress.task import ErrorTask, Task, WSGITask

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.server.pump import Pump
    from mlx_backend.server.websocket import WebSocket

log = logging.getLogger(__name__)

ON_DISCONNECT = "mlx_backend.on_disconnect"
HOLD_BODY = "mlx_backend.hold_body"
HAS_ROOM_FOR = "mlx_backend.has_room_for"
PUMP = "mlx_backend.pump"
UPGRADE = "mlx_backend.upgrade"
WEBSOCKET = "mlx_backend.websocket"
_WRITE = "mlx_backend.write"
CERTAIN_BEGINNING = b"HTTP/1."
_CERTAIN_LENGTH = b"0000000"


class Application(Protocol):
    """What is served."""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        ...

    def error_body(self, status: int, message: str) -> bytes:
        """Return the JSON body of an error that is found before there is a request to hand over."""
        ...


class PumpedAnswer:
    """An application's answer: from where it has to wait on, the writer writes it and the worker waits for the end."""

    def __init__(self, pieces: Iterable[bytes], environ: WSGIEnvironment) -> None:
        self._pieces = pieces
        self._pump: Pump = environ[PUMP]
        self._write = environ[_WRITE]

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self._pieces)
        for piece in pieces:
            if not piece:
                self._pump.run(pieces, self._write)
                return
            yield piece

    def close(self) -> None:
        if hasattr(self._pieces, "close"):
            self._pieces.close()


class _SentTask(Task):
    channel: Any

    def build_response_header(self) -> bytes:
        """Return the head, without what of it has been sent already."""
        head: bytes = super().build_response_header()
        return head[self.channel.expect(b"") :]

    def write(self, piece: bytes) -> None:
        """Send a part of the body, and first the head."""
        is_head = not self.wrote_header
        super().write(piece)
        if is_head and self.chunked_response:
            self.channel.expect(_CERTAIN_LENGTH)

    def finish(self) -> None:
        """Send the end of an answer in chunks."""
        self.channel.expect(b"")
        super().finish()


class RequestTask(_SentTask, WSGITask):
    """Answers a request as the application does."""

    _websocket: WebSocket | None = None

    def get_environment(self) -> Any:
        """Return what the application gets of the request."""
        environ = super().get_environment()
        environ[UPGRADE] = self._upgrade
        environ[ON_DISCONNECT] = self.channel.watching
        environ[HOLD_BODY] = self.request.hold_more
        environ[HAS_ROOM_FOR] = self.channel.has_room_for
        environ[PUMP] = self.channel.pump
        environ[_WRITE] = lambda pieces: self.write(b"".join(pieces))
        return environ

    def _upgrade(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    def build_response_header(self) -> bytes:
        """Return the head. That of a WebSocket's handshake is the last."""
        if self._websocket is None:
            return super().build_response_header()
        self.channel.become(self._websocket)
        return self._websocket.accepted

    def set_close_on_finish(self) -> None:
        """Have the connection closed; not after an answer in chunks, of which the client sees the end.

        waitress closes it then. What a client wants closed is known before it is known that there are chunks.
        """
        if not self.chunked_response:
            super().set_close_on_finish()


class MessageTask(RequestTask):
    """Answers a message of a WebSocket: by messages, without heads."""

    def get_environment(self) -> Any:
        """Return what the application gets of the message."""
        environ = super().get_environment()
        environ[WEBSOCKET] = self.channel.websocket
        environ["HTTP_CONNECTION"] = "Upgrade"  # also for one that is cut
        return environ

    def write(self, piece: bytes) -> None:
        """Send a part of the answer."""
        self.wrote_header = True
        self.content_bytes_written += len(piece)
        self.channel.write_soon(self.channel.websocket.messages(piece))

    def finish(self) -> None:
        """Close the connection after a message of which not all was received."""
        if self.request.is_cut:
            self.channel.write_soon(self.channel.websocket.close("The message is too large.", 413))
            self.close_on_finish = True

    def set_close_on_finish(self) -> None:
        """Keep the connection."""


class RefusalTask(_SentTask, ErrorTask):
    """Answers a request that the application does not get."""

    def execute(self) -> None:
        """Answer with the application's error body."""
        status, message = self.request.error.code, str(self.request.error.body)
        log.info("refused %d %s", status, message)
        if self.channel.websocket is not None:
            self.channel.write_soon(self.channel.websocket.close(message, status))
            self.wrote_header = self.close_on_finish = True
            return
        body = self.channel.server.app.error_body(status, message)
        self.version = "1.1"
        self.status = f"{status} {HTTPStatus(status).phrase}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(b"" if getattr(self.request, "command", None) == "HEAD" else body)
