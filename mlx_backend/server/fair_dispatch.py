"""Requests that wait for a thread: at most so many are answered at once, and the next is of who has fewest of them.

One client never has all threads: its requests may all wait for the same thing, such as a model that is being loaded.
Belongs to the thread that receives. Knows connections by their clients alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_backend.server.received import Connection


class FairDispatch:
    """The requests that wait, in the order in which they came for each client, and how many of each are answered."""

    def __init__(self, max_running: int, max_of_client: int) -> None:
        self._max_running = max_running
        self._max_of_client = max_of_client
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}

    def add(self, connection: Connection) -> None:
        """Queue a request."""
        self._waiting.setdefault(connection.received.client, {})[connection] = None

    def discard(self, connection: Connection) -> None:
        """Forget a request, if it waits."""
        waiting = self._waiting.get(connection.received.client, {})
        if connection in waiting:
            del waiting[connection]
            if not waiting:
                del self._waiting[connection.received.client]

    def next(self) -> Connection | None:
        """Take the request that is to be answered now, and count it; None while there is none, or no room."""
        if not self._waiting or self._running.total() >= self._max_running:
            return None
        client = min(self._waiting, key=self._running.__getitem__)  # of equals the one who has waited longest
        if self._running[client] >= self._max_of_client:
            return None
        waiting = self._waiting.pop(client)
        connection = next(iter(waiting))
        del waiting[connection]
        if waiting:
            self._waiting[client] = waiting  # behind the others
        self._running[client] += 1
        return connection

    def finished(self, client: str) -> None:
        """Note that a request has been answered."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
