"""A request on its way through the engine thread, and the caller's end of it.

Other threads only put into the inbox and get from an outbox (scheduler.py says why that is enough).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Literal

from mlx_backend.engine.base import Finished, GenerationTimes
from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.base import EngineItem, GenerationRequest


# A request has its turn as if one of the next better priority had come so much later. So nobody is overtaken for
# ever, however many of the better ones keep coming.
OVERTAKING_SECONDS = 30.0


class Order(Enum):
    """What the thread is told beside requests."""

    WAKE = auto()
    STOP = auto()


class Job:
    """A request on its way: written by the engine thread, except for `left`."""

    __slots__ = (
        "admitted",
        "born",
        "cached",
        "deadline",
        "ended",
        "first",
        "key",
        "left",
        "outbox",
        "over",
        "request",
        "tokens",
    )

    def __init__(self, key: int, request: GenerationRequest) -> None:
        self.key = key
        self.request = request
        self.outbox: SimpleQueue[EngineItem | EngineError | None] = SimpleQueue()
        self.left = False  # nobody listens any more
        self.over = False  # nothing more will come
        self.born = perf_counter()
        self.deadline = None if request.queue_timeout is None else monotonic() + request.queue_timeout
        self.admitted = 0.0
        self.first = 0.0
        self.ended = 0.0
        self.cached = 0
        self.tokens = 0

    @property
    def turn(self) -> tuple[float, int]:
        """Its place in the line of those who wait."""
        return self.born + OVERTAKING_SECONDS * self.request.priority, self.key

    def finished(self, reason: Literal["stop", "length"]) -> Finished:
        """Say that it is over and what it cost."""
        times = self.times()
        return Finished(
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.tokens,
            cached_tokens=self.cached,
            queue_seconds=times.queue,
            prefill_seconds=times.prefill,
            decode_seconds=times.decode,
        )

    def times(self) -> GenerationTimes:
        """Say what it has taken up to now, or to its end."""
        now = self.ended or perf_counter()
        admitted = self.admitted or now
        first = self.first or now
        return GenerationTimes(admitted - self.born, first - admitted, now - first)


@dataclass(frozen=True, slots=True, eq=False)
class Warmup:
    """A prompt that may come: nobody listens, and anybody goes first."""

    key: int
    plan: Callable[[], GenerationRequest]


type Message = Job | Warmup | Order | EngineStopped


class ScheduledGeneration:
    """The caller's end of a job. Closing it, leaving its iterator or forgetting it cancels the job."""

    def __init__(self, job: Job, inbox: SimpleQueue[Message]) -> None:
        self._job = job
        self._inbox = inbox
        self._exhausted = False

    def next(self, timeout: float | None = None) -> EngineItem | None:
        """Return the next item, None when `timeout` seconds passed without one. StopIteration at the end."""
        if self._exhausted or self._job.left:
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
        """Return what it has taken so far."""
        return self._job.times()

    def close(self) -> None:
        """Stop generating within one step. Idempotent; a finished generation ignores it."""
        job = self._job
        if not job.left:
            job.left = True
            job.outbox.put(None)
            if not job.over:
                self._inbox.put(job)

    def __del__(self) -> None:
        self.close()
