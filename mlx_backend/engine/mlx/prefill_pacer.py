"""When a chunk of a prompt runs next to replies, and how long it is: a share of time, and a bound on each gap.

A long prompt that waits by itself is prefilled in every step, in chunks of up to `MAX_STALL_SECONDS`, unless such
prompts have just had more than half of the time. All others get a quarter, in chunks of a few steps' worth.

While nobody decodes, prompts get all of the time. While replies do, it is counted as credit and debt: the seconds that
chunks take are spent, and all other time earns some again. With no credit left, replies have the steps to themselves
until there is.

A chunk's time is what its step takes longer than steps usually do in which nothing is prefilled. So is that of the step
after it, which may have to wait for the rest of the chunk.

Chunks have sizes of a short list (chunk_cost.py) and end at multiples of those, counted from the start of the text:
what a device prepares for the lengths of one prompt then serves the next one too.

Knows seconds and tokens; no prompts and no replies.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_high
from time import perf_counter
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.chunk_cost import CHUNK_SIZES, RUN_OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_STALL_SECONDS = 0.3
"""The longest time that a running reply should wait for a chunk."""
MAX_CHUNK_SECONDS = 1.0
"""The longest time of a chunk where no reply is running, but a request may arrive."""
MAX_BACKGROUND_SECONDS = 0.05
"""The longest time of a chunk of a prompt that every user's should precede, and so wait for."""
COST = 3
"""What a second of prefill costs: a quarter of the time is left for it next to replies.

Less than half, since each prompt's own reply makes the steps of the others longer.
"""
MAX_CREDIT = 1.5
"""Seconds that are saved up while replies decode alone, or nobody does, for prompts that come together."""
MAX_DEBT = 30.0
"""What a prompt that waited by itself may have cost when it is done, in seconds that the next such one waits for."""
RETURN_SECONDS = 0.5
"""How long after the last reply those who chat may send their next requests, before time belongs to prompts alone."""
STEPS_PER_CHUNK = 4
"""Length of a chunk, in steps of the replies, once there is no credit left."""
MIN_EFFICIENCY = 0.6
"""How much of the rate of long chunks a short one has to reach."""
MEASURED_CHUNKS, MEASURED_STEPS = 3, 9
"""Number of chunks and of steps, the last ones, by which the machine's speed is judged."""


class PrefillPacer:
    """Decides whether and how long prompts may be prefilled, as measured on this machine.

    `rate` is how many tokens a second were prefilled when the model was loaded. `work` gives the cost of a chunk, in
    units of which `rate` are done in a second. With `fixed`, chunks have that size.
    """

    def __init__(
        self,
        fixed: int | None,
        rate: float,
        work: Callable[[int], float] = lambda tokens: tokens + RUN_OVERHEAD,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.credit = MAX_CREDIT
        self.is_full = False
        """Whether another prompt has waited since the last step for there to be room."""
        self._debt = 0.0
        """Seconds by which prompts that waited by themselves had more than half of the time."""
        self._lone: int | None = None
        """The number of the prompt that is prefilled in every step where it waits by itself."""
        self._is_alone = False
        self._fixed = fixed
        self._work = work
        self._clock = clock
        self._rates = deque([rate], maxlen=MEASURED_CHUNKS)
        self._steps: deque[float] = deque(maxlen=MEASURED_STEPS)
        """Seconds of steps in which replies decoded and nothing was prefilled."""
        self._started = self._ended = clock()
        """When this step started, and the one before ended."""
        self._decoded_at = -math.inf
        self._spends = self._spent = False
        """Whether this step, and the one before, prefills on credit."""

    @property
    def rate(self) -> float:
        """How many tokens a second are prefilled.

        The middle one of what was measured last: a chunk that took many times what its neighbours took, because
        something was prepared for it or another process was busy, does not count.
        """
        return median_high(self._rates)

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rates.clear()
        self._rates.append(rate)

    @property
    def step_seconds(self) -> float:
        """How long a step takes in which nothing is prefilled; 0 before one was measured."""
        return median(self._steps) if self._steps else 0.0

    @property
    def pace(self) -> list[float]:
        """All that was measured, as plain numbers; processes that share a model have to decide by the same ones."""
        return [self.rate, self.step_seconds, self.credit, self._debt, float(self.is_full)]

    @pace.setter
    def pace(self, pace: list[float]) -> None:
        self.rate, step, self.credit, self._debt, is_full = pace
        self.is_full = bool(is_full)
        self._steps.clear()
        if step:
            self._steps.append(step)

    @property
    def may_prefill(self) -> bool:
        """Whether prompts may be prefilled in this step, if replies wait for it."""
        return self._is_alone or self.credit >= 0

    def start_step(self) -> None:
        """Note the time. Nothing else depends on it before the step ends: processes that share a model decide alike."""
        self._started = self._clock()
        self._spent, self._spends = self._spends, False

    def note_waiting(self, only: int | None, remaining: int = 0) -> None:
        """Note the number of the prompt that waits by itself, if one does, and how many tokens remain of it."""
        if self.is_full:
            only, self.is_full = None, False
        if only is not None and remaining > self.max_chunk and self._debt <= MAX_CREDIT:
            self._lone = only
        self._is_alone = only is not None and only == self._lone

    def spend(self) -> None:
        """Have this step's prefill take from the credit, if replies decode or did just now."""
        self._spends = self._started - self._decoded_at < RETURN_SECONDS

    def end_step(self, *, prefilled: bool, decoded: bool) -> None:
        """Learn from a step's time: whether something was `prefilled` in it, and whether replies `decoded`."""
        now = self._clock()
        seconds, passed = now - self._started, now - self._ended
        self._ended = now
        if decoded:
            self._decoded_at = now
        if decoded and not (prefilled or self._spent):
            self._steps.append(seconds)
        on_credit = self._spends or (self._spent and decoded)
        spent = max(0.0, seconds - self.step_seconds) if on_credit else 0.0
        # What took longer than any chunk was something else, such as compiling.
        longest = max(MAX_STALL_SECONDS, self._min_seconds())
        spent = min(spent, longest)
        debt = self._debt + 2 * spent * self._is_alone - passed
        self._debt = min(MAX_DEBT, max(0.0, debt))
        lowest = min(self.credit, -longest) if self._is_alone else -COST * longest
        self.credit = min(MAX_CREDIT, max(lowest, self.credit + passed - (1 + COST) * spent))

    @property
    def max_chunk(self) -> int:
        """The most tokens that replies ever wait for."""
        return self._fixed or self._fitting(MAX_STALL_SECONDS)

    def chunk_size(
        self, start: int, *, others_wait: bool, is_background: bool = False, share: float = 1.0
    ) -> int:
        """Return how long a chunk from position `start` may be, or a share of one.

        `others_wait` is whether anything else could run; `is_background`, whether every user's prompt should precede.
        """
        if self._fixed is not None:
            return max(1, int(self._fixed * share))
        longest = self._fitting(self._seconds(others_wait=others_wait, is_background=is_background))
        size = max(CHUNK_SIZES[0], int(longest * share))
        for grid in (each for each in reversed(CHUNK_SIZES) if each <= size):
            aligned = size - (start + size) % grid
            if aligned >= size // 2:
                return aligned
        return aligned + grid

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk's time. Short chunks say little and are ignored."""
        if tokens >= CHUNK_SIZES[0] and seconds > 0:
            self._rates.append(self._work(tokens) / seconds)

    def _seconds(self, *, others_wait: bool, is_background: bool) -> float:
        """Return how long a chunk may take."""
        if is_background:
            return MAX_BACKGROUND_SECONDS
        longest = MAX_STALL_SECONDS if others_wait else MAX_CHUNK_SECONDS
        if self._is_alone:
            return longest
        return min(longest, max(self.credit, STEPS_PER_CHUNK * self.step_seconds, self._min_seconds()))

    def _min_seconds(self) -> float:
        """Return how long the shortest chunk takes that has nearly the rate of long ones."""
        longest = self._fitting(MAX_STALL_SECONDS)
        sizes = [size for size in CHUNK_SIZES if size <= longest]
        best = max(size / self._work(size) for size in sizes)
        shortest = next(size for size in sizes if size / self._work(size) >= MIN_EFFICIENCY * best)
        return self._work(shortest) / self.rate

    def _fitting(self, seconds: float) -> int:
        """Return the tokens of the longest chunk that takes at most so long."""
        work = self.rate * seconds
        return next((size for size in reversed(CHUNK_SIZES) if self._work(size) <= work), CHUNK_SIZES[0])
