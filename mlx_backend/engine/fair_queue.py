"""The queue of a model, for generation or for embeddings: which job is next, and which gives way to a new one.

    priority    a lower number goes first; each 30 seconds of waiting lift a job by one, up to the best that waits
    client      among those of one priority: the client that was served the fewest tokens
    arrival     among those of one client: first come, first served; a step of priority counts as 30 seconds of waiting

That is whose turn it is. While there is room only for a short one, the shortest goes first: a long prompt is prefilled
for many steps, in which short ones can be completed. Of a prompt that is cached but for its end there is nothing to
wait for: it goes first while less than half of the requests run that may.

What a client was served is a virtual token counter, as in "Fairness in Serving Large Language Models" (Sheng et al.,
OSDI 2024). A client that has had nothing waiting comes back at the level of those that wait now: what was not used is
not saved up. So a client that sends one request waits for a request or two of each other client, however many those
have sent. In a full queue, the last job of the client that has the most gives way, if it has one that waits.

Knows no requests and no threads. A queue may be filled by one thread and served by another: `share_of` and
`may_displace`, and `submitted` of a share, belong to whoever submits; all else to whoever serves.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

SECONDS_PER_PRIORITY = 30.0
"""How much later a job counts as having come for each step of its priority number.

So none is overtaken for ever, however many of a better priority keep coming.
"""
MAX_IDLE_CLIENTS = 1024
"""Clients without a job whose counters are remembered."""


class ClientShare:
    """One client's counters: its jobs so far, those that wait, and the weighted tokens that it was served."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.submitted = self.waiting = self.finished = 0
        self.served = 0

    @property
    def unfinished(self) -> int:
        """How many of its jobs are waiting or running."""
        return self.submitted - self.finished


class QueuedJob:
    """What waits in a queue. `queued_at` is by `time.perf_counter`, `tokens` are those that it begins with."""

    def __init__(self, share: ClientShare, priority: int = 0, tokens: int = 0) -> None:
        self.share = share
        self.tokens = tokens
        self.priority = priority
        self.queued_at = perf_counter()


def _order(job: QueuedJob) -> float:
    return job.queued_at + SECONDS_PER_PRIORITY * job.priority


def _served(job: QueuedJob) -> int:
    return job.share.served


def _ranks[J: QueuedJob](jobs: Sequence[J], rank: Callable[[J], int]) -> Callable[[J], tuple[int, int]]:
    """Return the order of jobs: by priority, those of one by `rank`."""
    now, best = perf_counter(), min(job.priority for job in jobs)

    def ranks(job: J) -> tuple[int, int]:
        lifted = int((now - job.queued_at) / SECONDS_PER_PRIORITY)
        return max(best, job.priority - lifted), rank(job)

    return ranks


class FairQueue[J: QueuedJob]:
    """Jobs that wait, and the shares of all clients."""

    def __init__(self) -> None:
        self._jobs: list[J] = []
        """Sorted by `_order`."""
        self._shares: OrderedDict[str, ClientShare] = OrderedDict()
        """By the clients' names, those used last at the end."""
        self._level = 0
        """What the client that was served last had been served."""

    # -- where jobs are submitted ----------------------------------------------------------------------------

    def share_of(self, name: str) -> ClientShare:
        """Return a client's share."""
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) >= MAX_IDLE_CLIENTS:
                self._forget_idle()
            share = self._shares[name] = ClientShare(name)
        self._shares.move_to_end(name)
        return share

    def may_displace(self, share: ClientShare, running: Iterable[J]) -> bool:
        """Whether `displaced` would be a job of another client if this one queued one more.

        So it is if a client has a job that waits, and with those of its jobs that are `running` more than this one.
        """
        num_running = Counter(job.share for job in running)
        return any(
            share.unfinished + 1 < each.unfinished > num_running[each] for each in self._shares.values()
        )

    def _forget_idle(self) -> None:
        idle = [each.name for each in self._shares.values() if not each.unfinished]
        for name in idle[: len(self._shares) - MAX_IDLE_CLIENTS + 1]:
            del self._shares[name]

    # -- where they are served -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        return iter(self._jobs)

    def add(self, job: J) -> None:
        """Queue a job."""
        share = job.share
        if not share.waiting:
            share.served = max(
                share.served, min((each.share.served for each in self._jobs), default=self._level)
            )
        share.waiting += 1
        insort(self._jobs, job, key=_order)

    def remove(self, job: J) -> None:
        """Take a job out, if it is there."""
        if job in self._jobs:
            self._jobs.remove(job)
            job.share.waiting -= 1
            self._level = job.share.served

    def next(self, among: Sequence[J] = ()) -> J:
        """Return the job that is next, of all or of these. The queue is not empty."""
        jobs = among or self._jobs
        return min(jobs, key=_ranks(jobs, _served))  # The first of equals.

    def shortest(self, among: Sequence[J] = ()) -> J:
        """Return the shortest job, of those of the best priority. The queue is not empty."""
        jobs = among or self._jobs
        return min(jobs, key=_ranks(jobs, lambda job: job.tokens))

    def position_of(self, job: J) -> int | None:
        """Return a job's likely place in the queue, from 1; None if it waits no longer. May be called by any thread.

        The clients of one priority take turns: of another client as many jobs go first as of its own, and one more if
        that is served before.
        """
        jobs = self._jobs.copy()
        if job not in jobs:
            return None
        ranks = _ranks(jobs, _served)
        priority = ranks(job)[0]
        better = sum(ranks(each)[0] < priority for each in jobs)
        places: dict[ClientShare, list[int]] = {}
        for at, each in enumerate(jobs):
            if ranks(each)[0] == priority:
                places.setdefault(each.share, []).append(at)
        mine = (job.share.served, jobs.index(job))
        own = places.pop(job.share).index(mine[1])
        others = [
            min(len(theirs), own) + any((share.served, at) < mine for at in theirs[own : own + 1])
            for share, theirs in places.items()
        ]
        return 1 + better + own + sum(others)

    def displaced(self) -> J:
        """Return the job that gives way. The queue is not empty.

        It is the last of the client that has most jobs, those that run included, among the clients with a job here.
        """
        most = max(job.share.unfinished for job in self._jobs)
        return next(job for job in reversed(self._jobs) if job.share.unfinished == most)
