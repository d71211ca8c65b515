"""What a response is written to: a socket whose other end may read slowly, but not for ever.

A client that reads its answer holds a thread and, of a stream, what has been generated. It may keep a write waiting for
`stall_seconds`, and earns a second of them back with every `min_bytes_per_second` that it takes: one that keeps up with
that rate is served for as long as it likes, one that takes a byte a minute is not. Time in which there was nothing to
send does not count. Knows sockets; nothing of HTTP.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

    from mlx_backend.server.tls import TlsSocket

STALL_SECONDS = 60
MIN_BYTES_PER_SECOND = 128
"""A stream has 200 bytes a token and more: a client that takes less than this falls behind the slowest of models."""
_PIECE = 64 * 1024


class ResponseWriter:
    """A file to write to, as cheroot has for each connection. `write` raises TimeoutError for one that is too slow."""

    def __init__(
        self,
        connection: socket.socket | TlsSocket,
        *,
        stall_seconds: float = STALL_SECONDS,
        min_bytes_per_second: float = MIN_BYTES_PER_SECOND,
    ) -> None:
        self._connection = connection
        self._stall_seconds = self._seconds_left = stall_seconds
        self._min_bytes_per_second = min_bytes_per_second
        self.bytes_written = 0

    def write(self, payload: bytes) -> int:
        """Send all of it; return its length."""
        rest = memoryview(payload)
        while rest:
            self._connection.settimeout(self._seconds_left)
            started = time.monotonic()
            sent = self._connection.send(rest[:_PIECE])
            left = self._seconds_left - (time.monotonic() - started) + sent / self._min_bytes_per_second
            if left <= 0:
                raise TimeoutError("The client reads its answer too slowly.")
            self._seconds_left = min(left, self._stall_seconds)
            self.bytes_written += sent
            rest = rest[sent:]
        return len(payload)

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        """Do nothing: the connection is closed by its owner."""
