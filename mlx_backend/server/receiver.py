"""Accepts connections and receives their requests, all in one thread: a worker gets a request once it is complete.

A client that sends slowly costs a socket and no thread. What is bounded: the time for a head and for a body, the rate
of a body, the connections altogether and of one address, the bytes received and not yet answered. A request that its
head alone refuses (no key, no such address, a body too long) is refused before its body is received.

It replaces cheroot's ConnectionManager, and has its methods. Knows sockets and framing; of what a request asks for it
knows only what `Admission` says.
"""

from __future__ import annotations

import io
import logging
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mlx_backend.server.connection_count import ConnectionCount
from mlx_backend.server.disconnects import has_left, has_room
from mlx_backend.server.giving_way import giving_way
from mlx_backend.server.held_bytes import HeldBytes
from mlx_backend.server.receive_limits import Admission
from mlx_backend.server.received import Received
from mlx_backend.server.request_framing import FramingError, RequestFraming
from mlx_backend.server.tls import PlainHttp

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.server.fair_dispatch import FairDispatch
    from mlx_backend.server.receive_limits import ReceiveLimits
    from mlx_backend.server.received import Connection
    from mlx_backend.server.request_framing import RequestHead

log = logging.getLogger(__name__)

_PIECE = 64 * 1024
_ACCEPTED_AT_ONCE = 64
_RETRY_ACCEPT_SECONDS = 0.5
_LOG_SECONDS = 60.0
_TOO_MANY = "There are too many connections to this server; try again later."
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Receiver:
    """Runs in the server's thread. `put`, `finished` and `stop` may be called from any thread.

    Heavy requests wait until it is their turn in `heavy`. `admit` is given the head of a request and its address; it
    says how the request is answered, and whose it is.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ReceiveLimits,
        *,
        heavy: FairDispatch,
        connect: Callable[[socket.socket, Any], Connection],
        admit: Callable[[RequestHead, str], tuple[Admission, str]],
        dispatch: Callable[[Any], None],
        refusal: Callable[[int, str], bytes],
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._connect = connect
        self._admit = admit
        self._dispatch = dispatch
        self._refusal = refusal
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        listener.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._resume_accepting: float | None = None
        self._last_warning = -_LOG_SECONDS
        self._connections: dict[Connection, None] = {}
        self._count = ConnectionCount(limits.max_connections_of_address, limits.trusted_proxies)
        self._returned: deque[tuple[Connection, bool]] = deque()
        self._heavy = heavy
        self._held = HeldBytes(limits.max_held_bytes)
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._is_stopping = False
        self._is_closed = False

    # The methods of cheroot's ConnectionManager.

    @property
    def can_add_keepalive_connection(self) -> bool:
        """Whether a connection may be kept for another request: connections are bounded where they are accepted."""
        return not self._is_stopping

    def put(self, connection: Connection) -> None:
        """Take a connection back whose request has been answered, for the next one."""
        self._returned.append((connection, True))
        self._notify()

    def finished(self, connection: Connection) -> None:
        """Take a connection back that is to be closed once its client has stopped sending."""
        self._returned.append((connection, False))
        if self._is_closed:  # nobody takes it back any more
            connection.close_socket()
        else:
            self._notify()

    def run(self, expiration_interval: float) -> None:
        """Accept and receive until `stop`. Deadlines are checked every `expiration_interval` seconds."""
        self._has_ended.clear()
        checked = time.monotonic()
        try:
            while not self._is_stopping:
                for key, _ in self._selector.select(expiration_interval):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        with suppress(BlockingIOError):
                            self._woken.recv(4096)
                    else:
                        self._receive(key.data)
                self._take_back()
                self._dispatch_waiting()
                if (now := time.monotonic()) - checked >= expiration_interval:
                    checked = now
                    self._expire(now)
        finally:
            self._has_ended.set()

    def stop(self) -> None:
        """End `run`, and wait until it has ended."""
        self._is_stopping = True
        self._notify()
        self._has_ended.wait()

    def close(self) -> None:
        """Close every connection that no worker has; the others are closed when they are given back."""
        self._is_closed = True
        self._take_back()
        for connection in [each for each in self._connections if not each.received.is_dispatched]:
            self._drop(connection)
        for each in (self._selector, self._wake, self._woken):
            each.close()

    def abort(self) -> None:
        """End the connections that workers still have: what they send or wait for fails."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    # Accepting.

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no more files, or no memory for another socket
                self._selector.unregister(self._listener)
                self._resume_accepting = time.monotonic() + _RETRY_ACCEPT_SECONDS
                self._warn(f"New connections have to wait: the system refuses them ({error.strerror}).")
                return
            accepted.setblocking(False)
            self._add(accepted, address)

    def _add(self, accepted: socket.socket, address: Any) -> None:
        host = str(address[0]) if isinstance(address, tuple) else ""
        connection = self._connect(accepted, address)
        connection.received = Received(host, time.monotonic(), self._limits.max_head_bytes)
        self._connections[connection] = None
        if not self._count.add(host):
            self._reject(connection, f"There are too many connections from {host}; close some first.")
        elif len(self._connections) > self._limits.max_connections and not self._make_room(host):
            self._reject(connection)
        else:
            self._register(connection)
            self._receive(connection)

    def _reject(self, connection: Connection, message: str = _TOO_MANY) -> None:
        """Refuse a connection and close it at once: lingering for the client would take what there is too little of."""
        with suppress(OSError):
            connection.socket.send(self._refusal(503, message))
            connection.socket.recv(_PIECE)  # what is left unread when it is closed would reset it
        self._drop(connection)

    def _make_room(self, address: str) -> bool:
        """Close a connection for a new one of this address; False if there is none that should give way."""
        found = giving_way(self._connections, self._count, address)
        if found is not None and found.received.started is not None:
            self._reject(found)
        elif found is not None:
            self._drop(found)
        return found is not None

    # Receiving.

    def _receive(self, connection: Connection) -> None:
        received = connection.received
        if not received.is_registered:  # closed or dispatched meanwhile
            return
        if received.ahead is not None:
            self._begin_next(connection)
            return
        if received.is_waiting:
            self._check_left(connection)
            return
        try:
            data = connection.socket.recv(_PIECE)
        except (BlockingIOError, InterruptedError):
            return
        except PlainHttp as error:
            self._refuse(connection, 400, str(error))
            return
        except OSError:
            self._drop(connection)
            return
        if received.discard_until is not None:
            if not data:
                self._drop(connection)
        elif data:
            self._feed(connection, data)
        elif received.framing.head is not None:
            missing = received.framing.head.content_length
            end = "its last chunk" if missing is None else f"its {missing} bytes"
            self._refuse(connection, 400, f"The body ended before {end} had arrived.")
        else:
            self._drop(connection)

    def _check_left(self, connection: Connection) -> None:
        """Drop a connection whose client has left while its request waited."""
        with suppress(BlockingIOError, InterruptedError):
            if has_left(connection.socket):
                self._drop(connection)
            else:  # the next request, sent early: nothing more can be told from here
                self._unregister(connection)

    def _feed(self, connection: Connection, piece: bytes) -> None:
        received, framing = connection.received, connection.received.framing
        had_head = framing.head is not None
        try:
            framing.feed(piece)
        except FramingError as error:
            self._refuse(connection, error.status, error.message)
            return
        if framing.has_begun and received.started is None:
            received.started = time.monotonic()
        if (head := framing.head) is None:
            return
        if not had_head:
            received.started = time.monotonic()
            received.admission, received.client = self._admission(head, received.address)
            if (
                head.expects_continue
                and not framing.is_complete
                and received.admission is not Admission.REFUSED
            ):
                with suppress(OSError):
                    connection.socket.send(_CONTINUE)
        self._held.set(connection.received, framing.body_bytes)
        is_too_long = framing.body_bytes > self._limits.max_body_bytes
        if framing.is_complete or received.admission is Admission.REFUSED or is_too_long:
            self._hand_over(connection)
        elif self._held.is_too_much(received):
            self._refuse(connection, 503, "Too many large requests are arriving at once; try again later.")

    def _admission(self, head: RequestHead, address: str) -> tuple[Admission, str]:
        if (head.content_length or 0) > self._limits.max_body_bytes:
            return Admission.REFUSED, ""
        return self._admit(head, address)

    def _hand_over(self, connection: Connection) -> None:
        """Give the request to a worker, now or when one is free."""
        received = connection.received
        connection.rfile = io.BytesIO(received.framing.take())
        if received.admission is Admission.HEAVY:
            received.is_waiting = True  # and watched: a client that leaves makes room
            self._heavy.add(connection)
            self._dispatch_waiting()
        else:
            self._start(connection)

    def _start(self, connection: Connection) -> None:
        self._unregister(connection)
        connection.received.is_dispatched = True
        connection.received.is_waiting = False
        self._dispatch(connection)

    def _dispatch_waiting(self) -> None:
        while (connection := self._heavy.next()) is not None:
            connection.received.is_admitted = True
            self._start(connection)

    def _take_back(self) -> None:
        """Go on with the connections whose requests have been answered."""
        while self._returned:
            connection, is_kept = self._returned.popleft()
            before = connection.received
            if before.is_admitted:
                self._heavy.finished(before.client)
            before.is_admitted = before.is_dispatched = False
            self._held.set(connection.received, 0)
            if is_kept:
                self._await_next(connection, before)
            elif before.is_whole or before.discard_until is not None:
                self._drop(connection)
            else:
                self._discard(connection)

    def _await_next(self, connection: Connection, before: Received) -> None:
        connection.received = Received(before.address, time.monotonic(), self._limits.max_head_bytes)
        connection.received.ahead = before.framing.rest()
        connection.socket.setblocking(False)
        self._begin_next(connection)

    def _begin_next(self, connection: Connection) -> None:
        if not has_room(connection.socket):  # it reads no answers: the worker with the next would be held up
            self._register(connection, selectors.EVENT_WRITE)
            return
        ahead, connection.received.ahead = connection.received.ahead, None
        self._unregister(connection)
        self._register(connection)
        if ahead:
            self._feed(connection, ahead)
        self._receive(connection)  # what TLS has decrypted already, no selector sees

    # Ending.

    def _expire(self, now: float) -> None:
        if self._resume_accepting is not None and now >= self._resume_accepting:
            self._resume_accepting = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in list(self._connections):
            received = connection.received
            if not received.is_registered or received.is_waiting:
                continue
            if received.discard_until is not None:
                if now > received.discard_until:
                    self._drop(connection)
            elif received.started is None:
                allowed = (
                    self._limits.head_seconds if connection.is_handshaking else self._limits.idle_seconds
                )
                if now - received.idle_since > allowed:
                    self._drop(connection)
            elif now - received.started > self._limits.seconds_for(received.framing):
                part = "body" if received.framing.head is not None else "head"
                self._refuse(connection, 408, f"The {part} of the request did not arrive in time.")

    def _refuse(self, connection: Connection, status: int, message: str) -> None:
        log.info("refused %d %s", status, message)
        with suppress(OSError):
            connection.socket.send(self._refusal(status, message))
        self._discard(connection)

    def _discard(self, connection: Connection) -> None:
        """Send no more, and receive for a while what the client is still sending."""
        received = connection.received
        received.discard_until = time.monotonic() + self._limits.discard_seconds
        self._held.set(connection.received, 0)
        received.framing = RequestFraming(self._limits.max_head_bytes)
        try:
            connection.socket.setblocking(False)
            connection.socket.shutdown(socket.SHUT_WR)
            self._register(connection)
        except (OSError, ValueError):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._unregister(connection)
        self._heavy.discard(connection)
        self._held.set(connection.received, 0)
        if self._connections.pop(connection, self) is self:
            return
        self._count.remove(connection.received.address)
        connection.close_socket()

    def _register(self, connection: Connection, event: int = selectors.EVENT_READ) -> None:
        if not connection.received.is_registered:
            self._selector.register(connection.socket, event, connection)
            connection.received.is_registered = True

    def _unregister(self, connection: Connection) -> None:
        if connection.received.is_registered:
            self._selector.unregister(connection.socket)
            connection.received.is_registered = False

    def _notify(self) -> None:
        with suppress(OSError):  # full: it will wake; closed: it has ended
            self._wake.send(b"x")

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._last_warning >= _LOG_SECONDS:
            self._last_warning = time.monotonic()
            log.warning("%s", message)
