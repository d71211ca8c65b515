"""How many requests are prepared at the same time. Small ones never wait for large ones.

Parsing, rendering and tokenising a request takes memory and time in proportion to its size: some hundred bytes for each
byte of its body. So those with a body of megabytes have a few slots. The others have more of them: Python runs
one thread at a time, and with a hundred that want to, the one that accepts connections and the engine's wait for them
all. Slots are fair between clients. Knows bodies as a number of bytes.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from mlx_backend.device.host_memory import give_back_free_memory
from mlx_backend.errors import EngineBusy
from mlx_backend.preparation import Preparation, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.api.addresses import OnDisconnect

LARGE_BODY = 64 << 10
"""Bytes. An agent's request with 30,000 tokens of history has about 100 KB."""
MAX_LARGE = 2
"""At the same time. More would not be faster: Python runs one thread at a time, and the engine needs its share."""
MAX_SMALL, MAX_SMALL_OF_CLIENT = 16, 8
"""At the same time. One that waits for a grammar that is validated in another process is not counted meanwhile."""
_RETURNED_FROM = 1 << 20
"""Bytes of a body from which on the system gets back what its preparation has freed."""
_RETURNED_AFTER = 10.0
"""Seconds after which it gets back what smaller ones have freed: whole pages among what is still used."""


class Preparations:
    """The preparations of one server's requests. Safe to use from any thread."""

    def __init__(
        self,
        seconds: float,
        *,
        wait_seconds: float,
        max_large: int = MAX_LARGE,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._large_slots = Slots(max_large)
        self._small_slots = Slots(MAX_SMALL, max_of_client=MAX_SMALL_OF_CLIENT)
        self._guard = threading.Lock()
        self._running: dict[Preparation, bool] = {}  # whether it takes long
        self._stops_long = self._stops_all = False
        self._clock = clock
        self._return_at = clock() + _RETURNED_AFTER

    @contextmanager
    def of(self, body_bytes: int, on_disconnect: OnDisconnect, client: str = "") -> Iterator[None]:
        """Prepare a request within the block, which begins when it has a slot.

        Raises PreparationCancelled if the client leaves or the server stops, EngineBusy if no slot comes free.
        """
        preparation = Preparation(self._seconds, client)
        is_large = body_bytes >= LARGE_BODY
        slots = self._large_slots if is_large else self._small_slots
        # A small one waits for milliseconds of others' work, also where no request is to wait for the engine.
        wait_seconds = self._wait_seconds if is_large else max(self._wait_seconds, self._seconds)
        with (
            self._cancellable(preparation, on_disconnect, takes_long=is_large),
            slots.slot_for(preparation, wait_seconds, client) as has_slot,
        ):
            if not has_slot:
                raise EngineBusy(
                    f"Other requests are being prepared, and this one has waited {wait_seconds:g} seconds."
                )
            try:
                # A large one takes memory while it waits.
                with preparation.running(nullcontext if is_large else partial(slots.given_back, client)):
                    yield
            finally:
                if body_bytes >= _RETURNED_FROM:
                    with self._guard:
                        self._return_at = 0.0

    @contextmanager
    def waiting(self, on_disconnect: OnDisconnect) -> Iterator[None]:
        """Wait within the block for a model that is loaded, which has a deadline of its own.

        A wait there ends with PreparationCancelled if the client leaves or the server is about to stop.
        """
        preparation = Preparation()
        with self._cancellable(preparation, on_disconnect, takes_long=True), preparation.as_current():
            yield

    @contextmanager
    def _cancellable(
        self, preparation: Preparation, on_disconnect: OnDisconnect, *, takes_long: bool
    ) -> Iterator[None]:
        with self._guard:
            self._running[preparation] = takes_long
            is_stopped = self._stops_all or (takes_long and self._stops_long)
        if is_stopped:
            preparation.cancel(is_stopping=True)
        try:
            with on_disconnect(preparation.cancel):
                yield
        finally:
            with self._guard:
                del self._running[preparation]

    def give_back_memory(self) -> None:
        """Give back to the system what requests have freed: what a large one has at once, else now and then.

        Call it when nothing of a request's body is referred to any more.
        """
        now = self._clock()
        with self._guard:
            is_due = now >= self._return_at
            if is_due:
                self._return_at = now + _RETURNED_AFTER
        if is_due:
            give_back_free_memory()

    def drain(self) -> None:
        """Cancel those that take long, now and from now on: the server is about to stop."""
        self._stops_long = True
        self._cancel()

    def stop(self) -> None:
        """Cancel all, now and from now on: the server stops."""
        self._stops_all = True
        self._cancel()

    def _cancel(self) -> None:
        with self._guard:
            running = [each for each, takes_long in self._running.items() if takes_long or self._stops_all]
        for preparation in running:
            preparation.cancel(is_stopping=True)
