"""The queue of one engine: which of the waiting requests is next, and which gives way when there are too many.

    priority    a lower number goes first; each 30 seconds of waiting lift a request by one, up to the best that waits
    client      among those of one priority: the client that was served the fewest tokens (fair_shares.py)
    arrival     among those of one client: first come, first served, priorities counted as so many seconds

When the queue is full, the last request of the client that has the most gives way. Belongs to the engine thread.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.fair_shares import PROMPT_WEIGHT, WaitingShares
from mlx_backend.engine.jobs import SECONDS_PER_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.engine.jobs import Job


class FairQueue:
    """Jobs that wait to be started."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []  # sorted by their `queue_key`
        self._shares = WaitingShares()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        """Queue a job."""
        insort(self._jobs, job, key=attrgetter("queue_key"))
        self._shares.begin(job.share)

    def remove(self, job: Job) -> None:
        """Take a job out, if it is there."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._shares.end(job.share)

    def start(self, job: Job) -> None:
        """Take out a job that is started: its client pays for the prompt, and for what is generated as it comes."""
        self.remove(job)
        job.share.served += PROMPT_WEIGHT * len(job.request.prompt)

    def clear(self) -> None:
        """Take all jobs out."""
        for job in list(self._jobs):
            self.remove(job)

    def next(self) -> Job:
        """Return the job that is next. The queue is not empty."""
        jobs = self._jobs
        if len(jobs) == 1:
            return jobs[0]
        now, best = perf_counter(), min(job.request.priority for job in jobs)

        def rank(job: Job) -> tuple[int, int]:
            lifted = int((now - job.submitted_at) / SECONDS_PER_PRIORITY)
            return max(best, job.request.priority - lifted), job.share.served

        return min(jobs, key=rank)  # of equals the first

    def displaced(self) -> Job:
        """Return the job that gives way: the last of the client with the most. The queue is not empty."""
        most = max(job.share.unfinished for job in self._jobs)
        return next(job for job in reversed(self._jobs) if job.share.unfinished == most)

    def take_expired(self) -> tuple[list[Job], float | None]:
        """Take out the jobs that were queued for too long; return them, and the seconds until the next one has been."""
        now, next_timeout = monotonic(), None
        expired = []
        for job in self._jobs:
            if job.deadline is None:
                continue
            remaining = job.deadline - now
            if remaining <= 0:
                expired.append(job)
            elif next_timeout is None or remaining < next_timeout:
                next_timeout = remaining
        for job in expired:
            self.remove(job)
        return expired, next_timeout
