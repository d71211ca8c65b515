"""The requests that are being answered, each with the model it has leased: a server that is stopped drains them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.api.errors import shutting_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.registry.base import Lease


class InFlightRequests:
    """Counts requests in and out. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.is_draining = False

    @contextmanager
    def admit[S](self, acquire: Callable[[], Lease[S]]) -> Iterator[Lease[S]]:
        """Count a request in and lease its model until the context ends.

        Raises the 503 of a server that is draining, and whatever `acquire` raises.
        """
        with self._changed:
            if self.is_draining:
                raise shutting_down("The server is shutting down and accepts no new requests.")
            self._count += 1
        try:
            lease = acquire()
            try:
                yield lease
            finally:
                lease.release()
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    @property
    def count(self) -> int:
        """How many requests are in flight."""
        return self._count

    def drain(self) -> None:
        """Admit no more requests."""
        with self._changed:
            self.is_draining = True

    def wait_until_idle(self, seconds: float | None) -> bool:
        """Wait until no request is in flight; False if that took longer than so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)
