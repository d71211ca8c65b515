"""The WSGI server: waitress, with what a server of long streams needs from it.

waitress receives and sends in one thread, its loop; a request takes a thread of its own only when all of it has
arrived. So a client that sends slowly costs a socket. Added to that here:

    times for a request's head and body, and the rate of a body; how slowly an answer may be read
    connections altogether and of one address; the bytes received and not yet answered, and those not yet read
    `environ[ON_DISCONNECT]`, with which an application hears at once that its client has disconnected
    `environ[HOLD_BODY]`, with which it counts what it makes of a body that is compressed, and
    `environ[HAS_ROOM_FOR]`, with which it asks whether a large answer may wait for its client to read it
    `environ[PUMP]`, for an answer that waits for an engine: an application that has nothing to send yields b"", and
    calls its `resume` when it has; one thread writes all of these (pump.py)
    `environ[UPGRADE]`, with which an application makes a connection a WebSocket; what comes then are requests, with
    that in `environ[WEBSOCKET]` (websocket.py)
    errors of HTTP itself with the application's error body
    a stop that gives running requests a moment and then ends them
    an answer for a client that only sends no more

A client that sends no more may wait for its answer, having shut down the sending half of its connection, or may be
gone, having closed it: the system reports both alike. Only something that is sent tells one from the other, for the
system of a client that is gone answers it with a reset. So what is certain of an answer before it is known is sent
then, a byte at a time: that it begins with `HTTP/1.`, and between the chunks of a stream zeros, with which the next
length may begin.

Knows sockets and WSGI; of the application only what `Application` says.
"""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, Task, WSGITask
from waitress.utilities import Error, RequestEntityTooLarge

from mlx_backend import __version__
from mlx_backend.server.auth import TrustedProxies, network_of
from mlx_backend.server.pump import Pump, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

    from mlx_backend.server.websocket import WebSocket

log = logging.getLogger(__name__)

ON_DISCONNECT = "mlx_backend.on_disconnect"
HOLD_BODY = "mlx_backend.hold_body"
HAS_ROOM_FOR = "mlx_backend.has_room_for"
PUMP = "mlx_backend.pump"
UPGRADE = "mlx_backend.upgrade"
WEBSOCKET = "mlx_backend.websocket"
_WRITE = "mlx_backend.write"
TOO_MANY_BODIES = "Too many large requests are arriving at once; try again later."
SPARE_THREADS = 64
"""Threads in addition to one for each request that an engine may hold.

Requests of one client that wait may occupy a quarter of them, those of all clients three quarters: what is answered or
refused at once always finds one.
"""
BACKLOG = 512
OTHER_FILES = 192
"""Open files that are no connections: a model's shards, caches on disk, sockets between threads, standard streams."""
OTHER_THREADS = 48
"""Threads that answer no request: of engines, loads, fetches of images and libraries."""
MIN_CONNECTIONS = 16
_NAME = f"mlx-backend/{__version__}"
_PIECE = 64 * 1024
_BUFFER_BYTES = 256 * 1024
"""An answer waits for its client in pieces of this size, each of which is freed once it is sent."""
_FREE_FRAMING = 16 * 1024
"""Bytes between the parts of a body that comes in chunks: each chunk costs as much as some kilobytes of body."""
_FRAMING_SHARE = 8
"""Bytes of such a body that allow one more byte between its parts. Chunks of 64 bytes and more stay below it."""
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a connection over TLS, which would never send the end of a head."""
_CERTAIN_BEGINNING = b"HTTP/1."
_CERTAIN_LENGTH = b"0000000"
_PROBE_CHECK_SECONDS = 0.02
_PROBE_CHECKS_LAST = 1.0
"""For so long after a connection was half closed a reset is looked for that often; later at each check."""
_FIRST_PROBE_PAUSE = 0.1
_PROBE_BACKOFF = 3
"""A proxy may pass on the end first, and the reset in answer to a later byte: so there are several bytes."""
_TOO_MANY = "There are too many connections to this server; try again later."
_ACCEPTED_AT_ONCE = 64
_RETRY_ACCEPT_SECONDS = 0.5
_LOG_SECONDS = 60.0
_END_SECONDS = 1.0
"""How long requests whose connections were ended may take to notice it."""


class Application(Protocol):
    """What is served."""

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        ...

    def error_body(self, status: int, message: str) -> bytes:
        """Return the JSON body of an error that is found before there is a request to hand over."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How long a client may take, and how much may be held for clients. Times in seconds."""

    max_body_bytes: int
    max_head_bytes: int = 64 * 1024
    idle_seconds: float = 60.0
    """Between two requests of a connection, and before its first."""
    websocket_idle_seconds: float = 600.0
    """Between what comes over a WebSocket: an agent keeps it while it runs its tools."""
    head_seconds: float = 15.0
    """From the first byte of a request to the end of its head."""
    body_seconds: float = 300.0
    """For a whole body, however fast it comes."""
    stalled_seconds: float = 20.0
    min_bytes_per_second: int = 16 * 1024
    """A body may take `stalled_seconds`, and one second more for each time that this many bytes were received."""
    unread_seconds: float = 60.0
    min_bytes_read_per_second: int = 128
    """An answer may wait `unread_seconds` for its reader, who earns a second of them back by reading this many bytes.

    A stream has 200 bytes a token and more: who takes less than this is slower than the slowest of models.
    """
    discard_seconds: float = 5.0
    """How long to go on receiving what is refused."""
    max_connections: int = 2048
    max_connections_of_address: int = 1024
    """Or of an IPv6 network, which has one owner."""
    trusted_proxies: TrustedProxies = field(default_factory=TrustedProxies)
    """Their connections are those of many clients, and not limited by address."""
    max_held_bytes: int = 512 << 20
    """Bodies that have arrived and are not answered, altogether. One address may hold half of it.

    So much of answers may wait for their readers, too.
    """


class _Refusal(Error):
    """A request that is refused before the application sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code = status


class _Request(HTTPRequestParser):
    """A request that is being received.

    Holds no reference to its connection, so its body is freed as soon as the request is.
    """

    error: Any

    def __init__(self, server: Server, network: str) -> None:
        super().__init__(server.adj)
        self.since = time.monotonic()
        """When its first byte came; of its body, once the head is there."""
        self._server = server
        self._network = network
        self._guard = threading.Lock()
        self._held = 0
        self._is_over = False
        self.is_cut = False
        """Whether it is answered before all of it has arrived."""

    def received(self, piece: bytes) -> int:
        """Take the next bytes; return how many of them belong to this request."""
        had_head = self.headers_finished
        if not had_head and not self.header_plus and piece[:1] == _TLS_HANDSHAKE:
            self.refuse(400, "This address speaks http, not https: write http:// in the URL.")
            return len(piece)
        consumed: int = super().received(piece)
        if self.headers_finished and not had_head:
            self.since = time.monotonic()
            self._check_head()
        if isinstance(self.error, RequestEntityTooLarge):  # the application says how much is allowed
            self.error, self.is_cut = None, True
            self.headers["CONNECTION"] = "close"
            self.headers["CONTENT_LENGTH"] = str(max(self.content_length, self.body_bytes_received))
        elif self.error is None:
            self._check_body()
        if self.completed:
            self.expect_continue = False  # no more of it is wanted
        return consumed

    def _check_head(self) -> None:
        if self.error is not None or self.empty:
            return
        if self.version not in ("1.0", "1.1"):
            self.refuse(505, f"HTTP/{self.version} is not supported; send HTTP/1.1.")
        elif self.chunked and "CONTENT_LENGTH" in self.headers:
            self.refuse(400, "A request has a Content-Length or a Transfer-Encoding, not both.")

    def _check_body(self) -> None:
        if self.chunked:
            body = len(self.body_rcv)
            if self.body_bytes_received - body > _FREE_FRAMING + body // _FRAMING_SHARE:
                self.refuse(400, "The body comes in too many chunks; send larger ones.")
        if self._hold(self.body_bytes_received) and not self.completed:
            self.refuse(503, TOO_MANY_BODIES)

    def refuse(self, status: int, message: str) -> None:
        """Have it answered with an error, and receive no more of it."""
        self.error = _Refusal(status, message)
        self.completed = self.is_cut = True

    def seconds_allowed(self, limits: ConnectionLimits) -> float:
        """Return how long the part may take that is being received: its head, or its body so far."""
        if not self.headers_finished:
            return limits.head_seconds
        earned = self.body_bytes_received / limits.min_bytes_per_second
        return min(limits.body_seconds, limits.stalled_seconds + earned)

    def close(self) -> None:
        """Let the body go: the request has been answered."""
        super().close()
        self.forget()

    def forget(self) -> None:
        """Count its body no longer."""
        self._hold(0, is_last=True)

    def hold_more(self, count: int) -> bool:
        """Hold this many bytes in addition to what was received; return whether that is too much."""
        return self._hold(self.body_bytes_received + count)

    def _hold(self, count: int, *, is_last: bool = False) -> bool:
        """Count the bytes of the body that are held now; return whether that is too much."""
        with self._guard:  # a worker counts what the body becomes, and the loop may forget it
            if self._is_over:
                return False
            more, self._held, self._is_over = count - self._held, count, is_last
        return self._server.hold(self._network, more)


class _PumpedAnswer:
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


class _Answer(Task):
    channel: _Channel

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


class _Task(_Answer, WSGITask):
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


class _MessageTask(_Task):
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
            end = self.channel.websocket.close("The message is too large.", is_too_large=True)
            self.channel.write_soon(end)
            self.close_on_finish = True

    def set_close_on_finish(self) -> None:
        """Keep the connection."""


class _ErrorTask(_Answer, ErrorTask):
    def execute(self) -> None:
        """Answer with the application's error body."""
        status, message = self.request.error.code, str(self.request.error.body)
        log.info("refused %d %s", status, message)
        if self.channel.websocket is not None:
            self.channel.write_soon(self.channel.websocket.close(message))
            self.wrote_header = self.close_on_finish = True
            return
        body = self.channel.server.app.error_body(status, message)
        self.version = "1.1"
        self.status = f"{status} {HTTPStatus(status).phrase}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(b"" if getattr(self.request, "command", None) == "HEAD" else body)


class _Channel(HTTPChannel):
    """A connection. Belongs to the loop, but for `service` and what that calls: a worker answers."""

    task_class = _Task
    error_task_class = _ErrorTask
    request: Any
    will_close: bool

    def __init__(
        self,
        server: Server,
        connection: socket.socket,
        address: Any,
        adj: Adjustments,
        map: Any,
    ) -> None:
        self.network = server.network_of(str(address[0]))
        self._patience = server.limits.unread_seconds
        self._idle_since = time.monotonic()
        self._idle_seconds = server.limits.idle_seconds
        self.websocket: Any = None
        self._is_cut = False
        self._discards_until: float | None = None
        self.watched_events = 0
        self._certain = _CERTAIN_BEGINNING
        self._num_sent = 0  # bytes of it
        self._half_closed_at: float | None = None
        self._next_probe = 0.0
        self._probe_pause = _FIRST_PROBE_PAUSE
        self._on_disconnect: dict[object, Callable[[], None]] = {}
        self.pump = Pump(server.writer)
        super().__init__(server, connection, address, adj, map=map)

    def parser_class(self, _adj: Adjustments) -> _Request:
        """Begin a request."""
        return _Request(self.server, self.network)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request has arrived since the last one was answered."""
        return not self.is_answering and self.request is None

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived whose answer has not been sent."""
        return bool(self.requests or self.total_outbufs_len)

    def recv(self, _size: int) -> bytes:
        """Receive: more at once of a body, less where requests may have been sent ahead."""
        is_body = self.request is not None and self.request.headers_finished
        piece: bytes = super().recv(_PIECE if is_body or self._discards_until else self.adj.recv_bytes)
        return piece

    def readable(self) -> bool:
        """Whether to receive."""
        return self._half_closed_at is None and bool(super().readable())

    def handle_read(self) -> None:
        """Receive. Who sends no more, and waits for an answer, may still be there."""
        may_go_on = self.requests and self._discards_until is None and self.websocket is None
        if may_go_on and self._is_at_end():
            if self._half_closed_at is None:
                self._half_closed_at = time.monotonic()
                self.server.note_half_close(self)
            return
        super().handle_read()

    def received(self, piece: bytes) -> bool:
        """Take what has been received."""
        if self._discards_until is not None:
            return False
        return bool(super().received(piece if self.websocket is None else self._requests_in(piece)))

    def become(self, websocket: WebSocket) -> None:
        """Take what is received from now on for frames."""
        self._idle_seconds = self.server.limits.websocket_idle_seconds
        self.websocket, self.task_class = websocket, _MessageTask

    def _requests_in(self, frames: bytes) -> bytes:
        """Return the requests that frames are; answer those that are none."""
        self._idle_since = time.monotonic()
        requests, reply = self.websocket.receive(frames, len(self.requests))
        self.write_soon(reply)
        if reply and self.websocket.is_closed:  # else a worker has closed it, and ends the connection
            self.handle_close()
            return b""
        return requests

    def send(self, piece: bytes, do_close: bool = True) -> int:
        """Send what there is room for, with which the reader earns time."""
        limits = self.server.limits
        sent: int = super().send(piece, do_close)
        self._patience = min(limits.unread_seconds, self._patience + sent / limits.min_bytes_read_per_second)
        return sent

    def write_soon(self, piece: Any) -> int:
        """Send, or have the loop send what there is no room for now."""
        for start in range(0, len(piece), _BUFFER_BYTES):
            super().write_soon(memoryview(piece)[start : start + _BUFFER_BYTES])
        if self.total_outbufs_len:
            self.server.note_change(self)
        return len(piece)

    def _flush_outbufs_below_high_watermark(self) -> None:
        """Do nothing: waitress has the worker wait for the client here. The server bounds what waits instead."""

    def has_room_for(self, count: int) -> bool:
        """Whether an answer of so many bytes may wait for the client to read it."""
        return self.server.has_room_for(self.network, count)

    def service(self) -> None:
        """Answer the first of the requests that have arrived."""
        self._is_cut = self.requests[0].is_cut or self.requests[0].error is not None
        self._idle_since = time.monotonic()  # before the loop can find the connection idle
        super().service()
        self._close_if_over()
        self.server.note_change(self)
        if not self.connected:
            for request in self.requests:  # which will not be answered
                request.forget()

    def peek(self) -> bytes | None:
        """Return the next byte that was not received yet, nothing if the client has left; None if none has come."""
        try:
            return bytes(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return None
        except (OSError, AttributeError):  # closed meanwhile
            return b""

    def expect(self, certain: bytes) -> int:
        """Note what the answer goes on with in any case; return how much was sent of what was certain before."""
        with self.outbuf_lock:
            sent, self._num_sent, self._certain = self._num_sent, 0, certain
        return sent

    def check_half_closed(self) -> bool:
        """Close the connection if who sends no more is gone; return whether that may become known soon."""
        if self._half_closed_at is None or not self.connected:
            return False
        self._close_if_over()
        now = time.monotonic()
        try:
            is_gone = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            if not is_gone and self.requests and now >= self._next_probe:
                self._probe()
                self._next_probe = now + self._probe_pause
                self._probe_pause *= _PROBE_BACKOFF
        except OSError:
            is_gone = True
        if is_gone:
            self.handle_close()
        return self.connected and now - self._half_closed_at < _PROBE_CHECKS_LAST

    def _probe(self) -> None:
        """Send the next certain byte, unless more than that is about to be sent. May raise OSError."""
        with self.outbuf_lock:
            if not self.total_outbufs_len:
                self._num_sent += self.send(self._certain[self._num_sent :][:1])

    def _close_if_over(self) -> None:
        if self._half_closed_at is not None and not self.requests:
            self.close_when_flushed = True

    def _is_at_end(self) -> bool:
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK) == b"")
        except OSError:
            return False

    def refuse(self, status: int, message: str) -> None:
        """Answer the request that is being received with an error."""
        with self.requests_lock:
            request, self.request = self.request, None
            request.refuse(status, message)
            self.requests.append(request)
        self.server.add_task(self)

    def del_channel(self, map: Any = None) -> None:
        """Forget the socket, which is about to be closed."""
        self.server.unwatch(self)
        super().del_channel(map)

    def handle_close(self) -> None:
        """Close the connection, and tell the application.

        Of a request that was answered before all of it had arrived the rest is received for a while, and not kept: a
        client that still sends would get a reset in place of the answer.
        """
        has_more = self._half_closed_at is None and self._discards_until is None
        if self._is_cut and self.will_close and self.connected and has_more:
            self._discards_until = time.monotonic() + self.server.limits.discard_seconds
            self.will_close = self.close_when_flushed = False
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
            return
        super().handle_close()
        if self.websocket is not None:
            self.websocket.protocol.close()
        self.pump.resume()  # to find out
        if self.request is not None:
            self.request.forget()
        while self._on_disconnect:
            with suppress(KeyError):  # the block has ended meanwhile
                self._on_disconnect.popitem()[1]()

    @contextmanager
    def watching(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` once if the connection is closed within the block, or was before; from any thread."""
        key = object()
        self._on_disconnect[key] = callback
        if not self.connected and self._on_disconnect.pop(key, None) is not None:
            callback()
        try:
            yield
        finally:
            self._on_disconnect.pop(key, None)

    def check(self, seconds: float) -> None:
        """Close or refuse what has taken too long; `seconds` have passed since the last check."""
        limits, now = self.server.limits, time.monotonic()
        self.check_half_closed()
        if not self.connected:  # it has just been closed
            return
        self.pump.resume()  # an answer may have to say that it still comes
        if self._discards_until is not None:
            if now > self._discards_until:
                self.handle_close()
        elif self.total_outbufs_len:
            self._patience -= seconds
            if self._patience <= 0:
                log.info("A client reads its answer too slowly: its connection is closed.")
                self.handle_close()
        elif self.requests:
            self._idle_since = now
        elif self.request is None:
            if now - self._idle_since > self._idle_seconds:
                self.handle_close()
            else:
                with self.outbuf_lock:
                    self.outbufs[-1].prune()  # what was sent
        elif now - self.request.since > self.request.seconds_allowed(limits):
            part = "body" if self.request.headers_finished else "head"
            self.refuse(408, f"The {part} of the request did not arrive in time.")


class _Workers:
    """The threads that answer requests. What comes next goes to the one that became idle last.

    So a server that answers five requests at a time uses five of its hundreds of threads: each that is used keeps its
    stack and what malloc holds for it, as much as the largest request needed that it ever answered.
    """

    def __init__(self, count: int) -> None:
        self._guard = threading.Lock()
        self._tasks: deque[_Channel] = deque()
        self._idle: list[SimpleQueue[_Channel | None]] = []  # the one that waits longest first
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"worker-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads. Raises RuntimeError if the system allows no more."""
        for thread in self._threads:
            thread.start()

    def add_task(self, channel: _Channel) -> None:
        """Have the first request of a connection answered, now or when a thread is idle."""
        with self._guard:
            if not self._idle:
                self._tasks.append(channel)
                return
            worker = self._idle.pop()
        worker.put(channel)

    def stop(self, seconds: float) -> None:
        """End the threads. Those that do not notice, because foreign code computes in them, are not waited for."""
        with self._guard:
            self._is_stopped = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        mine: SimpleQueue[_Channel | None] = SimpleQueue()
        while True:
            with self._guard:
                channel = self._tasks.popleft() if self._tasks else None
                if channel is None and self._is_stopped:
                    return
                if channel is None:
                    self._idle.append(mine)
            channel = channel or mine.get()
            if channel is None:
                return
            try:
                channel.service()
            except (
                BaseException
            ):  # whatever it is, the thread is needed and the client does not wait for ever
                log.exception("A request could not be answered")
                channel.server.trigger.pull_trigger(channel.handle_close)
            del channel  # it would stay until the next


class Server(TcpWSGIServer):
    """Listens from the start; `serve()` runs until `stop()` is called from another thread.

    Raises OSError for an address, and RuntimeError if the system allows too few threads.
    """

    channel_class = _Channel
    active_channels: dict[int, _Channel]
    check_seconds = 0.5
    shutdown_seconds = 1.0
    """How long requests that are being answered may go on after `stop`."""

    def __init__(
        self,
        host: str,
        port: int,
        app: Application,
        *,
        requests: int,
        limits: ConnectionLimits,
    ) -> None:
        """`requests` is how many may be waited for at the same time."""
        self.limits = _within_file_limit(limits)
        self._accept_again = 0.0
        self._warned = -_LOG_SECONDS
        self._guard = threading.Lock()
        self._held: Counter[str] = Counter()
        self._is_stopping = False
        self._has_ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._changed: deque[_Channel] = deque()
        self._half_closed: list[_Channel] = []
        self._is_woken = False
        self._workers = _Workers(requests + SPARE_THREADS)
        self.writer = Writer()
        self.app = app
        self._sockets: dict[int, Any] = {}
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        adjustments = Adjustments(
            ident=_NAME,
            backlog=BACKLOG,
            max_request_header_size=limits.max_head_bytes,
            max_request_body_size=limits.max_body_bytes + 1,
            # Nothing of a request or an answer is written to a disk.
            inbuf_overflow=2 * limits.max_body_bytes + _PIECE,
            outbuf_overflow=1 << 40,
            outbuf_high_watermark=_BUFFER_BYTES,
            channel_request_lookahead=1,  # a connection is read while its request is answered: it may be closed
            log_socket_errors=False,
            clear_untrusted_proxy_headers=False,  # the application knows which proxies are trusted
        )
        try:
            super().__init__(
                lambda environ, start_response: _PumpedAnswer(app(environ, start_response), environ),
                self._sockets,
                dispatcher=self._workers,
                adj=adjustments,
                sockinfo=(family, kind, protocol, address),
            )
        except OSError:
            wasyncore.close_all(self._sockets)
            raise
        self._workers.start()
        self.writer.start()
        _check_room_for_threads()

    def bind_server_socket(self) -> None:
        """Bind; every address is those of IPv4 too."""
        if self.sockinfo[3][0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().bind_server_socket()

    @property
    def url(self) -> str:
        """The address it listens on."""
        host = f"[{self.effective_host}]" if ":" in self.effective_host else self.effective_host
        return f"http://{host}:{self.effective_port}"

    # Running.

    def serve(self) -> None:
        """Accept, receive and send until `stop`."""
        try:
            self._loop()
        finally:
            self._selector.close()
            self._has_ended.set()

    def _loop(self) -> None:
        checked = time.monotonic()
        self._selector.register(self.trigger.socket, selectors.EVENT_READ, self.trigger)
        self._selector.register(self.socket, selectors.EVENT_READ, self)
        while self.accepting or self.active_channels:
            self._is_woken = False
            while self._changed:
                self._watch(self._changed.popleft())
            seconds = _PROBE_CHECK_SECONDS if self._half_closed else self.check_seconds
            for key, events in self._selector.select(seconds):
                # Another connection may have been closed for the sake of one in the same batch.
                if events & selectors.EVENT_READ and key.data.socket is not None:
                    wasyncore.read(key.data)
                if events & selectors.EVENT_WRITE and key.data.socket is not None:
                    wasyncore.write(key.data)
                if isinstance(key.data, _Channel):
                    self._watch(key.data)
            self._half_closed = [channel for channel in self._half_closed if self._may_be_gone(channel)]
            if (passed := time.monotonic() - checked) >= self.check_seconds:
                checked += passed
                self._check(passed)

    def add_task(self, task: _Channel) -> None:
        """Have a worker answer the next request of a connection."""
        task.expect(_CERTAIN_BEGINNING)
        super().add_task(task)

    def note_half_close(self, channel: _Channel) -> None:
        """Have the loop see soon whether a client that sends no more is gone."""
        self._half_closed.append(channel)

    @staticmethod
    def _may_be_gone(channel: _Channel) -> bool:
        try:
            return channel.check_half_closed()
        except Exception:
            channel.handle_error()
            return False

    def note_change(self, channel: _Channel) -> None:
        """Have the loop look at what a connection waits for now. Called by workers."""
        self._changed.append(channel)
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):  # it has ended
                self.trigger.pull_trigger()

    def pull_trigger(self) -> None:
        """Do nothing: `note_change` wakes the loop for each change."""

    def _watch(self, channel: _Channel) -> None:
        """Have the selector wait for what the connection waits for: waitress would ask all of them each time."""
        if channel.socket is None:
            return
        if self._is_stopping and not channel.requests:
            channel.close_when_flushed = True
        reads = selectors.EVENT_READ if channel.readable() else 0
        writes = selectors.EVENT_WRITE if channel.writable() else 0
        events = reads | writes
        if events == channel.watched_events:
            return
        with suppress(KeyError, ValueError, OSError):  # a worker has closed it
            if not channel.watched_events:
                self._selector.register(channel.socket, events, channel)
            elif not events:
                self._selector.unregister(channel.socket)
            else:
                self._selector.modify(channel.socket, events, channel)
            channel.watched_events = events

    def unwatch(self, channel: _Channel) -> None:
        """Wait for nothing more of a connection, whose socket is still open."""
        if channel.watched_events:
            channel.watched_events = 0
            with suppress(KeyError, ValueError, OSError):
                self._selector.unregister(channel.socket)

    def _check(self, seconds: float) -> None:
        if self._accept_again and time.monotonic() >= self._accept_again and self.accepting:
            self._accept_again = 0.0
            self._selector.register(self.socket, selectors.EVENT_READ, self)
        for channel in list(self.active_channels.values()):
            try:
                channel.check(seconds)
                self._watch(channel)
            except Exception:
                channel.handle_error()
        self._end_unread()

    def _end_unread(self) -> None:
        """Close the largest answers, of the network with the most, until what waits for readers is not too much."""
        unread, most = self._unread(), self.limits.max_held_bytes
        waiting = sorted(self.active_channels.values(), key=lambda each: each.total_outbufs_len)
        while unread.total() > most or any(
            network and count > most // 2 for network, count in unread.items()
        ):
            [(network, _)] = unread.most_common(1)
            largest = waiting.pop(max(at for at, each in enumerate(waiting) if each.network == network))
            unread[network] -= largest.total_outbufs_len
            log.info("Too much of this server's answers is not read: a connection is closed.")
            largest.handle_close()

    def maintenance(self, _now: float) -> None:
        """Do nothing: `serve` checks, by a clock that does not jump."""

    def stop(self) -> None:
        """Stop accepting, give running requests `shutdown_seconds`, end what is left."""
        if self._is_stopping:
            return
        self.trigger.pull_trigger(self._stop_accepting)
        if not self._has_ended.wait(self.shutdown_seconds):
            self.trigger.pull_trigger(self._end_connections)
            self._has_ended.wait(_END_SECONDS)
        self._workers.stop(_END_SECONDS)
        self.writer.stop(_END_SECONDS)
        self.trigger.close()

    def _stop_accepting(self) -> None:
        self._is_stopping = True
        if not self._accept_again:
            self._selector.unregister(self.socket)
        wasyncore.dispatcher.close(self)
        for channel in list(self.active_channels.values()):
            self._watch(channel)

    def _end_connections(self) -> None:
        for channel in list(self.active_channels.values()):
            channel.handle_close()

    # Accepting.

    def handle_accept(self) -> None:
        """Accept the connections that wait."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted = self.accept()
            except OSError as error:  # no more files, or no memory for another socket
                self._accept_again = time.monotonic() + _RETRY_ACCEPT_SECONDS
                self._selector.unregister(self.socket)
                self._warn(f"New connections have to wait: the system refuses them ({error.strerror}).")
                return
            if accepted is None:
                return
            self._add(*accepted)

    def handle_error(self) -> None:
        """Go on accepting after an unexpected error: waitress would close the listening socket."""
        log.exception("A connection could not be accepted")

    def _add(self, connection: socket.socket, address: Any) -> None:
        limits, channels = self.limits, list(self.active_channels.values())
        network = self.network_of(str(address[0]))
        if network and sum(each.network == network for each in channels) >= limits.max_connections_of_address:
            self._reject(connection, f"There are too many connections from {address[0]}; close some first.")
        elif len(channels) >= limits.max_connections and not self._make_room(channels, network):
            self._reject(connection)
        else:
            with suppress(OSError):  # it has been closed already
                self.set_socket_options(connection)
            self._watch(self.channel_class(self, connection, address, self.adj, self._sockets))

    def _make_room(self, channels: Iterable[_Channel], network: str) -> bool:
        """Close a connection for a new one of this network; False if there is none that should give way.

        One that is idle, or still sends its request and is of a network with more of them; of these one of the
        network with the most.
        """
        waiting = [each for each in channels if not each.is_answering]
        count = Counter(each.network for each in waiting if each.network)

        def rank(channel: _Channel) -> tuple[int, bool]:
            return count.get(channel.network, 1), channel.is_idle

        giving_way = [each for each in waiting if each.is_idle or rank(each)[0] > count.get(network, 1)]
        found = max(giving_way, key=rank, default=None)
        if found is None:
            return False
        if not found.is_idle or found.peek():
            self._say_no(found.socket, _TOO_MANY)
        found.handle_close()
        return True

    def _reject(self, connection: socket.socket, message: str = _TOO_MANY) -> None:
        """Refuse a connection and close it at once: lingering for the client would take what there is too little of."""
        connection.setblocking(False)
        self._say_no(connection, message)
        connection.close()

    def _say_no(self, connection: socket.socket, message: str) -> None:
        body = self.app.error_body(503, message)
        head = (
            f"HTTP/1.1 503 Service Unavailable\r\nServer: {_NAME}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        with suppress(OSError):
            connection.send(head.encode() + body)
            connection.recv(_PIECE)  # what is left unread when it is closed would reset it

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._warned >= _LOG_SECONDS:
            self._warned = time.monotonic()
            log.warning("%s", message)

    # Counting.

    def network_of(self, address: str) -> str:
        """Return what an address shares with the client's others; nothing for a proxy, which has many clients."""
        return "" if self.limits.trusted_proxies.include(address) else network_of(address)

    def _unread(self) -> Counter[str]:
        """Return how many bytes of answers wait for their readers, by network."""
        unread: Counter[str] = Counter()
        for channel in list(self.active_channels.values()):
            unread[channel.network] += channel.total_outbufs_len
        return unread

    def has_room_for(self, network: str, count: int) -> bool:
        """Whether so many bytes more may wait for a reader in this network."""
        most = self.limits.max_held_bytes
        return count <= most // 2 and not (network and self._unread()[network] + count > most // 2)

    def hold(self, network: str, more: int) -> bool:
        """Count more bytes of bodies, or fewer; return whether all together or this network's are too much."""
        most = self.limits.max_held_bytes
        with self._guard:
            self._held[network] += more
            if not (of_network := self._held[network]):
                del self._held[network]
            return self._held.total() > most or (bool(network) and of_network > most // 2)


def _check_room_for_threads() -> None:
    """Raise RuntimeError unless `OTHER_THREADS` can be started: better now than for a request."""
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait, daemon=True) for _ in range(OTHER_THREADS)]
    try:
        for thread in threads:
            thread.start()
    finally:
        is_over.set()


def _within_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the soft limit on open files as far as needed and allowed; return limits with as many connections as fit.

    A Mac starts programs with a soft limit of 256. Logs a warning if that is fewer than wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # a Mac has a limit of its own next to the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    fitting = max(soft - OTHER_FILES, MIN_CONNECTIONS)
    log.warning(
        "The system allows this process %d open files, so at most %d connections are accepted at once; "
        "`ulimit -n %d` before the start allows %d.",
        soft,
        fitting,
        needed,
        wanted,
    )
    return replace(
        limits,
        max_connections=fitting,
        max_connections_of_address=min(limits.max_connections_of_address, (fitting + 1) // 2),
    )
