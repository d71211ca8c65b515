"""Prompts on their way into caches: where each has to stop, and how much is read between two tokens of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .decoding import Layers, Row

TAIL = 16  # tokens at a prompt's end that may be read together with the last
LEAST_CHUNK, MOST_CHUNK = 64, 2048  # tokens
FIRST_CHUNK = 256
LONGEST_STALL = 0.25  # seconds that a running stream should wait for a chunk at most
LONGEST_CHUNK_SECONDS = 1.0  # where nobody runs, but somebody may come


@dataclass(slots=True, eq=False)
class Reading:
    """A prompt on its way into a cache. `layers` is None until its first piece is read."""

    row: Row
    marks: tuple[int, ...]  # positions to stop at, ascending; the last is the prompt's end
    layers: Layers | None = None
    done: int = 0

    @property
    def left(self) -> int:
        """Return how many tokens are still to be read."""
        return self.marks[-1] - self.done

    def next_stop(self, until: int, *, rewinds: bool, most_logits: int) -> int:
        """Return where the next piece ends, at `until` at the latest.

        Every piece costs a run of the whole network. Where caches can be rewound, marks inside a piece need no
        stop: what was kept there is what the piece leaves, taken back by some tokens. So the rest of a prompt is
        read in one piece, as long as the logits of `most_logits` tokens, which nobody needs but of the last, are
        cheaper than another run; and else in two, a short tail and what stands before it.
        """
        if not rewinds:
            return min(until, next(mark for mark in self.marks if mark > self.done))
        end = self.marks[-1]
        if until < end or not self.row.request.max_tokens:
            return until
        if end - self.done <= most_logits:
            return end
        late = [mark for mark in self.marks[:-1] if end - TAIL <= mark < end - 1]
        tail = late[-1] if late else end - 2 if end - 1 in self.marks else end - 1
        return tail if self.done < tail else end


class Pace:
    """How large a chunk may be: as large as fits into the longest stall, measured on this machine."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self.rate: float | None = None  # tokens a second

    def chunk(self, *, others: bool) -> int:
        """Return the tokens to read in this step; `others` are waiting for theirs meanwhile."""
        if self._fixed is not None:
            return self._fixed
        if self.rate is None:
            return FIRST_CHUNK
        seconds = LONGEST_STALL if others else LONGEST_CHUNK_SECONDS
        return max(LEAST_CHUNK, min(MOST_CHUNK, int(self.rate * seconds)))

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that was read; short ones say little."""
        if tokens >= LEAST_CHUNK and seconds > 0:
            rate = tokens / seconds
            self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate


def shares(
    readings: Sequence[Reading],
    budget: int,
    *,
    to_read: Callable[[Reading], int],
    at_most: Callable[[Reading], int],
) -> Iterator[tuple[Reading, int]]:
    """Deal a chunk out: all the first needs, or half of it if others could be done with the other half.

    `to_read` looks a prompt up among the prefixes, and is asked when its turn comes: the one before it may just
    have left one. `at_most` is a guess that looks nothing up for good.
    """
    first, *others = readings
    needed = to_read(first)
    if needed > budget:
        others = [other for other in others if at_most(other) <= budget // 2]
        needed = budget // 2 if others else budget
    yield first, needed
    budget -= needed
    for reading in others:
        needed = to_read(reading)
        if needed > budget:
            break
        yield reading, needed
        budget -= needed
