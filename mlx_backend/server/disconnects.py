"""Whether a client is still there and reads: says at once when that of a running request has disconnected.

Knows sockets; knows no request.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.server.tls import TlsSocket


def has_left(connection: socket.socket | TlsSocket) -> bool:
    """Whether the other end of a readable socket has closed it. Takes no byte; raises BlockingIOError if it is not."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, InterruptedError):
        raise
    except OSError:
        return True


def _has_left_already(connection: socket.socket | TlsSocket) -> bool:
    poll = select.poll()  # a socket with a timeout would wait for a byte
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and has_left(connection)
    except (BlockingIOError, InterruptedError, ValueError):  # a message of TLS itself; closed here
        return False


def has_room(connection: socket.socket | TlsSocket) -> bool:
    """Whether all that was written has been sent, so that the next answer fits; if not, a selector says when it is.

    That a socket is writable says less: after the head of an answer it may not be, and its body waits for a reader.
    """
    _set_unsent_limit(connection, 1)
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if ready := bool(poll.poll(0)):
        _set_unsent_limit(connection, 0)  # none
    return ready


def _set_unsent_limit(connection: socket.socket | TlsSocket, count: int) -> None:
    """Have a socket writable only while fewer bytes than this are written and not sent yet."""
    with suppress(OSError):  # the other end has gone
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)


class DisconnectWatcher:
    """One thread that watches the sockets of running requests and says when the other end has closed.

    A client that disconnects closes its socket, and the socket becomes readable with nothing to read. Without this
    thread nobody would look: not while a request is queued, not during prefill, and for a reply that is not
    streamed, never.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._changes: deque[tuple[_Watch, bool]] = deque()  # in their order; True: from now on
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._is_woken = False
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="disconnect-watcher", daemon=True)
        self._running = True

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and join it."""
        self._running = False
        self._wake_up()
        self._thread.join()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    @contextmanager
    def watching(
        self, connection: socket.socket | TlsSocket, on_disconnect: Callable[[], None]
    ) -> Iterator[None]:
        """Call `on_disconnect` once, from the watcher's thread, if the other end closes the connection meanwhile.

        It is called at once if that has happened already: nothing needs to be done for a client that came and left.
        """
        watch = _Watch(connection, on_disconnect)
        if _has_left_already(connection):
            watch.is_over = True
            on_disconnect()
        # Without a lock: hundreds of threads would wait for it, and each in turn for the interpreter.
        self._changes.append((watch, True))
        if not self._is_woken:
            self._is_woken = True
            self._wake_up()
        try:
            yield
        finally:
            watch.is_over = True
            watch.on_disconnect = _nothing  # the watch itself is kept until the thread wakes for another
            self._changes.append((watch, False))

    def _wake_up(self) -> None:
        with suppress(OSError):  # full: it will wake; closed: it has ended
            self._wake.send(b"x")

    def _run(self) -> None:
        while self._running:
            events = self._selector.select()
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            # In this order: a change that came without waking is applied, and one that comes later wakes again.
            self._is_woken = False
            self._apply_changes()
            for key, _ in events:
                if key.data is not None:
                    self._check(key.data)

    def _apply_changes(self) -> None:
        while self._changes:
            watch, begins = self._changes.popleft()
            if not begins:
                self._unregister(watch)
            elif not watch.is_over:
                with suppress(KeyError, ValueError, OSError):  # it has been closed
                    self._selector.register(watch.connection, selectors.EVENT_READ, watch)
                    watch.is_registered = True

    def _unregister(self, watch: _Watch) -> None:
        if watch.is_registered:
            watch.is_registered = False
            with suppress(KeyError, ValueError):
                self._selector.unregister(watch.connection)

    def _check(self, watch: _Watch) -> None:
        # Readable: closed, or the client has sent its next request early, and then nothing can be told from here.
        if watch.is_over:
            return
        try:
            left = has_left(watch.connection)
        except (BlockingIOError, InterruptedError):  # a message of TLS itself
            return
        self._unregister(watch)
        if left and not watch.is_over:
            watch.on_disconnect()


def _nothing() -> None:
    pass


class _Watch:
    """One connection, and what to call while the watch is not over."""

    __slots__ = ("connection", "is_over", "is_registered", "on_disconnect")

    def __init__(self, connection: socket.socket | TlsSocket, on_disconnect: Callable[[], None]) -> None:
        self.connection = connection
        self.on_disconnect = on_disconnect
        self.is_over = self.is_registered = False
