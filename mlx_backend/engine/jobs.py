"""A request on its way through the engine thread (a job), and the caller's end of it.

The engine thread (scheduler.py) puts a job's items into its outbox, and the caller takes them out.
"""

from __future__ import annotations

import math
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.base import Finished, GenerationTimes, Queued
from mlx_backend.engine.fair_queue import QueuedJob
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import EngineItem, GenerationRequest
    from mlx_backend.engine.batch import Ended
    from mlx_backend.engine.fair_queue import ClientShare


class Job(QueuedJob):
    """A request on its way: written by the engine thread, except for `is_cancelled`. Times are by `perf_counter`."""

    def __init__(self, key: int, request: GenerationRequest, share: ClientShare) -> None:
        super().__init__(share, request.priority)
        self.key = key
        self.request = request
        self.outbox: SimpleQueue[EngineItem | EngineError | None] = SimpleQueue()
        self.on_item: Callable[[], None] | None = None  # Called for each item, from whichever thread puts it.
        self.is_cancelled = False  # The caller no longer gets from the outbox.
        self.is_finished = False  # Nothing more is put into the outbox.
        self.deadline = math.inf if request.queue_timeout is None else self.queued_at + request.queue_timeout
        self.admitted_at = self.first_token_at = self.ended_at = 0.0
        self.cached_tokens = self.generated_tokens = 0

    def put(self, item: EngineItem | EngineError | None) -> None:
        """Put an item into the outbox; None if the caller has closed its end."""
        self.outbox.put(item)
        if self.on_item is not None:
            self.on_item()

    def finished(self, ended: Ended) -> Finished:
        """Return the last item, with what the request has cost."""
        times = self.times()
        return Finished(
            reason=ended.reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.generated_tokens,
            cached_tokens=self.cached_tokens,
            queue_seconds=times.queue,
            prefill_seconds=times.prefill,
            decode_seconds=times.decode,
            drafted_tokens=ended.drafted_tokens,
            accepted_tokens=ended.accepted_tokens,
        )

    def times(self) -> GenerationTimes:
        """Return how long each stage has taken, up to now or to the end."""
        now = self.ended_at or perf_counter()
        admitted_at = self.admitted_at or now
        first_token_at = self.first_token_at or now
        return GenerationTimes(
            admitted_at - self.queued_at, first_token_at - admitted_at, now - first_token_at
        )


class Generation:
    """The caller's end of a job. Closing it, leaving its iterator or dropping it cancels the job."""

    def __init__(
        self, job: Job, on_close: Callable[[Job], None], position_of: Callable[[Job], int | None]
    ) -> None:
        self._job = job
        self._on_close = on_close
        self._position_of = position_of
        self._exhausted = False

    def notify(self, on_item: Callable[[], None]) -> None:
        """Have `on_item` called, from any thread, when there may be something for `next`."""
        self._job.on_item = on_item
        if not self._job.outbox.empty():
            on_item()

    def next(self, timeout: float | None = None) -> EngineItem | None:
        """Return the next item, None when `timeout` seconds passed without one. StopIteration at the end."""
        if self._exhausted or self._job.is_cancelled:
            raise StopIteration
        try:
            item = self._job.outbox.get(timeout=timeout)
        except Empty:
            return None
        match item:
            case None:  # closed by another thread while this one waited
                raise StopIteration
            case EngineError():
                self._exhausted = True
                raise item
            case Finished():
                self._exhausted = True
        return item

    def __iter__(self) -> Iterator[EngineItem]:
        try:
            while True:
                try:
                    item = self.next()
                except StopIteration:
                    return
                assert item is not None  # only a timeout gives None
                yield item
        finally:
            self.close()

    def queued(self) -> Queued | None:
        """Return where in the queue it waits; None once it is prefilled."""
        position = self._position_of(self._job)
        return None if position is None else Queued(position)

    def times(self) -> GenerationTimes:
        """Return how long each stage has taken so far."""
        return self._job.times()

    def close(self) -> None:
        """Stop generating within one step. Idempotent; a finished generation ignores it."""
        job = self._job
        if not job.is_cancelled:
            job.is_cancelled = True
            job.put(None)
            if not job.is_finished:
                self._on_close(job)

    def __del__(self) -> None:
        self.close()
