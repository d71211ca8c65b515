"""A request on its way through the engine thread (a job), and the caller's end of it.

Other threads only put into the inbox and get from an outbox; scheduler.py explains why that is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.base import Finished, GenerationTimes
from mlx_backend.engine.fair_queue import QueuedJob
from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import EngineItem, GenerationRequest
    from mlx_backend.engine.batch import Ended
    from mlx_backend.engine.fair_queue import ClientShare


class Signal(Enum):
    """What the thread is sent next to requests."""

    WAKE = auto()
    STOP = auto()


class Job(QueuedJob):
    """A request on its way: written by the engine thread, except for `is_cancelled`. Times are by `perf_counter`."""

    __slots__ = (
        "admitted_at",
        "cached_tokens",
        "deadline",
        "ended_at",
        "first_token_at",
        "generated_tokens",
        "is_cancelled",
        "is_finished",
        "key",
        "outbox",
        "request",
    )

    def __init__(self, key: int, request: GenerationRequest, share: ClientShare) -> None:
        super().__init__(share, request.priority)
        self.key = key
        self.request = request
        self.outbox: SimpleQueue[EngineItem | EngineError | None] = SimpleQueue()
        self.is_cancelled = False  # The caller no longer gets from the outbox.
        self.is_finished = False  # Nothing more is put into the outbox.
        self.deadline = math.inf if request.queue_timeout is None else self.queued_at + request.queue_timeout
        self.admitted_at = self.first_token_at = self.ended_at = 0.0
        self.cached_tokens = self.generated_tokens = 0

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


@dataclass(frozen=True, slots=True, eq=False)
class Warmup:
    """A prompt that is likely to come. No caller waits for it, and every request goes first."""

    key: int
    make_request: Callable[[], GenerationRequest]


type Message = Job | Warmup | Signal | EngineStopped


class Generation:
    """The caller's end of a job. Closing it, leaving its iterator or dropping it cancels the job."""

    def __init__(self, job: Job, inbox: SimpleQueue[Message]) -> None:
        self._job = job
        self._inbox = inbox
        self._exhausted = False

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

    def times(self) -> GenerationTimes:
        """Return how long each stage has taken so far."""
        return self._job.times()

    def close(self) -> None:
        """Stop generating within one step. Idempotent; a finished generation ignores it."""
        job = self._job
        if not job.is_cancelled:
            job.is_cancelled = True
            job.outbox.put(None)
            if not job.is_finished:
                self._inbox.put(job)

    def __del__(self) -> None:
        self.close()
