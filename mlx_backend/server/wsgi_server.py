"""The WSGI server: cheroot, with what a server of long streams needs from it.

    a thread for every request that the engine may hold, and some to spare, so that /health and /v1/models answer
    at once while all of those wait; a connection takes a thread only when it has sent something
    errors that cheroot itself finds (a broken request line, a header too long) with the application's error body
    `environ[ON_DISCONNECT]`, with which an application hears at once that its client has disconnected

Knows sockets and WSGI; of the application only what `Application` says.
"""

from __future__ import annotations

import logging
import re
import selectors
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from cheroot import wsgi
from cheroot.server import HTTPConnection, HTTPRequest

from mlx_backend import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

log = logging.getLogger(__name__)

ON_DISCONNECT = "mlx_backend.on_disconnect"
SPARE_THREADS = 16
BACKLOG = 512
IDLE_SECONDS = 60
MAX_IDLE_CONNECTIONS = 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_READ_BYTES = 64 * 1024 * 1024
_PIECE = 64 * 1024


class Application(Protocol):
    """What is served."""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        ...

    def error_body(self, status: int, message: str) -> bytes:
        """Return the JSON body of an error that cheroot finds before there is a request to hand over."""
        ...


class DisconnectWatcher:
    """One thread that watches the sockets of running requests and says when the other end has closed.

    A client that disconnects closes its socket, and the socket becomes readable with nothing to read. Without this
    thread nobody would look: not while a request is queued, not during prefill, and for a reply that is not
    streamed, never.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="disconnect-watcher", daemon=True)
        self._running = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and join it."""
        self._running = False
        self._wake.send(b"x")
        self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    @contextmanager
    def watching(self, connection: socket.socket, on_disconnect: Callable[[], None]) -> Iterator[None]:
        """Call `on_disconnect` from the watcher's thread, once, if the other end closes the connection meanwhile."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, on_disconnect)
        self._wake.send(b"x")  # not every selector notices what is registered while it waits
        try:
            yield
        finally:
            self._unregister(connection)

    def _unregister(self, connection: socket.socket) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket):
                    self._check(key.fileobj, key.data)

    def _check(self, connection: socket.socket, on_disconnect: Callable[[], None]) -> None:
        # Readable: closed, or the client has sent its next request early, and then nothing can be told from here.
        self._unregister(connection)
        try:
            is_closed = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            is_closed = False
        except OSError:
            is_closed = True
        if is_closed:
            on_disconnect()


class _Request(HTTPRequest):
    """Cheroot's own errors get the application's body, and no request body is left half read."""

    def send_headers(self) -> None:
        # A client that is still sending would get a reset in place of the response, and the rest of its body
        # would be taken for its next request. So read on, but not for ever.
        if (b"Connection", b"close") in self.outheaders or not self._drain_body():
            self.close_connection = True
        super().send_headers()

    def _drain_body(self) -> bool:
        try:
            while self.rfile.read(_PIECE):
                pass
        except (OSError, ValueError):  # the limit, a broken chunk, or a closed connection
            return False
        return True

    def simple_response(self, status: str, msg: str = "") -> None:
        code, _, reason = str(status).partition(" ")
        self.close_connection = True
        if not reason:
            super().simple_response(status, msg)
            return
        payload = self.server.wsgi_app.error_body(int(code), msg or reason)
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
    """Adapts cheroot's environment to werkzeug, and adds ON_DISCONNECT."""

    def get_environ(self) -> Any:
        environ = super().get_environ()  # type: ignore[no-untyped-call]
        watcher, connection = self.req.server.disconnects, self.req.conn.socket
        if not environ["wsgi.input_terminated"]:
            del environ["wsgi.input_terminated"]  # werkzeug looks whether the key is there, not at its value
        # cheroot does not decode these; clients write the slash in a model's name so.
        environ["PATH_INFO"] = re.sub("%2F", "/", environ["PATH_INFO"], flags=re.IGNORECASE)
        environ["SERVER_NAME"] = str(self.req.server.bind_addr[0])  # not the request's Host
        environ[ON_DISCONNECT] = lambda callback: watcher.watching(connection, callback)
        return environ


class Server(wsgi.Server):
    """`prepare()` binds and raises OSError; `serve()` runs until `stop()` is called from another thread."""

    ConnectionClass = _Connection
    keep_alive_conn_limit = MAX_IDLE_CONNECTIONS
    max_request_header_size = MAX_HEADER_BYTES
    max_request_body_size = MAX_READ_BYTES  # the application's own limit is far below

    def __init__(
        self, host: str, port: int, app: Application, *, requests: int, shutdown_seconds: int
    ) -> None:
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
        self.disconnects = DisconnectWatcher()

    def prepare(self) -> None:
        """Bind, listen and start the threads."""
        super().prepare()
        self.disconnects.start()

    def stop(self) -> None:
        """Stop accepting, give running requests `shutdown_seconds`, close what is left."""
        running = self.ready
        super().stop()
        if running:
            self.disconnects.stop()

    @property
    def url(self) -> str:
        """The address it listens on."""
        host, port = self.bind_addr
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def process_conn(self, conn: Any) -> None:
        """Give a connection a thread once it has sent something; an idle one waits in the selector."""
        if conn.last_used is None:
            self._connections.put(conn)  # type: ignore[attr-defined]
        else:
            super().process_conn(conn)

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Send cheroot's log to this module's logger."""
        # A client that disconnects in mid-reply is not an error.
        if traceback and level < logging.ERROR:
            level, traceback = logging.DEBUG, False
        log.log(level, "%s", msg, exc_info=traceback)
