"""How long steps take with a certain number of replies, and what drafts add to them, as measured while it runs."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import combinations
from math import log
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TIMES = 3  # plain steps measured before drafts are compared with them
MAX_TIMES = 9  # that are remembered of each kind
MAX_KINDS = 32  # of steps with drafts that are remembered: (tokens drafted, tokens run again)
FIRST_MEMORY, MAX_MEMORY = 128, 4096
"""Plain steps in a row, after which something is forgotten that was measured with drafts."""
STEPS_PER_MEASUREMENT = 256
"""Drafted in a row before plain steps are measured again."""
ASSUMED_COST = 0.1  # plain steps per drafted token, and per token that runs again, until it is measured


class DraftCosts:
    """Times of steps with one number of replies. What drafts cost is counted in plain steps."""

    def __init__(self) -> None:
        self.overhead = 0.0  # of drafting at all,
        self.per_token = ASSUMED_COST  # of each drafted token,
        self.per_replayed = ASSUMED_COST  # and of each that runs again because a draft after it was wrong
        # Seconds, by about how long the texts are: attention takes longer the longer they are.
        self._plain: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_TIMES))
        # Plain steps beyond one, by how many tokens were drafted and how many ran again; the latest measured come last.
        self._drafted: dict[tuple[int, int], deque[float]] = {}
        self._steps_without = 0  # in a row,
        self._steps_with_drafts = 0  # or since plain steps were measured
        self._memory = FIRST_MEMORY

    @property
    def are_known(self) -> bool:
        """Whether more than one step with drafts was measured."""
        return sum(map(len, self._drafted.values())) > 1

    def plain_step(self, context: int) -> float | None:
        """Return how many seconds a plain step takes with so many tokens in all texts; None: too few were measured."""
        times = self._plain[_magnitude(context)]
        return median(times) if len(times) >= MIN_TIMES else None

    def record_plain(self, context: int, seconds: float) -> None:
        """Note a plain step. After many of them, forget the oldest of what was measured with drafts.

        Where nothing is drafted because it cost too much, nothing else would ever correct that.
        """
        self._plain[_magnitude(context)].append(seconds)
        self._steps_with_drafts = 0
        self._steps_without += 1
        if self._steps_without == self._memory:
            self._steps_without, self._memory = 0, min(2 * self._memory, MAX_MEMORY)
            if self._drafted:
                del self._drafted[next(iter(self._drafted))]
                self._fit()

    def record_drafted(self, context: int, tokens: int, seconds: float, replayed: int = 0) -> None:
        """Note a step with drafts, where `replayed` tokens ran again. After many, have plain steps measured again."""
        plain = self.plain_step(context)
        if plain is None:
            return
        self._steps_without = 0
        self._steps_with_drafts += 1
        if self._steps_with_drafts == STEPS_PER_MEASUREMENT:
            self._plain[_magnitude(context)].clear()
            self._memory = FIRST_MEMORY
        kind = tokens, replayed
        times = self._drafted.pop(kind, None) or deque[float](maxlen=MAX_TIMES)
        times.append(seconds / plain - 1)
        self._drafted[kind] = times
        if len(self._drafted) > MAX_KINDS:
            del self._drafted[next(iter(self._drafted))]
        self._fit()

    def _fit(self) -> None:
        points = [(*kind, median(times)) for kind, times in self._drafted.items()]
        self.per_replayed = _per_replayed(points)
        self.overhead, self.per_token = _line([(x, y - self.per_replayed * again) for x, again, y in points])


def _magnitude(context: int) -> int:
    """Return the same number for texts that are about as long: short ones, and others within a half."""
    return int(log(context + 1024, 1.5))


def _per_replayed(points: Sequence[tuple[int, int, float]]) -> float:
    """Return what a token that runs again costs, from (drafted, replayed, y) of steps with equally many drafted."""
    slopes = [
        (y2 - y1) / (again2 - again1)
        for (x1, again1, y1), (x2, again2, y2) in combinations(points, 2)
        if x1 == x2
    ]
    return max(0.0, median(slopes or [ASSUMED_COST]))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a line through points, as (y at 0, slope): Theil and Sen's, which outliers hardly move. Never negative."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2]
    if not slopes:  # what was measured is the tokens' doing up to what was assumed of them
        slopes = [ASSUMED_COST, *(min(ASSUMED_COST, y / x) for x, y in points if x)]
    slope = max(0.0, median(slopes))
    return max(0.0, median([y - slope * x for x, y in points] or [0.0])), slope
