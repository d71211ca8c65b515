"""The WSGI server: waitress, with what a server of long streams needs from it.

waitress receives and sends in one thread, its loop; a request takes a thread of its own only when all of it has
arrived. So a client that sends slowly costs a socket. Added to that here:

    times for a request's head and body, and the rate of a body; how slowly an answer may be read
    connections altogether and of one address; the bytes received and not yet answered, and those not yet read
    what an application may ask for: to hear of its client's leaving, to wait for an engine without a thread's work, to
    make a connection a WebSocket, on which requests come as messages (request_tasks.py)
    a stop that gives running requests a moment and then ends them
    an answer for a client that only sends no more

A client that sends no more may wait for its answer, having shut down the sending half of its connection, or may be
gone, having closed it: the system reports both alike. Only something that is sent tells one from the other, for the
system of a client that is gone answers it with a reset. So what is certain of an answer before it is known is sent
then, a byte at a time: that it begins with `HTTP/1.`, and between the chunks of a stream zeros, with which the next
length may begin.

Knows sockets; what is answered, and how, is request_tasks.py's.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.server import TcpWSGIServer

from mlx_backend import __version__
from mlx_backend.server.auth import network_of
from mlx_backend.server.connection_limits import HeldBytes, within_file_limit
from mlx_backend.server.pump import Pump, Writer
from mlx_backend.server.received_request import ReceivedRequest
from mlx_backend.server.request_tasks import (
    CERTAIN_BEGINNING,
    MessageTask,
    PumpedAnswer,
    RefusalTask,
    RequestTask,
)
from mlx_backend.server.worker_threads import Workers, check_room_for_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlx_backend.server.connection_limits import ConnectionLimits
    from mlx_backend.server.request_tasks import Application
    from mlx_backend.server.websocket import WebSocket

log = logging.getLogger(__name__)

SPARE_THREADS = 64
"""Threads in addition to one for each request that an engine may hold.

Requests of one client that wait may occupy a quarter of them, those of all clients three quarters: what is answered or
refused at once always finds one.
"""
BACKLOG = 512
_NAME = f"mlx-backend/{__version__}"
_PIECE = 64 * 1024
_BUFFER_BYTES = 256 * 1024
"""An answer waits for its client in pieces of this size, each of which is freed once it is sent."""
_PROBE_CHECK_SECONDS = 0.02
_PROBE_CHECKS_LAST = 1.0
"""For so long after a connection was half closed a reset is looked for that often; later at each check."""
_FIRST_PROBE_PAUSE = 0.1
_PROBE_BACKOFF = 3
"""A proxy may pass on the end first, and the reset in answer to a later byte: so there are several bytes."""
_SHUTTING_DOWN = "The server is shutting down."
_TOO_MANY = "There are too many connections to this server; try again later."
_ACCEPTED_AT_ONCE = 64
_RETRY_ACCEPT_SECONDS = 0.5
_LOG_SECONDS = 60.0
_END_SECONDS = 1.0
"""How long requests whose connections were ended may take to notice it."""


class _Channel(HTTPChannel):
    """A connection. Belongs to the loop, but for `service` and what that calls: a worker answers."""

    task_class = RequestTask
    error_task_class = RefusalTask
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
        self._certain = CERTAIN_BEGINNING
        self._num_sent = 0  # bytes of it
        self._half_closed_at: float | None = None
        self._next_probe = 0.0
        self._probe_pause = _FIRST_PROBE_PAUSE
        self._on_disconnect: dict[object, Callable[[], None]] = {}
        self.pump = Pump(server.writer)
        super().__init__(server, connection, address, adj, map=map)

    def parser_class(self, adj: Adjustments) -> ReceivedRequest:
        """Begin a request."""
        return ReceivedRequest(adj, self.server.held, self.network)

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
        self.websocket, self.task_class = websocket, MessageTask

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
        readers = list(self.server.active_channels.values())
        return bool(self.server.held.has_room_for(count, self.network, readers))

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

    def give_up(self) -> None:
        """Close the connection from a worker's thread, which could not answer."""
        self.server.trigger.pull_trigger(lambda: self.leave("The message could not be answered.", 500))

    def leave(self, reason: str, status: int | None = None) -> None:
        """Close the connection; a WebSocket's client is told why, as `WebSocket.close` has it."""
        self.say_goodbye(reason, status)
        if self.websocket is not None:
            with suppress(OSError, AttributeError):  # closed meanwhile
                self.socket.recv(_PIECE)  # as for `_say_no`
        self.handle_close()

    def say_goodbye(self, reason: str, status: int | None = None) -> None:
        """Send the end of a WebSocket, if it is one that was not ended yet."""
        if self.websocket is not None and (end := self.websocket.close(reason, status)):
            with suppress(ClientDisconnected):
                self.write_soon(end)

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
            self.websocket.endpoint.close()
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
                self.leave("Nothing has come for some time.")
            else:
                with self.outbuf_lock:
                    self.outbufs[-1].prune()  # what was sent
        elif now - self.request.since > self.request.seconds_allowed(limits):
            part = "body" if self.request.headers_finished else "head"
            self.refuse(408, f"The {part} of the request did not arrive in time.")


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
        self.limits = within_file_limit(limits)
        self.held = HeldBytes(limits.max_held_bytes)
        self._accept_again = 0.0
        self._warned = -_LOG_SECONDS
        self._is_stopping = False
        self._has_ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._changed: deque[_Channel] = deque()
        self._half_closed: list[_Channel] = []
        self._is_woken = False
        self._workers = Workers(requests + SPARE_THREADS)
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
                lambda environ, start_response: PumpedAnswer(app(environ, start_response), environ),
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
        check_room_for_threads()

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
        task.expect(CERTAIN_BEGINNING)
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
            channel.say_goodbye(_SHUTTING_DOWN)
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
        for channel in self.held.too_slow(list(self.active_channels.values())):
            log.info("Too much of this server's answers is not read: a connection is closed.")
            channel.handle_close()

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
            channel.leave(_SHUTTING_DOWN)

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
        if found.websocket is None and (not found.is_idle or found.peek()):
            self._say_no(found.socket, _TOO_MANY)
        found.leave(_TOO_MANY, 503)
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

    def network_of(self, address: str) -> str:
        """Return what an address shares with the client's others; nothing for a proxy, which has many clients."""
        return "" if self.limits.trusted_proxies.include(address) else network_of(address)
