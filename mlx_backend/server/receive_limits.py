"""Limits on time and memory while requests are received, and how a request is to be answered, by its head."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    max_held_bytes: int = 512 << 20
    """Requests that are being received, wait for a thread, or are being answered, altogether."""


class Admission(Enum):
    """What the head of a request says of how it is to be answered."""

    REFUSED = "refused"
    """By its head alone: its body is not received."""
    LIGHT = "light"
    """At once, whatever else is going on."""
    HEAVY = "heavy"
