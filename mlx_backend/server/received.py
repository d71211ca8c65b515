"""A connection while its requests are received: how far the present one has come, and since when. Sends nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

from mlx_backend.server.request_framing import RequestFraming

if TYPE_CHECKING:
    from mlx_backend.server.receive_limits import Admission


class Connection(Protocol):
    """What the receiver needs of a connection of cheroot's."""

    socket: Any
    rfile: Any
    remote_addr: str | None
    received: Received

    def close_socket(self) -> None:
        """Close the socket, at once."""
        ...


class Received:
    """What the receiver keeps of a connection."""

    __slots__ = (
        "address",
        "admission",
        "admitted",
        "discarding",
        "framing",
        "held",
        "is_dispatched",
        "is_registered",
        "last",
        "started",
    )

    def __init__(self, address: str, now: float, max_head_bytes: int) -> None:
        self.address = address
        self.framing = RequestFraming(max_head_bytes)
        self.last = now
        """When it was accepted, or its last request was answered."""
        self.started: float | None = None
        """When the first byte of a request came; of its body, once the head is there."""
        self.admission: Admission | None = None
        self.discarding: float | None = None
        """When to stop receiving what nobody wants."""
        self.held = 0
        self.is_registered = False
        self.is_dispatched = False
        self.admitted = False

    @property
    def is_whole(self) -> bool:
        """Whether all of the request was received, so that the next may follow on the connection."""
        return self.framing.is_complete


class ReceivedBytes(io.BytesIO):
    """A request as cheroot reads it from a connection."""

    def has_data(self) -> bool:
        """Say whether bytes are left; cheroot asks."""
        return self.tell() < len(self.getbuffer())
