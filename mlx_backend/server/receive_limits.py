"""Limits on time and memory while requests are received, and how a request is to be answered, by its head."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from mlx_backend.server.client_address import TrustedProxies

if TYPE_CHECKING:
    from mlx_backend.server.request_framing import RequestFraming


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """How long a client may take, and how much may be held for clients. Times in seconds."""

    max_body_bytes: int
    max_head_bytes: int = 64 * 1024
    idle_seconds: float = 60.0
    """Between two requests of a connection, and before its first."""
    head_seconds: float = 15.0
    """From the first byte of a request to the end of its head; and for the handshake of TLS."""
    body_seconds: float = 300.0
    """For a whole body, however fast it comes."""
    stalled_seconds: float = 20.0
    min_bytes_per_second: int = 16 * 1024
    """A body may take `stalled_seconds`, and one second more for so many bytes received."""
    discard_seconds: float = 5.0
    """How long to go on receiving what is refused: a client that still sends gets a reset in place of the answer."""
    max_connections: int = 2048
    max_connections_of_address: int = 1024
    """Or of an IPv6 network, which has one owner."""
    trusted_proxies: TrustedProxies = field(default_factory=TrustedProxies)
    """Whose connections are those of many clients, and not limited by address."""
    max_held_bytes: int = 512 << 20
    """Requests that are being received, wait for a thread, or are being answered, altogether."""

    def seconds_for(self, framing: RequestFraming) -> float:
        """Return how long the part of a request may take that is being received: its head, or its body so far."""
        if framing.head is None:
            return self.head_seconds
        return min(self.body_seconds, self.stalled_seconds + framing.body_bytes / self.min_bytes_per_second)


class Admission(Enum):
    """What the head of a request says of how it is to be answered."""

    REFUSED = "refused"
    """By its head alone: its body is not received."""
    LIGHT = "light"
    """At once, whatever else is going on."""
    HEAVY = "heavy"
