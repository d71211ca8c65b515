"""The thread of one embedding or rerank model: jobs in, vectors out, batch by batch.

Knows encoded texts, jobs and time; no strings, no MLX. It drives a `Network`, which is only ever used on this thread.

    submit() ── a job ──▶ queue ──▶ one batch of a job, then of another, then … ──▶ EmbeddingJob.wait()

A job's texts are sorted by length and cut into batches, so that little is padding. Jobs alternate batch by batch: a
query does not wait for a whole library that is being indexed. Which is next, and which gives way when the queue is
full, is decided as for generation (engine/fair_queue.py). Within a batch the device is locked for one stage at a time,
so a chat model on it waits for one stage at most. The size of a stage adapts to the machine's speed and to whether
anything else uses the device: next to a chat model, whose every token waits for a stage, stages are short. A job that
is closed is dropped at its next stage.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from mlx_backend.device.threads import NativeThread
from mlx_backend.engine.base import EngineStatus
from mlx_backend.engine.fair_queue import FairQueue, QueuedJob
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped, first_line

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from mlx_backend.embedding.embedding_config import EmbeddingConfig
    from mlx_backend.embedding.text_encoder import EncodedText, TextEncoder
    from mlx_backend.engine.fair_queue import ClientShare
    from mlx_backend.models.files import ModelType

log = logging.getLogger(__name__)

STAGE_SECONDS = 0.1
"""Target duration of a stage."""
CONTENDED_STAGE_SECONDS = 0.04
"""The same while something else uses the device."""
CONTENTION_SECONDS = 0.001
"""A longer wait for the device means that something else uses it."""
MIN_STAGE_TOKENS, MAX_STAGE_TOKENS = 64, 16_384
MIN_BATCH_TOKENS = 512
"""Running these together pays off on any machine."""
MAX_BATCH_TEXTS = 256
MAX_PADDED_RATIO = 1.5
"""A batch's tokens with padding, relative to those without."""
SPEED_SMOOTHING = 0.3
"""Weight of the latest batch in the average speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInfo:
    """What is known of a loaded network. `dimensions` is 0 for a reranker."""

    model_id: str
    model_type: ModelType
    context_length: int
    encoder: TextEncoder
    config: EmbeddingConfig
    dimensions: int = 0
    accepts_instructions: bool = False
    """Whether a rerank request may say what to look for."""


class Network(Protocol):
    """An embedding or rerank model, run in stages: between two of them others may use the device.

    Every method is called on the worker's thread.
    """

    def load(self, on_progress: Callable[[float], None]) -> NetworkInfo:
        """Load it, reporting progress from 0 to 1. Raises EngineError with a message for users."""
        ...

    def run(
        self, texts: Sequence[EncodedText], dimensions: int | None, stage_tokens: int
    ) -> Generator[None, None, list[array[float]]]:
        """Return a vector for each text. Each `next` runs one stage: about `stage_tokens` tokens' worth of work."""
        ...

    def unload(self) -> None:
        """Free its memory, also after a failed load."""
        ...

    def close(self) -> None:
        """Clean up; the last call on the thread."""
        ...


class EmbeddingJob(QueuedJob):
    """Texts to be run. `wait` for their vectors; `close` may be called from any thread, more than once."""

    def __init__(self, texts: Sequence[EncodedText], dimensions: int | None, share: ClientShare) -> None:
        super().__init__(share)
        self.texts = texts
        self.dimensions = dimensions
        self.closed = False
        self.vectors: list[array[float] | None] = [None] * len(texts)
        self.error: EngineError | None = None
        self._remaining = deque(sorted(range(len(texts)), key=lambda index: len(texts[index].tokens)))
        self._finished = threading.Event()

    def wait(self) -> list[array[float]] | None:
        """Return the vectors in the texts' order; None if the job was closed. Raises EngineError."""
        self._finished.wait()
        if self.error is not None:
            raise self.error
        return None if self.closed else [vector for vector in self.vectors if vector is not None]

    def close(self) -> None:
        """Drop the job: its vectors are no longer wanted."""
        self.closed = True
        self._finished.set()

    def finish(self, error: EngineError | None = None) -> None:
        """Wake the waiting thread; only the worker calls this."""
        self.error = error
        self._finished.set()

    def next_batch(self, max_tokens: int) -> list[int]:
        """Take the next texts of similar length: up to `max_tokens` with padding, but at least one. Return indices."""
        batch: list[int] = []
        tokens = 0
        while self._remaining and len(batch) < MAX_BATCH_TEXTS:
            length = len(self.texts[self._remaining[0]].tokens)
            tokens += length
            padded = length * (len(batch) + 1)
            too_padded = padded > max(MIN_BATCH_TOKENS, MAX_PADDED_RATIO * tokens)
            if batch and (padded > max_tokens or too_padded):
                break
            batch.append(self._remaining.popleft())
        return batch

    @property
    def is_exhausted(self) -> bool:
        """Whether every text has been taken."""
        return not self._remaining


class Worker:
    """Runs one network on one thread. Loads it when constructed; raises EngineError if that fails."""

    def __init__(
        self,
        network: Network,
        device: AbstractContextManager[None],
        *,
        max_waiting: int = 256,
        on_progress: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self._contended = False
        self._network = network
        self._device = device
        self._max_waiting = max_waiting
        self._on_progress = on_progress or (lambda _fraction: None)
        self._changed = threading.Condition()
        self._queue: FairQueue[EmbeddingJob] = FairQueue()
        self._current: EmbeddingJob | None = None
        self._stopping = False
        self._info: NetworkInfo | None = None
        self._load_error: EngineError | None = None
        self._load_finished = threading.Event()
        self._tokens_per_second = 0.0
        self._thread = NativeThread(target=self._run, name="embedding", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._load_finished.wait()
        if self._load_error is not None:
            self.stop()
            raise self._load_error

    @property
    def info(self) -> NetworkInfo:
        """What was loaded."""
        assert self._info is not None  # the constructor has waited for it
        return self._info

    @property
    def model_id(self) -> str:
        """The name clients use for the model."""
        return self.info.model_id

    @property
    def context_length(self) -> int:
        """The maximum length of a text, in tokens."""
        return self.info.context_length

    def submit(
        self, texts: Sequence[EncodedText], dimensions: int | None = None, *, client: str = ""
    ) -> EmbeddingJob:
        """Queue a client's texts and return at once. Raises EngineBusy or EngineStopped."""
        with self._changed:
            if self._stopping:
                raise EngineStopped("The model is being unloaded.")
            share = self._queue.share_of(client)
            job = EmbeddingJob(texts, dimensions, share)
            if not texts:
                job.finish()
                return job
            if len(self._queue) >= self._max_waiting:
                self._make_room(share)
            share.submitted += 1
            self._enqueue(job)
        return job

    def status(self) -> EngineStatus:
        """Return what it is doing."""
        with self._changed:
            if self._stopping:
                return EngineStatus(state="stopped")
            running = int(self._current is not None)
            return EngineStatus(state="ready", running=running, waiting=len(self._queue))

    def is_healthy(self) -> bool:
        """Whether jobs are being run."""
        return not self._stopping and self._thread.is_alive()

    def stop(self) -> None:
        """Fail every job, stop the thread and join it. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.stop)

    def _make_room(self, share: ClientShare) -> None:
        """Take a job out of a full queue: one that was closed, or of a client with more of them. Raises EngineBusy."""
        busy = EngineBusy(f"The server is busy: {len(self._queue)} embedding requests are waiting.")
        leaving = [job for job in self._queue if job.closed]
        if not leaving:
            running = [self._current] if self._current is not None else []
            if not self._queue.may_displace(share, running):
                raise busy
            leaving = [self._queue.displaced()]
        for job in leaving:
            self._queue.remove(job)
            job.share.finished += 1
            job.finish(busy)

    def _enqueue(self, job: EmbeddingJob) -> None:
        job.queued_at = perf_counter()  # again after each batch: the jobs of one client alternate too
        self._queue.add(job)
        self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._load()
            while self._load_error is None and (job := self._next_job()) is not None:
                has_more = self._advance(job)
                with self._changed:
                    self._current = None
                    if has_more:
                        self._enqueue(job)
                    else:
                        job.share.finished += 1
        finally:
            self._network.unload()
            self._network.close()

    def _load(self) -> None:
        try:
            self._info = self._network.load(self._on_progress)
        except EngineError as error:
            self._load_error = error
        except Exception as error:
            log.exception("An embedding model could not be loaded.")
            self._load_error = EngineError(f"The model could not be loaded: {error}.")
        self._load_finished.set()

    def _next_job(self) -> EmbeddingJob | None:
        """Wait for a job; None when the worker stops."""
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if self._stopping:
                for job in list(self._queue):
                    self._queue.remove(job)
                    job.finish(EngineStopped("The server is stopping."))
                return None
            self._current = self._queue.next()
            self._queue.remove(self._current)
            return self._current

    def _advance(self, job: EmbeddingJob) -> bool:
        """Run one batch of a job; return whether it has more."""
        if job.closed:
            return False
        seconds = CONTENDED_STAGE_SECONDS if self._contended else STAGE_SECONDS
        stage_tokens = int(min(MAX_STAGE_TOKENS, max(MIN_STAGE_TOKENS, self._tokens_per_second * seconds)))
        batch = job.next_batch(max(stage_tokens, MIN_BATCH_TOKENS))
        try:
            completed = self._run_batch(job, batch, stage_tokens)
        except Exception as error:
            log.exception("A batch of %d texts could not be run.", len(batch))
            job.finish(
                error
                if isinstance(error, EngineError)
                else EngineError(f"The model failed: {first_line(error)}.")
            )
            return False
        if not completed:
            if self._stopping:
                job.finish(EngineStopped("The server is stopping."))
            return False
        job.share.served += sum(len(job.texts[index].tokens) for index in batch)
        if job.is_exhausted:
            job.finish()
        return not job.is_exhausted

    def _run_batch(self, job: EmbeddingJob, batch: list[int], stage_tokens: int) -> bool:
        """Compute a batch's vectors; False if it was dropped because the job was closed or the worker is stopping."""
        texts = [job.texts[index] for index in batch]
        stages = self._network.run(texts, job.dimensions, stage_tokens)
        busy = max_wait = 0.0
        vectors: list[array[float]] | None = None
        while vectors is None:
            if job.closed or self._stopping:
                stages.close()
                return False
            wait, duration, vectors = self._run_stage(stages)
            max_wait, busy = max(max_wait, wait), busy + duration
        self._contended = max_wait > CONTENTION_SECONDS
        self._measure_speed(len(texts) * max(len(text.tokens) for text in texts), busy)
        for index, vector in zip(batch, vectors, strict=True):
            job.vectors[index] = vector
        return True

    def _run_stage(
        self, stages: Generator[None, None, list[array[float]]]
    ) -> tuple[float, float, list[array[float]] | None]:
        """Run one stage with the device locked.

        Return the seconds it waited for the device, the seconds it took, and the vectors if it was the last.
        """
        requested = self._clock()
        with self._device:
            started = self._clock()
            try:
                next(stages)
                vectors = None
            except StopIteration as end:
                vectors = end.value
            return started - requested, self._clock() - started, vectors

    def _measure_speed(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_STAGE_TOKENS and seconds > 0:
            speed = tokens / seconds
            old = self._tokens_per_second or speed
            self._tokens_per_second = (1 - SPEED_SMOOTHING) * old + SPEED_SMOOTHING * speed
