"""Prompts on their way into caches: where each has to stop, and how much is read between two tokens of the others.

Knows no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import Layers
    from mlx_backend.engine.mlx.sequences import Row

LAST_PIECE = 2  # tokens of a prompt that is read in two pieces: the last, and one that can be taken back
MIN_CHUNK, MAX_CHUNK = 64, 2048  # tokens
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

    def stops(self, until: int, *, rewinds: bool, most_logits: int) -> list[int]:
        """Return where the pieces end in which the prompt is read up to `until`, which is the last of them.

        Every piece costs a run of the whole network. Where caches can be rewound, marks inside a piece need no
        stop: what was kept there is what the piece leaves, taken back by some tokens. So the rest of a prompt is
        read in one piece, as long as the logits of `most_logits` tokens, which nobody needs but of the last, are
        cheaper than another run; and else in two, of which the second is as short as can be.
        """
        if not rewinds:
            return [*(mark for mark in self.marks if self.done < mark < until), until]
        tail = self.marks[-1] - LAST_PIECE
        if until < self.marks[-1] or self.left <= most_logits or not self.done < tail or not self.replies:
            return [until]
        return [tail, until]

    @property
    def replies(self) -> bool:
        """Whether a reply follows, or the prompt is only to be kept."""
        return self.row.request.max_tokens > 0


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
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self.rate * seconds)))

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that was read; short ones say little."""
        if tokens >= MIN_CHUNK and seconds > 0:
            rate = tokens / seconds
            self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate


def waits_for(group: Sequence[Reading], other: Reading, covered: int) -> bool:
    """Whether a prompt, of which `covered` tokens are known, will find more when the group's have been read."""
    tokens = other.row.tokens
    return any(
        covered < mark < len(tokens) and each.row.tokens[:mark] == tokens[:mark]
        for each in group
        if each.row.space == other.row.space
        for mark in each.marks
    )


def deal(
    readings: Sequence[Reading],
    budget: int,
    *,
    to_read: Callable[[Reading], int],
    at_most: Callable[[Reading], int],
    waits: Callable[[Sequence[Reading], Reading], bool],
) -> list[tuple[Reading, int]]:
    """Deal a chunk out: all the first needs, or half of it if others could be done with the other half.

    Returns who gets how many tokens. `to_read` looks a prompt up among the prefixes; one that `waits` for what those
    before it will leave there gets nothing yet. `at_most` is a guess that looks nothing up for good.
    """
    first, *others = readings
    share = to_read(first)
    if share > budget:
        others = [other for other in others if at_most(other) <= budget // 2]
        share = budget // 2 if others else budget
    dealt = [(first, share)]
    budget -= share
    for reading in others:
        if waits([each for each, _ in dealt], reading):
            continue
        share = to_read(reading)
        if share > budget:
            break
        dealt.append((reading, share))
        budget -= share
    return dealt
