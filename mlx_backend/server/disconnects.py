"""Whether a client is still there and reads: says at once when that of a running request has disconnected.

Knows sockets; knows no request.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

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
    def watching(
        self, connection: socket.socket | TlsSocket, on_disconnect: Callable[[], None]
    ) -> Iterator[None]:
        """Call `on_disconnect` from the watcher's thread, once, if the other end closes the connection meanwhile."""
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, on_disconnect)
        self._wake.send(b"x")  # not every selector notices what is registered while it waits
        try:
            yield
        finally:
            self._unregister(connection)

    def _unregister(self, connection: socket.socket | TlsSocket) -> None:
        with self._lock, suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def _run(self) -> None:
        while self._running:
            for key, _ in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._woken.recv(4096)
                else:
                    self._check(key.fileobj, key.data)

    def _check(self, connection: Any, on_disconnect: Callable[[], None]) -> None:
        # Readable: closed, or the client has sent its next request early, and then nothing can be told from here.
        with self._lock:
            try:
                self._selector.get_key(connection)
                left = has_left(connection)
            except (KeyError, ValueError):  # it is watched no longer
                return
            except (BlockingIOError, InterruptedError):  # a message of TLS itself
                return
            self._selector.unregister(connection)
        if left:
            on_disconnect()
