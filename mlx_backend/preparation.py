"""The preparation of a request, which is all that is done for it before an engine takes it.

Reading a body of megabytes, rendering a conversation and compiling schemas take processor time that a client decides
on. So a preparation has a deadline, and is cancelled when its client leaves or the server stops. What takes long asks
for the current one from wherever it is: `current().check()` in a loop, `cancelled_by` around something that another
thread can stop. Outside of a request there is one that never ends.

Knows no HTTP, no engine, and nothing of what is prepared.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class PreparationCancelled(Exception):
    """The request's client has gone, or the server stops (`is_stopping`), which the client would like to know."""

    def __init__(self, *, is_stopping: bool = False) -> None:
        super().__init__("The request was cancelled while it was being prepared.")
        self.is_stopping = is_stopping


class Preparation:
    """How long the work on one request may take, in seconds, and whether its `client` still waits for it.

    `cancel` may be called from any thread; everything else belongs to the thread that prepares.
    """

    def __init__(self, seconds: float = math.inf, client: str = "") -> None:
        self.client = client
        self._seconds = seconds
        self._deadline = math.inf
        self._cancelled: PreparationCancelled | None = None
        self._guard = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._without_slot: Callable[[], AbstractContextManager[None]] = nullcontext

    @contextmanager
    def running(
        self, without_slot: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Make it the current one of this thread; its time begins. Raises PreparationCancelled if it is.

        `without_slot` gives its slot to others within the block.
        """
        self._deadline = time.monotonic() + self._seconds
        self._without_slot = without_slot
        with self.as_current():
            self.check()
            yield

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make it the current one of this thread, also if it is cancelled."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def waiting(self) -> AbstractContextManager[None]:
        """Let others have its slot within the block, in which it waits for what takes nothing of this process.

        It goes on after the block at once.
        """
        return self._without_slot()

    @property
    def seconds_left(self) -> float:
        """The seconds until the deadline, never below 0."""
        return max(self._deadline - time.monotonic(), 0.0)

    @property
    def is_cancelled(self) -> bool:
        """Whether its client has gone, or the server stops."""
        return self._cancelled is not None

    def check_cancelled(self) -> None:
        """Raise PreparationCancelled if it is."""
        if self._cancelled is not None:
            raise self._cancelled

    def check(self) -> None:
        """Raise PreparationCancelled if it is, and the RequestError of a request that takes too long to prepare."""
        self.check_cancelled()
        if not self.seconds_left:
            raise RequestError(
                f"Preparing the request took longer than {self._seconds:g} seconds, which is this server's limit: "
                "send fewer messages, images or tools, or simpler schemas.",
                code="too_complex",
            )

    def cancel(self, *, is_stopping: bool = False) -> None:
        """Stop it, from any thread. Idempotent."""
        with self._guard:
            if self._cancelled is not None:
                return
            self._cancelled = PreparationCancelled(is_stopping=is_stopping)
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            callback()

    @contextmanager
    def cancelled_by(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have `callback` called, once and from another thread, if it is cancelled within the block or was before."""
        key = object()
        with self._guard:
            is_cancelled = self._cancelled is not None
            self._callbacks[key] = callback
        if is_cancelled:
            callback()
        try:
            yield
        finally:
            with self._guard:
                del self._callbacks[key]


class Slots:
    """Lets a number of preparations at a time into a block. Safe to use from any thread.

    A slot may also be a unit such as a byte; `amount` says how many a preparation needs. Next is the client with the
    fewest in use, of equals the one who has waited longest; one client has at most `max_of_client` in use.
    """

    def __init__(self, at_once: int, *, max_of_client: int | None = None) -> None:
        self._guard = threading.Lock()
        self._at_once = self._free = at_once
        self._max_of_client = max_of_client or at_once
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, dict[_Waiting, None]] = {}

    @contextmanager
    def slot_for(
        self, preparation: Preparation, wait_seconds: float, client: str = "", amount: int = 1
    ) -> Iterator[bool]:
        """Wait for a slot, which lasts for the block; False if none has come within `wait_seconds`.

        An `amount` that is more than there is at once gets all of it. Raises PreparationCancelled if the preparation is
        cancelled meanwhile.
        """
        waiting = _Waiting(client, min(amount, self._at_once))
        with preparation.cancelled_by(waiting.wake.set):
            with self._guard:
                self._waiting.setdefault(client, {})[waiting] = None
                self._give()
            waiting.wake.wait(None if wait_seconds == math.inf else wait_seconds)
        with self._guard:
            if not waiting.has_slot:
                self._remove(waiting)
                self._give()  # what is free may be enough for those that come after
        try:
            preparation.check_cancelled()
            yield waiting.has_slot
        finally:
            if waiting.has_slot:
                with self._guard:
                    self._end(client, waiting.amount)

    @contextmanager
    def given_back(self, client: str = "") -> Iterator[None]:
        """Give a slot of this client to others within the block; it has one again after it, even if all are taken.

        So no preparation waits for a slot while it holds something that others, who have one, wait for.
        """
        with self._guard:
            self._end(client, 1)
        try:
            yield
        finally:
            with self._guard:
                self._begin(client, 1)

    def __len__(self) -> int:
        """Return how many wait."""
        with self._guard:
            return sum(map(len, self._waiting.values()))

    def _give(self) -> None:
        """Give what is free to those that are next. Only those are woken: others would look and wait again."""
        while self._free > 0 and self._waiting:
            client = min(self._waiting, key=self._running.__getitem__)
            if self._running[client] >= self._max_of_client:
                return
            waiting = next(iter(self._waiting[client]))
            if waiting.amount > self._free:
                return
            self._remove(waiting)
            if client in self._waiting:
                self._waiting[client] = self._waiting.pop(client)  # after the others
            self._begin(client, waiting.amount)
            waiting.has_slot = True
            waiting.wake.set()

    def _begin(self, client: str, amount: int) -> None:
        self._free -= amount
        self._running[client] += 1

    def _end(self, client: str, amount: int) -> None:
        self._free += amount
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._give()

    def _remove(self, waiting: _Waiting) -> None:
        of_client = self._waiting[waiting.client]
        del of_client[waiting]
        if not of_client:
            del self._waiting[waiting.client]


class _Waiting:
    """One preparation that waits for its slot."""

    def __init__(self, client: str, amount: int) -> None:
        self.client = client
        self.amount = amount
        self.wake = threading.Event()
        self.has_slot = False


_UNLIMITED = Preparation()
_current: ContextVar[Preparation] = ContextVar("preparation", default=_UNLIMITED)


def current() -> Preparation:
    """Return the preparation that this thread is at."""
    return _current.get()
