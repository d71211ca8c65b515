"""The WSGI server: cheroot, with what a server of long streams needs from it.

    a thread for every request that the engine may hold, and some more, so that /health and /v1/models answer
    at once while all of those wait; a connection takes a thread only when it has something to say
    errors that cheroot itself finds (a broken request line, a header too long) in OpenAI's shape
    `environ[WATCH]`, with which an application hears at once that its client has left

Knows sockets and WSGI; knows nothing of the application.
"""

from __future__ import annotations

import json
import logging
import re
import selectors
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cheroot import wsgi
from cheroot.server import HTTPConnection, HTTPRequest

from mlx_backend import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

WATCH = "mlx_backend.watch"
SPARE_THREADS = 16
BACKLOG = 512
IDLE_SECONDS = 60
KEPT_CONNECTIONS = 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_READ_BYTES = 64 * 1024 * 1024
_PIECE = 64 * 1024


class HangupWatch:
    """One thread that watches the sockets of running requests, and says when the other end is closed.

    A client that leaves closes its socket, and the socket becomes readable with nothing to read. Without this
    thread nobody would look: not while a request waits in the queue, not while its prompt is read, and for a
    reply that is not streamed, never.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="hangup-watch", daemon=True)
        self._running = True

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._running = False
        self._wake.send(b"x")
        self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    @contextmanager
    def watching(self, connection: socket.socket, left: Callable[[], None]) -> Iterator[None]:
        """Call `left` from the watch's thread, once, if the other end closes the connection meanwhile."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, left)
        self._wake.send(b"x")  # not every selector looks at what was registered while it sleeps
        try:
            yield
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._look(key.fileobj, key.data)

    def _look(self, connection: socket.socket, left: Callable[[], None]) -> None:
        # Readable: closed, or the next request has come early (then there is nothing more to learn here).
        self._forget(connection)
        try:
            gone = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            gone = False
        except OSError:
            gone = True
        if gone:
            left()


class _Request(HTTPRequest):
    """Cheroot's own refusals in the shape that clients of this server read, and no body left half-read."""

    def send_headers(self) -> None:
        # A client that is still sending would hear a reset in place of the reply, and what it sends would be
        # taken for its next request. So read on, but not for ever.
        if (b"Connection", b"close") in self.outheaders or not self._read_to_the_end():
            self.close_connection = True
        super().send_headers()

    def _read_to_the_end(self) -> bool:
        try:
            while self.rfile.read(_PIECE):
                pass
        except (OSError, ValueError):  # the limit, a broken chunk, or nobody there
            return False
        return True

    def simple_response(self, status: str, msg: str = "") -> None:
        code, _, reason = str(status).partition(" ")
        self.close_connection = True
        if not reason:
            super().simple_response(status, msg)
            return
        body = {"message": msg or reason, "type": "invalid_request_error", "param": None, "code": None}
        payload = json.dumps({"error": body}).encode()
        head = (
            f"{self.server.protocol} {code} {reason}\r\nContent-Type: application/json\r\n"
            f"Server: {self.server.server_name}\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        with suppress(OSError):
            self.conn.wfile.write(head.encode("latin-1") + payload)


class _Connection(HTTPConnection):
    RequestHandlerClass = _Request


class _Gateway(wsgi.Gateway_10):
    """Hands the application a way to hear of its client's leaving."""

    def get_environ(self) -> Any:
        environ = super().get_environ()  # type: ignore[no-untyped-call]
        watch, connection = self.req.server.hangups, self.req.conn.socket
        # cheroot leaves these alone; clients write the slash of a model's name so.
        environ["PATH_INFO"] = re.sub("%2F", "/", environ["PATH_INFO"], flags=re.IGNORECASE)
        environ["SERVER_NAME"] = str(self.req.server.bind_addr[0])  # not what the header calls it
        environ[WATCH] = lambda left: watch.watching(connection, left)
        return environ


class Server(wsgi.Server):
    """`prepare()` binds and raises OSError; `serve()` runs until `stop()` is called from another thread."""

    ConnectionClass = _Connection
    keep_alive_conn_limit = KEPT_CONNECTIONS
    max_request_header_size = MAX_HEADER_BYTES
    max_request_body_size = MAX_READ_BYTES  # the application's own limit is far below

    def __init__(self, host: str, port: int, app: Any, *, requests: int, shutdown_seconds: int) -> None:
        super().__init__(
            (host, port),
            app,
            numthreads=requests + SPARE_THREADS,
            server_name=f"mlx-backend/{__version__}",
            request_queue_size=BACKLOG,
            timeout=IDLE_SECONDS,
            shutdown_timeout=shutdown_seconds,
        )
        self.gateway = _Gateway
        self.hangups = HangupWatch()

    def prepare(self) -> None:
        """Bind, listen and start the threads."""
        super().prepare()
        self.hangups.start()

    def stop(self) -> None:
        """Stop accepting, give the running requests their time, close what is left."""
        running = self.ready
        super().stop()
        if running:
            self.hangups.stop()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.bind_addr
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def process_conn(self, conn: Any) -> None:
        """Give a connection a thread once it has sent something; a silent one waits in the selector."""
        if conn.last_used is None:
            self._connections.put(conn)  # type: ignore[attr-defined]
        else:
            super().process_conn(conn)

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Send cheroot's log the way of all others."""
        # A client that leaves in mid-reply is no error of ours.
        if traceback and level < logging.ERROR:
            level, traceback = logging.DEBUG, False
        log.log(level, "%s", msg, exc_info=traceback)
