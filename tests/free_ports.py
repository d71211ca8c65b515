"""Ports for what cannot be told to take any free one, and ports at which nothing listens."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_PORTS = iter(random.SystemRandom().sample(range(20_000, 32_000), 10_000))
"""Ports that no system hands out by itself, so that no other program takes one before it is used.

They come in an order of each process's own, and each once: what a plugin remembers of a server is not that of another.
"""


def free_port() -> int:
    """Return a port at which nothing listens, and that no other test is given."""
    for port in _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port is in use")
