"""The engine thread: what it receives, what it runs, what it delivers, and how it restarts.

Knows requests, items and time; no model, no HTTP and no MLX. It drives a `Batch`, which is loaded, given requests,
stepped and unloaded, always on this thread and on no other.

    generate()  ── a new job ─────────▶ ┌───────┐  insert  ┌─────────┐  step  ┌────────┐
    close()     ── a cancelled job ───▶ │ inbox │ ───────▶ │ running │ ─────▶ │ outbox │ ──▶ Generation.next()
    stop()      ── a signal ──────────▶ └───────┘          └─────────┘        └────────┘

Between two steps the thread empties its inbox, so a new request waits for one step at most, and so does a
cancellation. With nothing to step it sleeps on the inbox. A job is put into the inbox when it is submitted and once
more if its generation is closed; it finishes exactly once.

Queue: by priority, and fair between clients (fair_queue.py). The batch decides whether the next has room now: few
prompts are prefilled at a time, so that what comes later can still be fair, or short and next. Warm-ups,
prompts that are likely to come, rank below every request: they are prefilled while nothing else is to be done, and
preempted within a step when a request comes. What it takes to make one, a thread of its own does, one at a time.

Failures: what a step raises cannot be blamed on one request. Those that were running fail, the batch is unloaded and
loaded again, and those in the queue go on waiting. If it fails again before any request was answered, those fail as
well, and the next attempt comes after a delay that doubles each time.

Locks: other threads only ever put into the inbox and get from an outbox. Both are `queue.SimpleQueue`, whose `put` is
reentrant: a finaliser or a signal handler may call it while it interrupts another `put`. The one lock is for callers
of `submit` among themselves; the engine thread never takes it, so `stop` cannot deadlock.

Memory: an outbox holds at most what its request may produce (prompt / chunk + max_tokens items), the queue at most
`max_waiting` jobs, the warm-ups are at most `MAX_WARMUPS`.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from mlx_backend.device.threads import NativeThread
from mlx_backend.engine.base import EngineStatus, Finished, Progress, PromptLogprobs, TokenDelta
from mlx_backend.engine.batch import FEW_TOKENS, Ended
from mlx_backend.engine.fair_queue import FairQueue
from mlx_backend.engine.jobs import Generation, Job
from mlx_backend.errors import EngineBusy, EngineError, EngineFailed, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Batch, ModelInfo, Outcome

log = logging.getLogger(__name__)

FIRST_RESTART_DELAY = 1.0
"""Seconds before the second restart in a row; doubled for each one after it."""
MAX_RESTART_DELAY = 60.0
MAX_WARMUPS = 16
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a client pays for a token: one that is decoded takes more of a step than one of a prompt."""


class _Signal(Enum):
    """What the thread is sent in addition to requests."""

    WAKE = auto()
    STOP = auto()


@dataclass(slots=True, eq=False)
class _Warmup:
    """A prompt that is likely to come. No caller waits for it, and every request goes first.

    `request` is what was made while it was being made; None where nothing is to be prefilled any more.
    """

    key: int
    make_request: Callable[[], GenerationRequest | None]
    request: GenerationRequest | None = None


type Message = Job | _Warmup | _Signal | EngineStopped


class Scheduler:
    """Runs one batch on one thread. `on_progress` is called with the share that is loaded, from 0 to 1."""

    def __init__(
        self,
        batch: Batch,
        *,
        max_running: int = 32,
        max_waiting: int = 256,
        on_progress: Callable[[float], None] | None = None,
        first_restart_delay: float = FIRST_RESTART_DELAY,
    ) -> None:
        self._batch = batch
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._on_progress = on_progress or (lambda _share: None)
        self._first_restart_delay = first_restart_delay
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._submitting = threading.Lock()
        self._keys = itertools.count()
        self._unfinished: dict[int, Job] = {}
        """Jobs by key; put in under the lock, taken out by the engine thread."""
        self._queue: FairQueue[Job] = FairQueue()
        self._running: dict[int, Job] = {}
        self._warmups = _Warmups(batch, self._inbox.put)
        self._mean_seconds = 1.0
        """How long a request runs."""
        self._info: ModelInfo | None = None
        self._failures = 0
        """Failures in a row, with nothing answered in between."""
        self._restart_reason = ""
        """Why it is being restarted; empty if it is not."""
        self._restart_delay = 0.0
        self._final_error: EngineError | None = None
        self._is_abandoned = False
        """Whether the thread did not come out of its batch."""
        self._started = threading.Event()
        # A daemon: the interpreter waits for other threads before it runs atexit handlers, where this one is stopped.
        self._thread = NativeThread(target=self._run, name="engine", daemon=True)

    # -- called from any thread -----------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """What is loaded now, or was before the engine broke. Only after `start`."""
        assert self._info is not None
        return self._info

    def start(self) -> ModelInfo:
        """Start the thread, let it load, and return what it loaded; raise what loading raised."""
        self._thread.start()
        atexit.register(self.stop)
        self._started.wait()
        if self._info is None:
            self.stop()
            assert self._final_error is not None  # set before `_started` when nothing was loaded
            raise self._final_error
        return self._info

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request that has been checked. Raises EngineBusy, EngineFailed or EngineStopped."""
        if self._restart_reason:
            raise EngineFailed(self._restart_reason, self._retry_after())
        with self._submitting:
            share = self._queue.share_of(request.client)
            unfinished = len(self._unfinished)
            is_full = unfinished >= self._max_running + self._max_waiting
            if is_full and not self._queue.may_displace(share, list(self._running.values())):
                raise self._busy(f"The server is busy: {unfinished} requests are running or waiting already")
            share.submitted += 1
            job = Job(next(self._keys), request, share)
            self._unfinished[job.key] = job
            self._inbox.put(job)
        # Put first, check second: either the thread's last look into its inbox saw this job, or this sees its end.
        if self._final_error is not None:
            raise EngineStopped(str(self._final_error))
        return Generation(job, self._inbox.put, self._queue.position_of)

    def prewarm(self, make_request: Callable[[], GenerationRequest | None]) -> None:
        """Have a prompt prefilled when there is nothing else to do.

        `make_request` is called then, on a thread of its own; None: it is no longer likely.
        """
        self._inbox.put(_Warmup(next(self._keys), make_request))

    def wake(self) -> None:
        """Have the thread ask its batch again whether it is ready and has room."""
        self._inbox.put(_Signal.WAKE)

    def terminate(self, error: EngineStopped, *, timeout: float) -> bool:
        """End with an error for every request: what the batch needs is gone and will not come back.

        False if the thread does not come out of its batch within `timeout` seconds; it is abandoned then.
        """
        self._inbox.put(error)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        self._is_abandoned = True
        self._fail_all(error)
        return False

    def status(self) -> EngineStatus:
        """What it is doing; the figures may be a step old."""
        running = len(self._running)
        waiting = max(0, len(self._unfinished) - running)
        if self._final_error is not None:
            return EngineStatus(state="stopped", detail=str(self._final_error))
        if self._restart_reason:
            return EngineStatus(state="restarting", waiting=waiting, detail=self._restart_reason)
        status = EngineStatus(state="loading", running=running, waiting=waiting)
        if (info := self._info) is None:
            return status
        available = info.available_context()
        return replace(
            status,
            state="ready",
            detail=info.tuning(),
            unbatched=info.unbatched,
            drafts=info.drafts,
            available_context=available,
            prewarmed_tokens=self._warmups.prefilled_tokens,
        )

    def is_healthy(self) -> bool:
        """False before `start`, while it restarts, and once it has been stopped."""
        return self._info is not None and self._final_error is None and not self._restart_reason

    def stop(self) -> None:
        """Cancel everything, end the thread and join it. Idempotent, also from atexit or a signal handler."""
        atexit.unregister(self.stop)
        self._inbox.put(_Signal.STOP)
        joinable = self._thread.ident is not None and not self._is_abandoned
        if joinable and self._thread is not threading.current_thread():
            self._thread.join()

    def _busy(self, text: str) -> EngineBusy:
        retry_after = self._retry_after()
        return EngineBusy(f"{text}; try again in {retry_after} s.", retry_after)

    def _retry_after(self) -> int:
        # There is room as soon as one of the running requests ends, or the engine has been restarted.
        seconds = max(self._restart_delay, self._mean_seconds / self._max_running)
        return min(60, max(1, math.ceil(seconds)))

    # -- the engine thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: EngineError = EngineStopped("The engine has been stopped.")
        try:
            while not self._load_and_serve():
                pass
        except EngineError as raised:
            error = raised
        except BaseException as raised:  # whatever it is, no caller may be left waiting
            log.exception("The engine thread died.")
            error = EngineStopped(f"The engine has died: {_described(raised)}")
        finally:
            self._shut_down(error)

    def _load_and_serve(self) -> bool:
        """Load, and step until told to stop (True) or until something breaks (False)."""
        try:
            self._info = self._batch.load(self._on_progress)
            self._info.set_waker(self.wake)
            self._restart_reason, self._restart_delay = "", 0.0
            self._started.set()
            while self._wait_for_work():
                for key, outcome in self._batch.step():
                    self._deliver(key, outcome)
            return True
        except EngineStopped:  # for good
            raise
        except Exception as error:
            if not self._started.is_set():  # it never ran: `start` raises this
                raise
            if self._final_error is not None:  # abandoned by `terminate`, which has taken the requests away
                raise self._final_error from error
            log.exception("The engine broke; it is being restarted.")
            return not self._prepare_restart(error)

    def _prepare_restart(self, error: Exception) -> bool:
        """Fail the requests concerned, unload, and wait unless this is the first failure. False: stop."""
        self._failures += 1
        again = self._failures > 1
        doublings = min(self._failures - 2, 16)
        delay = min(MAX_RESTART_DELAY, self._first_restart_delay * 2**doublings)
        self._restart_delay = delay if again else 0.0
        self._restart_reason = f"The engine broke and is being restarted: {_described(error)}"
        failure = EngineFailed(self._restart_reason, self._retry_after())
        for job in [*self._running.values(), *(self._queue if again else ())]:
            self._queue.remove(job)
            self._finish(job, failure)
        self._running.clear()
        self._warmups.clear()
        try:
            self._batch.unload()
        except Exception:
            log.exception("What was left of the engine could not be unloaded cleanly.")
        deadline = monotonic() + self._restart_delay
        while (remaining := deadline - monotonic()) > 0:
            try:
                if not self._handle(self._inbox.get(timeout=remaining)):
                    return False
            except Empty:
                break
        return True

    def _wait_for_work(self) -> bool:
        """Empty the inbox and admit requests; sleep on the inbox while there is nothing to step. False: stop."""
        while True:
            while not self._inbox.empty():
                if not self._handle(self._inbox.get()):
                    return False
            is_idle = not (self._running or self._queue or self._warmups)
            if self._info is not None and self._info.tune(is_idle=is_idle) and is_idle:
                continue
            self._admit()  # first: what may not wait at all is started if there is room
            next_timeout = self._expire_queued()
            if not (self._running or self._queue):
                self._warmups.make_next()
            if (self._running or self._warmups.running) and self.info.is_ready():
                return True
            try:
                message = self._inbox.get(timeout=next_timeout)
            except Empty:
                continue
            if not self._handle(message):
                return False

    def _handle(self, message: Message) -> bool:
        """Act on a message. False: stop."""
        match message:
            case _Signal.STOP:
                return False
            case _Signal.WAKE:
                if self._info is not None:
                    self._info.on_wake()
            case EngineStopped():
                raise message
            case _Warmup():
                self._warmups.add(message)
            case job if job.is_finished:  # before its cancellation arrived here
                pass
            case job if job.is_cancelled:
                self._cancel(job)
            case job:
                assert self._info is not None  # it has been loaded
                job.tokens = self._info.tokens_to_prefill(job.request)
                self._queue.add(job)
                if len(self._running) + len(self._queue) > self._max_running + self._max_waiting:
                    self._displace()
                self._warmups.preempt()
        return True

    def _cancel(self, job: Job) -> None:
        is_running = self._running.pop(job.key, None) is not None
        self._queue.remove(job)
        self._finish(job, None)
        if is_running:
            self._batch.remove(job.key)

    def _expire_queued(self) -> float | None:
        """Refuse requests that have been queued for too long; return the seconds until the next one has."""
        now, next_deadline = perf_counter(), math.inf
        for job in list(self._queue):
            if job.deadline > now:
                next_deadline = min(next_deadline, job.deadline)
                continue
            self._queue.remove(job)
            seconds = f"{job.request.queue_timeout:g} seconds"
            self._finish(job, self._busy(f"The request was queued for {seconds} and could not be started"))
        return None if next_deadline == math.inf else next_deadline - now

    def _displace(self) -> None:
        """Refuse the request that gives way in a full queue."""
        job = self._queue.displaced()
        self._queue.remove(job)
        count = job.share.unfinished
        verb = "is" if count == 1 else "are"
        text = f"The server is busy, and {count} of the requests that wait or run {verb} yours"
        self._finish(job, self._busy(text))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._max_running:
            assert self._info is not None  # it has been loaded
            ready = [job for job in self._queue if not self._info.has_to_wait(job.request)]
            if not ready:
                break
            job, shortest = self._queue.next(ready), self._queue.shortest(ready)
            if shortest.tokens <= FEW_TOKENS and len(self._running) < self._max_running // 2:
                job = shortest
            else:
                room = self._info.prefill_room(job.priority)
                if job.tokens > room and (job := shortest).tokens > room:
                    break
            try:
                if not self._batch.admits(job.request):
                    break
                job.admitted_at = perf_counter()
                self._batch.insert(job.key, job.request)
            except Exception as error:
                self._queue.remove(job)
                self._finish(job, _start_failure(error))
            else:
                self._queue.remove(job)
                job.share.served += PROMPT_WEIGHT * len(job.request.prompt)
                self._running[job.key] = job

    def _deliver(self, key: int, outcome: Outcome) -> None:
        if self._warmups.outcome(key, outcome):
            return
        job = self._running[key]
        match outcome:
            case TokenDelta():
                job.generated_tokens += 1
                job.share.served += OUTPUT_WEIGHT
                if job.generated_tokens == 1:
                    job.first_token_at = perf_counter()
                job.put(outcome)
            case Progress():
                job.share.served -= PROMPT_WEIGHT * (outcome.cached - job.cached_tokens)
                job.cached_tokens = outcome.cached
                job.put(outcome)
            case PromptLogprobs():
                job.put(outcome)
            case Ended():
                del self._running[key]
                self._failures = 0
                self._mean_seconds += 0.1 * (perf_counter() - job.admitted_at - self._mean_seconds)
                self._finish(job, job.finished(outcome))
            case EngineError():
                del self._running[key]
                self._finish(job, outcome)

    def _finish(self, job: Job, last: Finished | EngineError | None) -> None:
        """Count a job as finished before its last item can be seen: the caller may submit another at once."""
        job.is_finished = True
        job.ended_at = perf_counter()
        self._unfinished.pop(job.key, None)
        job.share.finished += 1
        job.put(last)

    def _shut_down(self, error: EngineError) -> None:
        self._fail_all(error)
        for step in (self._batch.unload, self._batch.close):
            try:
                step()
            except Exception:
                log.exception("The engine could not be unloaded cleanly.")

    def _fail_all(self, error: EngineError) -> None:
        self._final_error = error
        self._started.set()
        for job in list(self._unfinished.values()):  # wherever the thread had them when it ended
            self._queue.remove(job)
            self._finish(job, EngineStopped(str(error)))
        self._running.clear()
        self._warmups.clear()


class _Warmups:
    """The warm-ups that wait, and the one that runs. No caller waits for any of them, so a failure is only logged.

    The next is made while there is nothing else to do, and made anew if it was preempted: its conversation may have
    gone on since.
    """

    def __init__(self, batch: Batch, put: Callable[[_Warmup], None]) -> None:
        self.running: _Warmup | None = None
        self.prefilled_tokens = 0
        """Of all that have run."""
        self._batch = batch
        self._put = put
        self._waiting: deque[_Warmup] = deque(maxlen=MAX_WARMUPS)
        self._being_made: _Warmup | None = None
        self._is_outdated = False
        """Whether a request has come since."""
        self._prefilled = 0
        """Tokens of the one that runs that are in the cache."""

    def __bool__(self) -> bool:
        return self.running is not None or self._being_made is not None or bool(self._waiting)

    def add(self, warmup: _Warmup) -> None:
        """Queue one, or start the one that has been made; the oldest of too many is dropped."""
        if warmup is not self._being_made:
            self._waiting.append(warmup)
            return
        self._being_made = None
        if warmup.request is not None and self._is_outdated:
            self._put_back(warmup)
        elif warmup.request is not None:
            self._start(warmup, warmup.request)

    def make_next(self) -> None:
        """Have the next one made, unless one is or runs."""
        if self._waiting and self.running is None and self._being_made is None:
            warmup = self._being_made = self._waiting.popleft()
            self._is_outdated = False
            # Not a daemon: the interpreter has to wait for foreign code.
            thread = threading.Thread(target=self._make, args=(warmup,), name="prewarm", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads now; the next turn does without
                self._being_made = None

    def preempt(self) -> None:
        """Take the one that runs out of the batch, to be made again; so is the one that is being made."""
        self._is_outdated = True
        warmup, self.running = self.running, None
        if warmup is not None:
            self._batch.remove(warmup.key)
            self._put_back(warmup)

    def outcome(self, key: int, outcome: Outcome) -> bool:
        """Take an outcome of the one that runs, which it may end; False if it is none of that one's."""
        if self.running is None or key != self.running.key:
            return False
        if isinstance(outcome, Progress):
            self.prefilled_tokens += outcome.processed - max(outcome.cached, self._prefilled)
            self._prefilled = outcome.processed
        if isinstance(outcome, Ended | EngineError):
            self.running = None
        return True

    def clear(self) -> None:
        """Forget all of them; the batch is unloaded."""
        self._waiting.clear()
        self.running = self._being_made = None

    def _make(self, warmup: _Warmup) -> None:
        """Make one, and have the engine thread start it."""
        try:
            warmup.request = warmup.make_request()
        except Exception as error:
            log.debug("A warm-up was given up: %s", error)
        self._put(warmup)

    def _start(self, warmup: _Warmup, request: GenerationRequest) -> None:
        try:
            if self._batch.admits(request):
                self._batch.insert(warmup.key, request)
                self.running, self._prefilled = warmup, 0
        except Exception as error:
            log.debug("A warm-up was given up: %s", error)

    def _put_back(self, warmup: _Warmup) -> None:
        warmup.request = None
        if len(self._waiting) < MAX_WARMUPS:
            self._waiting.appendleft(warmup)


def _start_failure(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    log.error("A request could not be started.", exc_info=error)
    return EngineError(f"The request could not be started: {error}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
