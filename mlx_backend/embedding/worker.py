"""The thread of one embedding model: jobs in, vectors out, piece by piece.

Knows rows, jobs and time; no text, no MLX. What it drives is a `Network`, on this thread and on no other.

    submit() ── a job ──▶ line ──▶ one piece of the first job, then of the next, then … ──▶ Job.wait()

A job's rows are sorted by length and cut into pieces, so that little is padding. Jobs take turns piece by piece: a
question is not kept waiting by a whole library that is being read. Within a piece the device is held for one stage
at a time; a chat that runs beside it waits for no more than that. How much a stage does adapts to the machine, and to
whether somebody else uses the device: beside a chat, whose every token waits for a stage, stages are short.
A job that is closed is dropped at its next stage.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.base import EngineStatus
from mlx_backend.errors import EngineBusy, EngineError, EngineStopped

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from mlx_backend.embedding.base import Network, NetworkFacts, Row

log = logging.getLogger(__name__)

STAGE_SECONDS = 0.1  # that others who may come wait for the device
SHORT_STAGE_SECONDS = 0.04  # that others who are there do
COMPANY_SECONDS = 0.001  # of waiting for the device tell that somebody is there
MIN_TOKENS, MAX_TOKENS = 64, 16_384  # of a stage
PIECE_TOKENS = 512  # that are worth running together however slow the machine is
MAX_ROWS = 256  # in a piece
MAX_PADDED = 1.5  # times what its rows hold


class Job:
    """Rows on their way. `wait` for their vectors; `close` may be called from any thread, more than once."""

    def __init__(self, rows: Sequence[Row], dimensions: int | None) -> None:
        self.rows = rows
        self.dimensions = dimensions
        self.closed = False
        self.vectors: list[array[float] | None] = [None] * len(rows)
        self.error: EngineError | None = None
        self._order = deque(sorted(range(len(rows)), key=lambda at: len(rows[at].tokens)))
        self._over = threading.Event()

    def wait(self) -> list[array[float]] | None:
        """Return the vectors in their rows' order; None if the job was closed. Raises EngineError."""
        self._over.wait()
        if self.error is not None:
            raise self.error
        return None if self.closed else [vector for vector in self.vectors if vector is not None]

    def close(self) -> None:
        """Nobody wants the vectors any more."""
        self.closed = True
        self._over.set()

    def end(self, error: EngineError | None = None) -> None:
        """Tell whoever waits; for the worker."""
        self.error = error
        self._over.set()

    def next_piece(self, most: int) -> list[int]:
        """Take rows of like length that come to `most` tokens, padding included; one row in any case."""
        piece: list[int] = []
        tokens = 0
        while self._order and len(piece) < MAX_ROWS:
            length = len(self.rows[self._order[0]].tokens)
            tokens += length
            padded = length * (len(piece) + 1)
            if piece and (padded > most or padded > max(PIECE_TOKENS, MAX_PADDED * tokens)):
                break
            piece.append(self._order.popleft())
        return piece

    @property
    def done(self) -> bool:
        """Whether every row has been taken."""
        return not self._order


class Worker:
    """Runs one network on one thread. Loads it when constructed; raises EngineError if that fails."""

    def __init__(
        self,
        network: Network,
        device: AbstractContextManager[None],
        *,
        max_waiting: int = 256,
        report: Callable[[float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self._company = False
        self._network = network
        self._device = device
        self._max_waiting = max_waiting
        self._report = report or (lambda _part: None)
        self._changed = threading.Condition()
        self._line: deque[Job] = deque()
        self._current: Job | None = None
        self._stopping = False
        self._state: str = "loading"
        self._facts: NetworkFacts | None = None
        self._failure: EngineError | None = None
        self._started = threading.Event()
        self._speed = 0.0  # tokens a second
        self._thread = threading.Thread(target=self._run, name="embedding", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self._started.wait()
        if self._failure is not None:
            self.stop()
            raise self._failure

    @property
    def facts(self) -> NetworkFacts:
        """What was loaded."""
        assert self._facts is not None  # the constructor has waited for it
        return self._facts

    @property
    def model_id(self) -> str:
        """The name clients use for the model."""
        return self.facts.model_id

    @property
    def context_length(self) -> int:
        """A row holds at most this many tokens."""
        return self.facts.context_length

    def submit(self, rows: Sequence[Row], dimensions: int | None = None) -> Job:
        """Queue rows and return at once. Raises EngineBusy or EngineStopped."""
        job = Job(rows, dimensions)
        if not rows:
            job.end()
            return job
        with self._changed:
            if self._stopping:
                raise EngineStopped("The model is being unloaded.")
            if len(self._line) >= self._max_waiting:
                raise EngineBusy(f"The server is busy: {len(self._line)} requests for vectors are waiting.")
            self._line.append(job)
            self._changed.notify_all()
        return job

    def status(self) -> EngineStatus:
        """What it is doing."""
        with self._changed:
            running = int(self._current is not None)
            waiting = len(self._line)
            state: EngineStatus = EngineStatus(state="ready", running=running, waiting=waiting)
            return EngineStatus(state="stopped") if self._stopping else state

    def is_healthy(self) -> bool:
        """Whether jobs are being run."""
        return not self._stopping and self._thread.is_alive()

    def stop(self) -> None:
        """End every job with an error, stop the thread and join it. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.stop)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                self._facts = self._network.load(self._report)
            except EngineError as error:
                self._failure = error
            except Exception as error:
                log.exception("An embedding model could not be loaded.")
                self._failure = EngineError(f"The model could not be loaded: {error}.")
            self._started.set()
            while self._failure is None and (job := self._next()) is not None:
                self._advance(job)
        finally:
            self._network.unload()
            self._network.close()

    def _next(self) -> Job | None:
        with self._changed:
            self._current = None
            while not self._line and not self._stopping:
                self._changed.wait()
            if self._stopping:
                for job in self._line:
                    job.end(EngineStopped("The server is stopping."))
                self._line.clear()
                return None
            self._current = self._line.popleft()
            return self._current

    def _advance(self, job: Job) -> None:
        """Run one piece of a job; put it at the line's end if there is more of it."""
        if job.closed:
            return
        seconds = SHORT_STAGE_SECONDS if self._company else STAGE_SECONDS
        stage = int(min(MAX_TOKENS, max(MIN_TOKENS, self._speed * seconds)))
        piece = job.next_piece(max(stage, PIECE_TOKENS))
        try:
            done = self._run_piece(job, piece, stage)
        except Exception as error:
            log.exception("A piece of %d texts could not be run.", len(piece))
            text = str(error).strip().splitlines()
            reason = text[0] if text else type(error).__name__
            job.end(error if isinstance(error, EngineError) else EngineError(f"The model failed: {reason}."))
            return
        if not done:
            if self._stopping:
                job.end(EngineStopped("The server is stopping."))
            return
        if job.done:
            job.end()
            return
        with self._changed:
            self._line.append(job)

    def _run_piece(self, job: Job, piece: list[int], stage: int) -> bool:
        """Fill in a piece's vectors; False if nobody wants them any more."""
        rows = [job.rows[at] for at in piece]
        running = self._network.run(rows, job.dimensions, stage)
        spent = waited = 0.0
        while True:
            if job.closed or self._stopping:
                running.close()
                return False
            asked = self._clock()
            with self._device:
                begun = self._clock()
                waited = max(waited, begun - asked)
                try:
                    next(running)
                except StopIteration as end:
                    vectors = end.value
                    break
                finally:
                    spent += self._clock() - begun
        self._company = waited > COMPANY_SECONDS
        tokens = len(rows) * max(len(row.tokens) for row in rows)
        if tokens >= MIN_TOKENS and spent > 0:
            now = tokens / spent
            self._speed = now if not self._speed else 0.7 * self._speed + 0.3 * now
        for at, vector in zip(piece, vectors, strict=True):
            job.vectors[at] = vector
        return True
