"""TLS over a socket that nothing waits for: a connection for the receiver, which reads it, and a worker, which writes.

OpenSSL works in memory here (`ssl.MemoryBIO`), and the socket is read and written beside it. So a handshake takes no
thread and has the receiver's deadlines, and both ends of a connection can be used at the same time: OpenSSL's state is
guarded by a lock that is never held while the socket is waited for.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from mlx_backend.registry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Buffer
    from pathlib import Path

    from mlx_backend.settings import Settings

_RECEIVED_AT_ONCE = 40 * 1024
"""With a part of a record (16 KiB) that came before, no more than the receiver takes at once."""
_SENT_AT_ONCE = 256 * 1024


class TlsContext:
    """The server's certificate. `reload` reads it again, for the connections that come then."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """`key` may be None if the certificate's file holds it too. Raises ConfigurationError."""
        self._paths = certificate, key
        self._context = _context(certificate, key)

    def reload(self) -> None:
        """Read the files again. Raises ConfigurationError, and then everything stays as it was."""
        self._context = _context(*self._paths)

    def wrap(self, connection: socket.socket) -> TlsSocket:
        """Return the server's end of a new connection."""
        return TlsSocket(connection, self._context)


def tls_of(settings: Settings) -> TlsContext | None:
    """Return what the settings say of TLS; None for plain HTTP. Raises ConfigurationError."""
    if settings.tls_cert is not None:
        return TlsContext(settings.tls_cert, settings.tls_key)
    if settings.tls_key is not None:
        raise ConfigurationError("--tls-key needs the certificate that belongs to it: --tls-cert.")
    return None


def _context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    def refuse() -> str:  # OpenSSL would ask for it on the terminal
        raise ConfigurationError(
            f"The key in {key or certificate} is encrypted; decrypt it with `openssl pkey`."
        )

    for path in (certificate, key):
        if path is not None:
            _check_readable(path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        which = f"{certificate} and {key}" if key is not None else f"{certificate}"
        matching = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else ""
        said = matching or "a certificate and its key in PEM are needed"
        raise ConfigurationError(f"TLS cannot use {which}: {said} ({error.reason or error}).") from None
    except OSError as error:
        raise ConfigurationError(f"{certificate} or its key cannot be read: {error.strerror}.") from None
    return context


def _check_readable(path: Path) -> None:
    """Raise the ConfigurationError that names the file; OpenSSL would not say which of the two it is."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise ConfigurationError(f"There is no file {str(path)!r}.") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None


class PlainHttp(OSError):
    """A client has sent HTTP without TLS. It is answered without TLS, and what it still sends is not decrypted."""


class TlsSocket:
    """Has those methods of a socket that the server uses. One thread may send while others receive."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._seconds: float | None = 0.0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._lock = threading.Lock()  # for the three above
        self._receiving = threading.Lock()
        self._peeked = b""
        self._sending = threading.Lock()  # records leave in the order in which they were made
        self._unsent = b""
        self._is_plain = False
        self.is_handshaking = True

    # Receiving.

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return what has arrived, b"" at the end; BlockingIOError if that is nothing yet. Raises PlainHttp, once.

        With MSG_PEEK the next call returns it too. What is left over when `size` is small is not seen by a selector.
        """
        with self._receiving:
            data, self._peeked = self._peeked, b""
            if not data:
                data = self._decrypted(size)
            elif len(data) < size and not flags & socket.MSG_PEEK:
                with suppress(OSError):  # nothing more for now, or what the next call will raise
                    data += self._decrypted(size - len(data))
            if flags & socket.MSG_PEEK:
                self._peeked = data
            return data

    def _decrypted(self, size: int) -> bytes:
        """Read the socket until there is something. Handshakes meanwhile, and answers the protocol's own messages."""
        if self._is_plain:
            return self._socket.recv(size)
        data = b""
        while True:
            try:
                with self._lock:
                    if self.is_handshaking:
                        self._tls.do_handshake()
                        self.is_handshaking = False
                    while len(data) < size and (more := self._tls.read(size - len(data))):
                        data += more
                    return data
            except ssl.SSLWantReadError:
                self._flush()
            except ssl.SSLZeroReturnError:
                return data
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    self._is_plain = True
                    raise PlainHttp("This server speaks HTTPS: begin its address with https://.") from None
                self._flush()  # the alert that says why
                raise
            if data:
                return data
            arrived = self._socket.recv(_RECEIVED_AT_ONCE)
            with self._lock:
                if arrived:
                    self._incoming.write(arrived)
                else:
                    self._incoming.write_eof()

    # Sending.

    def send(self, payload: Buffer) -> int:
        """Encrypt and send a part of the bytes; return its length. Raises TimeoutError."""
        if self._is_plain:
            return self._socket.send(payload)
        with self._lock:
            count = self._tls.write(memoryview(payload)[:_SENT_AT_ONCE])
        self._flush(wait=True)
        return count

    def _flush(self, *, wait: bool = False) -> None:
        """Send what OpenSSL has written: all of it within the timeout, or as much as there is room for."""
        wait = wait and self._seconds != 0
        deadline = None if self._seconds is None else time.monotonic() + self._seconds
        while self._sending.acquire(blocking=wait):  # the thread that has it sends this too
            try:
                with self._lock:
                    self._unsent += self._outgoing.read()
                self._send_unsent(deadline, wait=wait)
            finally:
                self._sending.release()
            if self._unsent or not self._outgoing.pending:
                return

    def _send_unsent(self, deadline: float | None, *, wait: bool) -> None:
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                if not wait:
                    return
                ready = select.poll()
                ready.register(self._socket, select.POLLOUT)
                seconds = None if deadline is None else deadline - time.monotonic()
                if seconds is not None and (seconds <= 0 or not ready.poll(seconds * 1000)):
                    raise TimeoutError("timed out") from None
                if seconds is None:
                    ready.poll()

    # The rest of a socket.

    def shutdown(self, how: int) -> None:
        """Say that no more is sent; with SHUT_RDWR end the connection."""
        if how == socket.SHUT_WR:
            self._say_goodbye()
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._say_goodbye()
        self._socket.close()

    def _say_goodbye(self) -> None:
        if self._is_plain:
            return
        with suppress(ssl.SSLError), self._lock:  # it would wait for the other end's
            self._tls.unwrap()
        self._flush()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._socket.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        """Set how long `send` may wait."""
        self._seconds = seconds

    def setblocking(self, flag: bool) -> None:
        """Set whether `send` waits."""
        self._seconds = None if flag else 0.0

    def _decref_socketios(self) -> None:
        """Do nothing: files that were made of this socket do not keep it open. `socket.SocketIO` calls it."""
