"""The memory that requests take from their first byte until they are answered: bounded, and for each client too."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_backend.server.received import Received


class HeldBytes:
    """Counts bodies' bytes. One client may hold half of `most`. Belongs to the thread that receives."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._by_client: Counter[str] = Counter()

    def set(self, received: Received, count: int) -> None:
        """Note how many bytes of a request are held now."""
        more, received.held_bytes = count - received.held_bytes, count
        self._total += more
        self._by_client[received.client] += more
        if not self._by_client[received.client]:
            del self._by_client[received.client]

    def is_too_much(self, received: Received) -> bool:
        """Whether all requests together, or those of this one's client, hold more than they may."""
        return self._total > self._most or self._by_client[received.client] > self._most // 2
