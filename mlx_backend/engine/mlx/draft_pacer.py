"""Decides how many tokens are drafted for each reply in a step, so that drafts never take more time than they save.

Times are counted in plain steps, in which every reply gets one token. A step with drafts takes longer than a plain
one: by what drafting takes at all (the token sampled last has to be waited for, and caches are not merged), and by
what each drafted token adds. Both are measured, for each number of replies. What drafts save follows from how many
were right before: if each is right with probability p, the j-th of them is accepted with p**j, and a token that a
reply need not wait for is worth a plain step's share. A reply whose drafts are wrong gets none for a while, and all
replies get none while drafts do not pay for them together.

Decisions change how fast a reply is, and never its text. Knows no tokens and no MLX.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_REPLIES = 4  # that get drafts at once; more replies keep a device busy with one token each
MIN_TIMES = 4  # steps measured before a number of replies is given drafts
MAX_TIMES = 16  # that are remembered
STEPS_PER_FIT = 4
FIRST_MEMORY, MAX_MEMORY = 128, 4096
"""Plain steps, after which a time is forgotten that was measured with drafts."""
STEPS_PER_MEASUREMENT = 256
"""Drafted in a row before plain steps are measured again: they grow with the context."""
FIRST_PAUSE, MAX_PAUSE = 16, 256  # steps
FOUND_BEFORE_SHORT_PAUSE = 8
"""Steps with drafts, decayed, after which a reply's next pause is a short one again."""
MEMORY = 0.95  # how much of what is known of a reply's drafts counts after one more of them
ASSUMED_COST = 0.1  # plain steps per drafted token, until it is measured
_ASSUMED_TIMES = ((0, 0.0), (4, 4 * ASSUMED_COST))


@dataclass(slots=True)
class DraftRecord:
    """How the drafts for one reply fared. `proposed` and `accepted` count its tokens."""

    proposed: int = 0
    accepted: int = 0
    pause: int = 0  # steps until it gets drafts again
    next_pause: int = FIRST_PAUSE
    right: float = 0.0  # decayed counts: drafted tokens that were accepted,
    wrong: float = 0.0  # steps in which one was rejected,
    found: float = 0.0  # steps in which anything was drafted,
    missed: float = 0.0  # and in which nothing was

    @property
    def acceptance(self) -> float:
        """How likely a drafted token is accepted, if those before it are."""
        return (self.right + 2) / (self.right + self.wrong + 3)

    @property
    def frequency(self) -> float:
        """How likely a step has drafts at all."""
        return (self.found + 1) / (self.found + self.missed + 1.5)

    def record(self, proposed: int, accepted: int) -> None:
        """Note how many tokens were drafted in a step, and how many of them were accepted."""
        self.proposed += proposed
        self.accepted += accepted
        self.found, self.missed = self.found * MEMORY + bool(proposed), self.missed * MEMORY + (not proposed)
        if proposed:
            self.right = self.right * MEMORY + accepted
            self.wrong = self.wrong * MEMORY + (accepted < proposed)
        if self.found > FOUND_BEFORE_SHORT_PAUSE:
            self.next_pause = FIRST_PAUSE

    def stop(self) -> None:
        """Pause, for longer each time, and start again as if nothing were known."""
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, MAX_PAUSE)
        self.right = self.wrong = self.found = self.missed = 0.0


@dataclass(slots=True)
class _Times:
    """Times of steps with a certain number of replies, and what drafting costs according to them."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Seconds."""
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """Drafted tokens, and how many plain steps the step took beyond one."""
    overhead: float = 0.0  # in plain steps, beyond one: of drafting at all,
    cost: float = ASSUMED_COST  # and of each token that is drafted
    num_plain: int = 0  # in a row,
    num_drafted: int = 0  # or since plain steps were measured
    memory: int = FIRST_MEMORY

    def record_plain(self, seconds: float) -> None:
        """Note a plain step. After some of them, forget the oldest of what was measured with drafts.

        Where nothing is drafted because it cost too much, nothing else would ever correct that.
        """
        self.plain.append(seconds)
        self.num_drafted = 0
        self.num_plain += 1
        if self.num_plain == self.memory:
            self.num_plain, self.memory = 0, min(2 * self.memory, MAX_MEMORY)
            if self.drafted:
                self.drafted.popleft()
                self._fit()

    def record_drafted(self, tokens: int, seconds: float) -> None:
        """Note a step with drafts. After many of them, have plain steps measured again."""
        self.num_plain = 0
        self.num_drafted += 1
        if self.num_drafted == STEPS_PER_MEASUREMENT:
            self.plain.clear()
            self.memory = FIRST_MEMORY
            return
        self.drafted.append((tokens, seconds / median(self.plain) - 1))
        if self.num_drafted % STEPS_PER_FIT == 0 or len(self.drafted) < STEPS_PER_FIT:
            self._fit()

    def _fit(self) -> None:
        self.overhead, self.cost = _fit([*_ASSUMED_TIMES, *self.drafted])


class DraftPacer:
    """The times of one model's steps with and without drafts, and what follows from them.

    Without a `clock` nothing is measured, and the cost is assumed: processes that share a model have to decide alike.
    """

    def __init__(self, max_drafts: int, clock: Callable[[], float] | None) -> None:
        self.max_drafts = max_drafts
        self.clock = clock
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by number of replies

    def plan(self, replies: Sequence[DraftRecord], limits: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each reply in the next step: at most its limit, and what pays."""
        counts = [0] * len(replies)
        if not self.is_drafting(replies):
            if len(replies) <= MAX_REPLIES:
                _wait(replies)
            return counts
        times = self._times[len(replies)]
        is_cost_known = bool(times.drafted) or self.clock is None
        max_drafts = self.max_drafts if is_cost_known else 1  # to find out
        cost = times.cost
        saved = 0.0
        for row, (reply, limit) in enumerate(zip(replies, limits, strict=True)):
            if reply.pause or not limit:
                continue
            counts[row] = count = _best_count(reply.acceptance, cost * len(replies), min(limit, max_drafts))
            saved += reply.frequency * (_expected(reply.acceptance, count) / len(replies) - cost * count)
            if not count:
                reply.stop()
        if any(counts) and saved <= times.overhead:
            for row, count in enumerate(counts):
                if count:
                    replies[row].stop()
            counts = [0] * len(replies)
        _wait(replies)
        return counts

    def is_drafting(self, replies: Sequence[DraftRecord]) -> bool:
        """Whether any reply may get drafts when these are decoded together."""
        if len(replies) > MAX_REPLIES or all(reply.pause for reply in replies):
            return False
        return self.clock is None or len(self._times[len(replies)].plain) >= MIN_TIMES

    def record(self, replies: int, drafted: int | None, seconds: float) -> None:
        """Note how long a step took, with so many tokens drafted; None: it was a plain step."""
        times = self._times[replies]
        if drafted is None:
            times.record_plain(seconds)
        elif len(times.plain) >= MIN_TIMES:
            times.record_drafted(drafted, seconds)


def _wait(replies: Sequence[DraftRecord]) -> None:
    for reply in replies:
        reply.pause = max(0, reply.pause - 1)


def _best_count(acceptance: float, cost: float, limit: int) -> int:
    """Return how many tokens save more than they cost: each is less likely to be accepted than the one before."""
    count = 0
    while count < limit and acceptance ** (count + 1) > cost:
        count += 1
    return count


def _expected(acceptance: float, count: int) -> float:
    """Return how many of `count` drafted tokens will be accepted."""
    return sum(acceptance**position for position in range(1, count + 1))


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a line through points, as (y at 0, slope): Theil and Sen's, which outliers hardly move. Never negative."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2]
    slope = max(0.0, median(slopes))
    return max(0.0, median(y - slope * x for x, y in points)), slope
