"""The state of a connection while a request is received: how much of it has arrived, and since when. Sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mlx_backend.server.request_framing import RequestFraming

if TYPE_CHECKING:
    from mlx_backend.server.receive_limits import Admission


class Connection(Protocol):
    """What the receiver needs of a connection of cheroot's."""

    socket: Any
    rfile: Any
    received: Received

    @property
    def is_handshaking(self) -> bool:
        """Whether TLS has yet to begin."""
        ...

    def close_socket(self) -> None:
        """Close the socket, at once."""
        ...


class Received:
    """What the receiver knows about a connection, times as of time.monotonic."""

    __slots__ = (
        "address",
        "admission",
        "ahead",
        "client",
        "discard_until",
        "framing",
        "held_bytes",
        "idle_since",
        "is_admitted",
        "is_dispatched",
        "is_registered",
        "is_waiting",
        "started",
    )

    def __init__(self, address: str, now: float, max_head_bytes: int) -> None:
        self.address = address
        self.framing = RequestFraming(max_head_bytes)
        self.ahead: bytes | None = None
        """What came of the request together with the one before, until there is room for that one's answer."""
        self.idle_since = now
        """When it was accepted, or its last request was answered."""
        self.started: float | None = None
        """When the first byte of a request came; of its body, once the head is there."""
        self.admission: Admission | None = None
        self.client = ""
        """Whose request it is: those of one client share its turns. Known once the head is there."""
        self.discard_until: float | None = None
        """When to stop receiving a request that was refused; None if none was."""
        self.held_bytes = 0
        self.is_registered = False
        self.is_dispatched = False
        self.is_admitted = False
        self.is_waiting = False
        """For a worker: all of the request has arrived."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request has arrived since the last one was answered."""
        return self.started is None and self.discard_until is None

    @property
    def is_whole(self) -> bool:
        """Whether all of the request was received, so that the next may follow on the connection."""
        return self.framing.is_complete
