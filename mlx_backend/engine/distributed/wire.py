"""One authenticated connection between two ranks, and how it is opened: whole JSON messages, in their order.

Framing and authentication are those of `multiprocessing.connection`: before anything else is read, both ends prove
with an HMAC that they know the group's key, which never travels over this connection. After that only bytes that
hold JSON are exchanged, of a limited size; nothing is ever unpickled.

The key keeps out any other program that reaches rank 0's port, or that answers in rank 0's place. It does not protect
against an attacker who can read or change the traffic between the machines: messages are neither encrypted nor signed,
and the key reaches the ranks over MLX's own connections, which are no safer. The network has to be trusted.

Sockets are opened here, because `Listener` and `Client` have no timeouts. Knows no ranks and no message's meaning.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

CONNECT_TIMEOUT = 3.0
"""Seconds for one address to accept a connection, and for a stranger to authenticate."""
MAX_MESSAGE_BYTES = 1 << 30

_KEEPALIVE = (
    ("TCP_KEEPIDLE", 5),
    ("TCP_KEEPALIVE", 5),
    ("TCP_KEEPINTVL", 3),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 20_000),
)
"""How soon a machine that has lost its power, which closes nothing, is noticed. The names differ between systems; all
but the last, in milliseconds, are in seconds or numbers of probes."""
_TCP_RXT_CONNDROPTIME = 0x80
"""macOS's option for the same, in seconds."""


class Wire:
    """One connection. One thread may receive while others send."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        _set_options(sock)
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))
        self._sending = threading.Lock()

    def authenticate(self, authkey: bytes, *, accepted: bool) -> None:
        """Prove to each other that both know the key; the end that accepted the connection asks first.

        Raises OSError, also if the other end takes longer than the timeout that is set.
        """
        steps = (deliver_challenge, answer_challenge) if accepted else (answer_challenge, deliver_challenge)
        try:
            for step in steps:
                step(self._connection, authkey)
        except AuthenticationError as error:
            raise ConnectionRefusedError("the other end does not know the group's key") from error
        except EOFError as error:
            raise ConnectionResetError("the other end has closed the connection") from error
        except BlockingIOError as error:
            raise TimeoutError("the other end does not answer") from error

    def set_timeout(self, seconds: float | None) -> None:
        """Limit how long a single read or write may take; None: not at all.

        Raises OSError on macOS if the connection has ended already.
        """
        # A limit in the kernel: Python makes a socket with a timeout non-blocking, and Connection needs a blocking one.
        # It is a `struct timeval`: two longs on Linux; on macOS a long, an int and four bytes of padding, which is the
        # same bytes on a little-endian machine.
        whole, part = divmod(seconds or 0.0, 1)
        limit = struct.pack("@ll", int(whole), int(part * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError once the connection has ended."""
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._connection.send_bytes(data)

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
        """Wait for a message; None once the connection has ended, however it did."""
        try:
            return json.loads(self._connection.recv_bytes(max_bytes))
        except (EOFError, OSError, ValueError):
            return None

    def close(self) -> None:
        """End the connection, at both ends and for a thread that waits in `receive`. Idempotent."""
        # Connection's own descriptor is closed with the object: closed here, its number could belong to another file
        # by the time that a thread which uses it goes on to read or write.
        with suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def open_listener(addresses: Sequence[str], port: int) -> socket.socket:
    """Listen for the other ranks, on every interface unless all addresses are the loopback's. Raises OSError."""
    if all(address in ("127.0.0.1", "localhost") for address in addresses):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def accept(listener: socket.socket, authkey: bytes, *, timeout: float) -> Wire | None:
    """Wait for a connection; None if the other end cannot authenticate. Raises TimeoutError.

    The wire still has a timeout, for the caller to lift once the other end has identified itself.
    """
    listener.settimeout(timeout)
    sock, _ = listener.accept()
    wire: Wire | None = None
    try:
        sock.settimeout(None)
        wire = Wire(sock)
        wire.set_timeout(CONNECT_TIMEOUT)
        wire.authenticate(authkey, accepted=True)
    except OSError:
        (wire or sock).close()
        return None
    return wire


def connect(address: str, port: int, authkey: bytes, *, timeout: float) -> Wire:
    """Connect, and authenticate within `timeout` seconds. Raises OSError."""
    sock = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT)
    sock.settimeout(None)
    wire = Wire(sock)
    try:
        wire.set_timeout(timeout)
        wire.authenticate(authkey, accepted=False)
        wire.set_timeout(None)
    except OSError:
        wire.close()
        raise
    return wire


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if sys.platform == "darwin":
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, 20)
