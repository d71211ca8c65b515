"""Prompts on their way into caches: where each has to stop, how much is read between two tokens of the others, and
which of them are read in one run. Knows no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .decoding import Layers, Row

TAIL = 16  # tokens at a prompt's end that may be read together with the last
LEAST_CHUNK, MOST_CHUNK = 64, 2048  # tokens
FIRST_CHUNK = 256
MOST_TOGETHER = 256  # tokens of each prompt that is read in one run with others
LAST_PIECE = (
    2  # of their tokens, where they are read in two runs; with a single one, mlx-lm's windows would rotate
)
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


def alike(group: Sequence[Reading], other: Reading) -> bool:
    """Whether the rest of a prompt can well be read in one run with a group's: short ones, and not much padding.

    A long prompt keeps the machine busy by itself. Of short ones, most of the time goes into fetching the
    weights, which is done once for all of them.
    """
    together = [*group, other]
    rests, ends = [each.left for each in together], [each.marks[-1] for each in together]
    return (
        max(rests) <= MOST_TOGETHER
        and (max(rests) <= LAST_PIECE or min(rests) > LAST_PIECE)
        and all(each.row.request.max_tokens for each in together)
        and other.row.request.adapter == group[0].row.request.adapter
        and len(rests) * max(rests) <= 2 * sum(rests)
        and len(ends) * max(ends) <= 2 * sum(ends)
    )


def waits_for(group: Sequence[Reading], other: Reading, covered: int) -> bool:
    """Whether a prompt, of which `covered` tokens are known, will find more when the group's have been read."""
    tokens = other.row.tokens
    return any(
        covered < mark < len(tokens) and each.row.tokens[:mark] == tokens[:mark]
        for each in group
        if each.row.request.adapter == other.row.request.adapter
        for mark in each.marks
    )


def shares(
    readings: Sequence[Reading],
    budget: int,
    *,
    to_read: Callable[[Reading], int],
    at_most: Callable[[Reading], int],
    together: Callable[[Sequence[Reading], Reading], bool],
    waits: Callable[[Sequence[Reading], Reading], bool],
) -> Iterator[list[tuple[Reading, int]]]:
    """Deal a chunk out: all the first needs, or half of it if others could be done with the other half.

    Yields those that are read in one run, with how many tokens of each. `to_read` looks a prompt up among the
    prefixes, and is asked when its turn comes: those before it may just have left one, for which it `waits`.
    `at_most` is a guess that looks nothing up for good.
    """
    first, *others = readings
    needed = to_read(first)
    if needed > budget:
        others = [other for other in others if at_most(other) <= budget // 2]
        needed = budget // 2 if others else budget
        yield [(first, needed)]
        group: list[tuple[Reading, int]] = []
    else:
        group = [(first, needed)]
    budget -= needed
    for reading in others:
        if group and waits([each for each, _ in group], reading):
            yield group
            group = []
        needed = to_read(reading)
        if needed > budget:
            break
        if group and not together([each for each, _ in group], reading):
            yield group
            group = []
        group.append((reading, needed))
        budget -= needed
    if group:
        yield group
