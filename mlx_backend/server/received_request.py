"""A request while it is received, within its limits: waitress's parser, which also counts what it holds.

Holds no reference to its connection, so its body is freed as soon as the request is.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from waitress.parser import HTTPRequestParser
from waitress.utilities import Error, RequestEntityTooLarge

if TYPE_CHECKING:
    from waitress.adjustments import Adjustments

    from mlx_backend.server.connection_limits import ConnectionLimits, HeldBytes

TOO_MANY_BODIES = "Too many large requests are arriving at once; try again later."
_FREE_FRAMING = 16 * 1024
"""Bytes between the parts of a body that comes in chunks: each chunk costs as much as some kilobytes of body."""
_FRAMING_SHARE = 8
"""Bytes of such a body that allow one more byte between its parts. Chunks of 64 bytes and more stay below it."""
_TLS_HANDSHAKE = b"\x16"
"""The first byte of a connection over TLS, which would never send the end of a head."""


class Refusal(Error):
    """A request that is refused before the application sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.code = status


class ReceivedRequest(HTTPRequestParser):
    """A request that is being received, by a client in `network`."""

    error: Any

    def __init__(self, adjustments: Adjustments, held: HeldBytes, network: str) -> None:
        super().__init__(adjustments)
        self.since = time.monotonic()
        """When its first byte came; of its body, once the head is there."""
        self._held_by_all = held
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
        self.error = Refusal(status, message)
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
        return self._held_by_all.hold(self._network, more)
