"""The one engine thread: what it hears, what it runs, what it tells, and how it gets up again.

Knows requests, items and time; no model, no HTTP and no MLX. What it drives is a `Batch`: something that is
loaded, given requests, stepped, and unloaded, always on this thread and on no other.

The theory:

    generate() ── a job is born ──▶ ┌───────┐  insert  ┌─────────┐  step  ┌────────┐
    close()    ── a job is left ──▶ │ inbox │ ───────▶ │ running │ ─────▶ │ outbox │ ──▶ Generation.next()
    stop()     ── an order ───────▶ └───────┘          └─────────┘        └────────┘

Between two steps the thread reads its inbox to the end, so a new request waits for one step at most, and so
does a cancellation. With nothing to step it sleeps on the inbox. A job appears in the inbox when it is born
and once more if its generation is closed; it departs exactly once.

The waiting line is first come, first served, among those of one priority; one of a lower number goes before
those of a higher that came up to 30 seconds earlier (for each step between them), and behind those who have
waited for longer. The batch says whether the first of the line has room now. Below all of them are the
warm-ups, prompts that are likely to come: they are read while nobody waits for anything, and put aside within a
step when somebody does.

What a step raises is nobody's fault in particular. Those who were running are told, the batch is unloaded and
loaded anew, those who wait go on waiting. If it fails again before any request was answered, those are told
as well, and it is tried again after a pause that doubles.

Locks: other threads only ever put into the inbox and get from an outbox. Both are `queue.SimpleQueue`, whose
`put` is reentrant: it may be called by a finaliser or a signal handler that interrupts another `put`. The one
lock is for callers of `submit` among themselves; the engine thread never takes it, so `stop` cannot deadlock.

Memory: an outbox holds at most what its request may produce (prompt / chunk + max_tokens items), the waiting
line at most `max_waiting` jobs, the warm-ups at most `MAX_WARMUPS`.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import threading
from bisect import insort
from collections import deque
from operator import attrgetter
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.base import EngineStatus, Finished, Progress, TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.jobs import Job, Message, Order, ScheduledGeneration, Warmup
from mlx_backend.errors import EngineBusy, EngineError, EngineFailed, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Batch, ModelFacts, Outcome

log = logging.getLogger(__name__)

MAX_WARMUPS = 16
FIRST_PAUSE = 1.0  # seconds before the second restart in a row; doubled for each one after it
LONGEST_PAUSE = 60.0


class Scheduler:
    """Runs one batch on one thread. `report` hears how far loading has come, from 0 to 1."""

    def __init__(
        self,
        batch: Batch,
        *,
        max_running: int = 32,
        max_waiting: int = 256,
        report: Callable[[float], None] | None = None,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self._batch = batch
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._report = report or (lambda _part: None)
        self._first_pause = first_pause
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._door = threading.Lock()
        self._keys = itertools.count()
        self._arrived = 0  # written at the door
        self._departed = 0  # written by the engine thread
        self._waiting: list[Job] = []  # in the order of their turns
        self._warmups: deque[Warmup] = deque(maxlen=MAX_WARMUPS)
        self._warming: Warmup | None = None
        self._running: dict[int, Job] = {}
        self._mean_seconds = 1.0
        self._facts: ModelFacts | None = None
        self._failures = 0  # in a row, with nothing answered in between
        self._broken = ""  # why it is being restarted
        self._pause = 0.0
        self._ending: EngineError | None = None
        self._left_behind = False
        self._started = threading.Event()
        # A daemon: the interpreter waits for the others before it runs atexit, and it is there that we stop.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- called from any thread -----------------------------------------------------------------------------

    def start(self) -> ModelFacts:
        """Start the thread, let it load, and return what it loaded; raise what loading raised."""
        self._thread.start()
        atexit.register(self.stop)
        self._started.wait()
        if self._facts is None:
            self.stop()
            assert self._ending is not None  # set before `_started` when nothing was loaded
            raise self._ending
        return self._facts

    def submit(self, request: GenerationRequest) -> ScheduledGeneration:
        """Queue a request that has been checked. Raises EngineBusy, EngineFailed or EngineStopped."""
        if self._broken:
            raise EngineFailed(self._broken, self._retry_after())
        with self._door:
            here = self._arrived - self._departed
            if here >= self._max_running + self._max_waiting:
                later = self._retry_after()
                text = f"The server is busy: {here} requests are running or waiting already"
                raise EngineBusy(f"{text}; try again in {later} s.", later)
            self._arrived += 1
            job = Job(next(self._keys), request)
            self._inbox.put(job)
        # Put first, look second: either the thread's last look at its inbox saw this job, or we see its end.
        if self._ending is not None:
            raise EngineStopped(str(self._ending))
        return ScheduledGeneration(job, self._inbox)

    def prewarm(self, plan: Callable[[], GenerationRequest]) -> None:
        """Have a prompt read whenever there is nothing else to do; `plan` is called then."""
        self._inbox.put(Warmup(next(self._keys), plan))

    def wake(self) -> None:
        """Have the thread ask its batch again whether it is ready."""
        self._inbox.put(Order.WAKE)

    def end(self, ending: EngineStopped, *, within: float) -> bool:
        """End with an error for everybody: what the batch needs is gone and will not come back.

        False if the thread does not leave its batch within so many seconds; it is left behind then.
        """
        self._inbox.put(ending)
        self._thread.join(within)
        if not self._thread.is_alive():
            return True
        self._left_behind = True
        self._tell_everybody(ending)
        return False

    def status(self) -> EngineStatus:
        """What it is doing; the figures may be a step old."""
        running = len(self._running)
        waiting = max(0, self._arrived - self._departed - running)
        if self._ending is not None:
            return EngineStatus(state="stopped", detail=str(self._ending))
        if self._broken:
            return EngineStatus(state="restarting", waiting=waiting, detail=self._broken)
        return EngineStatus(state="ready" if self._facts else "loading", running=running, waiting=waiting)

    def is_healthy(self) -> bool:
        """False before `start`, while it restarts, and once it has been stopped."""
        return self._facts is not None and self._ending is None and not self._broken

    def stop(self) -> None:
        """Cancel everything, end the thread and join it. Idempotent, also from atexit or a signal handler."""
        atexit.unregister(self.stop)
        self._inbox.put(Order.STOP)
        joinable = self._thread.ident is not None and not self._left_behind
        if joinable and self._thread is not threading.current_thread():
            self._thread.join()

    def _retry_after(self) -> int:
        # A place is free as soon as one of the running requests ends, or the engine has been restarted.
        seconds = max(self._pause, self._mean_seconds / self._max_running)
        return min(60, max(1, math.ceil(seconds)))

    # -- the engine thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        ending: EngineError = EngineStopped("The engine has been stopped.")
        try:
            while not self._serve():
                pass
        except EngineError as error:
            ending = error
        except BaseException as error:  # whatever it is, nobody may be left waiting
            log.exception("The engine thread died.")
            ending = EngineStopped(f"The engine has died: {_name(error)}")
        finally:
            self._end(ending)

    def _serve(self) -> bool:
        """Load, and step until told to stop (True) or until something breaks (False)."""
        try:
            self._facts = self._batch.load(self._report)
            self._broken, self._pause = "", 0.0
            self._started.set()
            while self._listen():
                for key, outcome in self._batch.step():
                    self._deliver(key, outcome)
            return True
        except EngineStopped:  # for good
            raise
        except Exception as error:
            if not self._started.is_set():  # it never ran: that is for whoever starts it
                raise
            log.exception("The engine broke; it is being restarted.")
            return not self._get_up(error)

    def _get_up(self, error: Exception) -> bool:
        """Tell those it concerns, give everything back, and pause if this is not the first time."""
        self._failures += 1
        again = self._failures > 1
        self._pause = min(LONGEST_PAUSE, self._first_pause * 2 ** (self._failures - 2)) if again else 0.0
        self._broken = f"The engine broke and is being restarted: {_name(error)}"
        failure = EngineFailed(self._broken, self._retry_after())
        for job in [*self._running.values(), *(self._waiting if again else ())]:
            self._depart(job, failure)
        self._running.clear()
        self._warmups.clear()
        self._warming = None
        if again:
            self._waiting.clear()
        try:
            self._batch.unload()
        except Exception:
            log.exception("What was left of the engine could not be unloaded cleanly.")
        until = monotonic() + self._pause
        while (left := until - monotonic()) > 0:
            try:
                if not self._take(self._inbox.get(timeout=left)):
                    return False
            except Empty:
                break
        return True

    def _listen(self) -> bool:
        """Read the inbox; sleep on it while there is nothing to step. False: stop."""
        while True:
            while not self._inbox.empty():
                if not self._take(self._inbox.get()):
                    return False
            patience = self._give_up_on_the_late()
            self._admit()
            if (self._running or self._warming) and self._batch.ready():
                return True
            try:
                message = self._inbox.get(timeout=patience)
            except Empty:
                continue
            if not self._take(message):
                return False

    def _take(self, message: Message) -> bool:
        match message:
            case Order.STOP:
                return False
            case Order.WAKE:
                pass
            case EngineStopped():
                raise message
            case Warmup():
                self._warmups.append(message)
            case job if job.over:  # ended before we read that it was left
                pass
            case job if job.left:
                self._drop(job)
            case job:
                insort(self._waiting, job, key=attrgetter("turn"))
                self._put_warmup_aside()
        return True

    def _drop(self, job: Job) -> None:
        runs = self._running.pop(job.key, None) is not None
        if job in self._waiting:
            self._waiting.remove(job)
        self._depart(job, None)
        if runs:
            self._batch.remove(job.key)

    def _put_warmup_aside(self) -> None:
        warmup, self._warming = self._warming, None
        if warmup is not None:
            self._batch.remove(warmup.key)
            if len(self._warmups) < MAX_WARMUPS:
                self._warmups.appendleft(warmup)

    def _give_up_on_the_late(self) -> float | None:
        """Refuse those who have waited for too long; return the seconds until the next of them has."""
        soonest: float | None = None
        for job in [job for job in self._waiting if job.deadline is not None]:
            assert job.deadline is not None
            left = job.deadline - monotonic()
            if left > 0:
                soonest = left if soonest is None else min(soonest, left)
                continue
            self._waiting.remove(job)
            later = self._retry_after()
            text = f"The request waited {job.request.queue_timeout:g} seconds for its turn and did not get it"
            self._depart(job, EngineBusy(f"{text}; try again in {later} s.", later))
        return soonest

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            job = self._waiting[0]
            try:
                if not self._batch.admits(job.request):
                    break
                job.admitted = perf_counter()
                self._batch.insert(job.key, job.request)
            except EngineError as error:
                self._depart(self._waiting.pop(0), error)
            except Exception as error:
                log.exception("A request could not be started.")
                failure = EngineError(f"The request could not be started: {error}")
                self._depart(self._waiting.pop(0), failure)
            else:
                self._running[job.key] = self._waiting.pop(0)
        while self._warmups and not (self._running or self._waiting or self._warming):
            warmup = self._warmups.popleft()
            try:
                request = warmup.plan()
                if self._batch.admits(request):
                    self._batch.insert(warmup.key, request)
                    self._warming = warmup
            except Exception as error:  # it was only a guess
                log.debug("A warm-up was given up: %s", error)

    def _deliver(self, key: int, outcome: Outcome) -> None:
        if self._warming is not None and key == self._warming.key:
            if isinstance(outcome, Ended | EngineError):
                self._warming = None
            return
        job = self._running[key]
        match outcome:
            case TokenDelta():
                job.tokens += 1
                if job.tokens == 1:
                    job.first = perf_counter()
                job.outbox.put(outcome)
            case Progress():
                job.cached = outcome.cached
                job.outbox.put(outcome)
            case Ended(reason):
                del self._running[key]
                self._failures = 0
                self._mean_seconds += 0.1 * (perf_counter() - job.admitted - self._mean_seconds)
                self._depart(job, job.finished(reason))
            case EngineError():
                del self._running[key]
                self._depart(job, outcome)

    def _depart(self, job: Job, last: Finished | EngineError | None) -> None:
        """Let a job go. Its place is free before anybody can hear that it has ended."""
        job.over = True
        job.ended = perf_counter()
        self._departed += 1
        job.outbox.put(last)

    def _end(self, ending: EngineError) -> None:
        self._tell_everybody(ending)
        for give_back in (self._batch.unload, self._batch.close):
            try:
                give_back()
            except Exception:
                log.exception("The engine could not be unloaded cleanly.")

    def _tell_everybody(self, ending: EngineError) -> None:
        self._ending = ending
        self._started.set()
        jobs = [*self._running.values(), *self._waiting]
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, Job):
                jobs.append(message)
        for job in jobs:
            if not job.over:  # one that was left may be here twice
                self._depart(job, EngineStopped(str(ending)))
        self._running.clear()
        self._waiting.clear()
        self._warmups.clear()


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
