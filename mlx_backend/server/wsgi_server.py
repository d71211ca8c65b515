"""The WSGI server: cheroot, with what a server of long streams needs from it.

    a thread for every request that the engine may hold, and some to spare, so that /health and /v1/models answer
    at once while all of those wait; a request takes a thread only when all of it has arrived (receiver.py)
    errors of HTTP itself (a broken request line, a header too long) with the application's error body
    `environ[ON_DISCONNECT]`, with which an application hears at once that its client has disconnected

Knows sockets and WSGI; of the application only what `Application` says.
"""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from cheroot import wsgi
from cheroot.makefile import MakeFile
from cheroot.server import HTTPConnection, HTTPRequest

from mlx_backend import __version__
from mlx_backend.server.disconnects import DisconnectWatcher
from mlx_backend.server.fair_dispatch import FairDispatch
from mlx_backend.server.file_limit import connections_within_file_limit
from mlx_backend.server.receiver import Receiver
from mlx_backend.server.response_writer import STALL_SECONDS, ResponseWriter
from mlx_backend.server.tls import TlsSocket
from mlx_backend.server.worker_queue import WorkerQueue

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.server.receive_limits import Admission, ReceiveLimits
    from mlx_backend.server.received import Received
    from mlx_backend.server.request_framing import RequestHead
    from mlx_backend.server.tls import TlsContext

log = logging.getLogger(__name__)

ON_DISCONNECT = "mlx_backend.on_disconnect"
SPARE_THREADS = 16
"""Half of them are for light requests alone; of the other half some are never one client's."""
BACKLOG = 512
_END_SECONDS = 1
"""How long a request whose connection was ended may take to notice it."""
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Application(Protocol):
    """What is served."""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        ...

    def error_body(self, status: int, message: str) -> bytes:
        """Return the JSON body of an error that is found before there is a request to hand over."""
        ...

    def admission(self, head: RequestHead, address: str) -> tuple[Admission, str]:
        """Say by its head how a request is to be answered, and whose it is.

        Called in the thread that receives; raises nothing.
        """
        ...


class _Request(HTTPRequest):
    """Cheroot's own errors get the application's body; a connection whose request did not arrive whole is closed."""

    def send_headers(self) -> None:
        if not self.conn.received.is_whole:
            self.close_connection = True  # the rest of the body would be taken for the next request
        super().send_headers()

    def simple_response(self, status: str, msg: str = "") -> None:
        code, _, reason = str(status).partition(" ")
        self.close_connection = True
        if not reason:
            super().simple_response(status, msg)
            return
        with suppress(OSError):
            self.conn.wfile.write(_refusal(self.server, int(code), msg or reason))


def _refusal(server: Any, status: int, message: str) -> bytes:
    """Return the whole response with which a request is refused before the application sees it."""
    payload: bytes = server.wsgi_app.error_body(status, message)
    head = (
        f"{server.protocol} {status} {_REASONS.get(status, 'Refused')}\r\nContent-Type: application/json\r\n"
        f"Server: {server.server_name}\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + payload


def _make_file(connection: Any, mode: str, buffer_size: int) -> Any:
    """Make a file of one direction of a connection. What is received, the receiver puts in place of the other."""
    return ResponseWriter(connection) if "w" in mode else MakeFile(connection, mode, buffer_size)


class _Connection(HTTPConnection):
    """A connection whose requests the receiver has read before cheroot sees them."""

    RequestHandlerClass = _Request
    received: Received

    def close(self) -> None:
        """Give the connection back, to be closed."""
        self.server.receiver.finished(self)

    @property
    def is_handshaking(self) -> bool:
        """Whether TLS has yet to begin."""
        return isinstance(self.socket, TlsSocket) and self.socket.is_handshaking

    def close_socket(self) -> None:
        """Close the socket, at once."""
        with suppress(OSError):
            self.socket.close()


class _Gateway(wsgi.Gateway_10):
    """Adapts cheroot's environment to werkzeug, and adds ON_DISCONNECT."""

    def get_environ(self) -> Any:
        environ = super().get_environ()  # type: ignore[no-untyped-call]  # cheroot has no types
        watcher, connection = self.req.server.disconnects, self.req.conn.socket
        del environ["wsgi.input_terminated"]  # werkzeug looks whether the key is there, not at its value
        # cheroot does not decode these; clients write the slash in a model's name so.
        environ["PATH_INFO"] = re.sub("%2F", "/", environ["PATH_INFO"], flags=re.IGNORECASE)
        if self.req.server.tls is not None:
            environ["wsgi.url_scheme"] = "https"
        environ["SERVER_NAME"] = str(self.req.server.bind_addr[0])  # not the request's Host
        environ[ON_DISCONNECT] = lambda callback: watcher.watching(connection, callback)
        return environ


class Server(wsgi.Server):
    """`prepare()` binds and raises OSError; `serve()` runs until `stop()` is called from another thread."""

    ConnectionClass = _Connection
    receiver: Receiver

    def __init__(
        self,
        host: str,
        port: int,
        app: Application,
        *,
        requests: int,
        limits: ReceiveLimits,
        shutdown_seconds: int,
        tls: TlsContext | None = None,
    ) -> None:
        super().__init__(
            (host, port),
            app,
            numthreads=requests + SPARE_THREADS,
            server_name=f"mlx-backend/{__version__}",
            request_queue_size=BACKLOG,
            timeout=STALL_SECONDS,
            shutdown_timeout=shutdown_seconds,
        )
        # cheroot's own goes round: a hundred requests, one after the other, would use a hundred threads.
        queue = self.requests._queue = WorkerQueue()
        self.requests.get = queue.get
        self.gateway = _Gateway
        self.tls = tls
        self.disconnects = DisconnectWatcher()
        self.max_request_header_size = limits.max_head_bytes
        self._limits = limits
        self._requests = requests

    def prepare(self) -> None:
        """Bind, listen and start the threads."""
        super().prepare()
        self._connections.close()  # type: ignore[has-type]  # cheroot's own; nothing has been accepted yet
        limits = self._limits
        connections = connections_within_file_limit(limits.max_connections)
        if connections < limits.max_connections:
            limits = replace(
                limits,
                max_connections=connections,
                max_connections_of_address=min(limits.max_connections_of_address, (connections + 1) // 2),
            )
        self.receiver = self._connections = Receiver(
            self.socket,
            limits,
            heavy=FairDispatch(self._requests + SPARE_THREADS // 2, self._requests + SPARE_THREADS // 4),
            connect=self._connect,
            admit=self.wsgi_app.admission,
            dispatch=self._dispatch,
            refusal=lambda status, message: _refusal(self, status, message),
        )
        self.disconnects.start()

    def stop(self) -> None:
        """Stop accepting, give running requests `shutdown_seconds`, close what is left.

        Threads that do not notice, because foreign code computes in them, are not waited for.
        """
        if not self.ready:
            return
        # cheroot waits for its threads without a limit; what is still sent has to be ended from here.
        stopping = threading.Thread(target=self._stop_serving, name="stop", daemon=True)
        stopping.start()
        stopping.join(self.shutdown_timeout)
        if stopping.is_alive():
            self.receiver.abort()
            stopping.join(_END_SECONDS)
        self.disconnects.stop()

    def _stop_serving(self) -> None:
        try:
            super().stop()
        except Exception:
            log.exception("The HTTP server could not be stopped in order; its connections are ended.")
            self.receiver.abort()
            self.requests.stop(self.shutdown_timeout)  # which was not reached

    def _connect(self, accepted: socket.socket, address: Any) -> _Connection:
        tls = self.tls
        channel = accepted if tls is None else tls.wrap(accepted)
        connection = _Connection(self, channel, _make_file)
        connection.remote_addr, connection.remote_port = address[:2]
        return connection

    def _dispatch(self, connection: Any) -> None:
        connection.socket.settimeout(self.timeout)
        self.process_conn(connection)

    @property
    def url(self) -> str:
        """The address it listens on."""
        host, port = self.bind_addr
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Send cheroot's log to this module's logger."""
        # A client that disconnects in mid-reply is not an error.
        if traceback and level < logging.ERROR:
            level, traceback = logging.DEBUG, False
        log.log(level, "%s", msg, exc_info=traceback)
