"""Who is being answered, and with which model: so that a server that is stopped can wait for the last of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.api.errors import shutting_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.registry.base import Lease


class Visits:
    """Counts them. Safe from any thread."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._inside = 0
        self.closed = False

    @contextmanager
    def using[S](self, acquire: Callable[[], Lease[S]]) -> Iterator[Visit[S]]:
        """Have a model for one reply. Given back here if there is no reply, and else when that is closed."""
        self.enter()
        try:
            visit = Visit(self, acquire())
        except BaseException:
            self.leave()
            raise
        try:
            yield visit
        except BaseException:
            visit.end()
            raise

    def enter(self) -> None:
        """Count somebody in; raise the 503 of a server that is being stopped."""
        with self._change:
            if self.closed:
                raise shutting_down("The server is shutting down, and takes no new requests.")
            self._inside += 1

    def leave(self) -> None:
        """Count somebody out."""
        with self._change:
            self._inside -= 1
            self._change.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._change:
            self.closed = True

    def wait(self, seconds: float | None) -> bool:
        """Wait until nobody is inside; False if that took too long."""
        with self._change:
            return self._change.wait_for(lambda: not self._inside, seconds)


class Visit[S]:
    """One request's stay and the model it uses."""

    def __init__(self, visits: Visits, lease: Lease[S]) -> None:
        self._visits = visits
        self._lease = lease
        self._ended = False

    @property
    def service(self) -> S:
        """What answers."""
        return self._lease.service

    def end(self) -> None:
        """Give the model back and leave. Idempotent."""
        if not self._ended:
            self._ended = True
            self._lease.release()
            self._visits.leave()
