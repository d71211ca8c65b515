"""Prompts on their way into caches: where each has to stop, and how much is read between two tokens of the others.

Knows no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sequences import DecodingSequence

LAST_CHUNK_TOKENS = (
    2  # tokens of a prompt that is read in two pieces: the last, and one that can be taken back
)
MIN_CHUNK, MAX_CHUNK = 64, 2048  # tokens
FIRST_CHUNK = 256
MAX_STALL_SECONDS = 0.25  # seconds that a running stream should wait for a chunk at most
MAX_CHUNK_SECONDS = 1.0  # where nobody runs, but somebody may come


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt on its way into a cache. `layers` is None until its first piece is read."""

    sequence: DecodingSequence
    boundaries: tuple[int, ...]  # positions to stop at, ascending; the last is the prompt's end
    layers: LayerCaches | None = None
    done: int = 0

    @property
    def left(self) -> int:
        """Return how many tokens are still to be read."""
        return self.boundaries[-1] - self.done

    def stops(self, until: int, *, can_rewind: bool, max_spare_logits: int) -> list[int]:
        """Return where the pieces end in which the prompt is read up to `until`, which is the last of them.

        Every piece costs a run of the whole network. Where caches can be rewound, marks inside a piece need no
        stop: what was kept there is what the piece leaves, taken back by some tokens. So the rest of a prompt is
        read in one piece, as long as the logits of `most_logits` tokens, which nobody needs but of the last, are
        cheaper than another run; and else in two, of which the second is as short as can be.
        """
        if not can_rewind:
            return [*(boundary for boundary in self.boundaries if self.done < boundary < until), until]
        tail = self.boundaries[-1] - LAST_CHUNK_TOKENS
        if (
            until < self.boundaries[-1]
            or self.left <= max_spare_logits
            or not self.done < tail
            or not self.has_reply
        ):
            return [until]
        return [tail, until]

    @property
    def has_reply(self) -> bool:
        """Whether a reply follows, or the prompt is only to be kept."""
        return self.sequence.request.max_tokens > 0


class PrefillPacer:
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
        seconds = MAX_STALL_SECONDS if others else MAX_CHUNK_SECONDS
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self.rate * seconds)))

    def measured(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk that was read; short ones say little."""
        if tokens >= MIN_CHUNK and seconds > 0:
            rate = tokens / seconds
            self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate


def will_share_prefix(group: Sequence[PrefillJob], other: PrefillJob, covered_tokens: int) -> bool:
    """Whether a prompt, of which `covered` tokens are known, will find more when the group's have been read."""
    tokens = other.sequence.tokens
    return any(
        covered_tokens < boundary < len(tokens) and each.sequence.tokens[:boundary] == tokens[:boundary]
        for each in group
        if each.sequence.adapter == other.sequence.adapter
        for boundary in each.boundaries
    )


def plan_step(
    jobs: Sequence[PrefillJob],
    budget: int,
    *,
    to_read: Callable[[PrefillJob], int],
    at_most: Callable[[PrefillJob], int],
    waits: Callable[[Sequence[PrefillJob], PrefillJob], bool],
) -> list[tuple[PrefillJob, int]]:
    """Deal a chunk out: all the first needs, or half of it if others could be done with the other half.

    Returns who gets how many tokens. `to_read` looks a prompt up among the prefixes; one that `waits` for what those
    before it will leave there gets nothing yet. `at_most` is a guess that looks nothing up for good.
    """
    first, *others = jobs
    share = to_read(first)
    if share > budget:
        others = [other for other in others if at_most(other) <= budget // 2]
        share = budget // 2 if others else budget
    dealt = [(first, share)]
    budget -= share
    for job in others:
        if waits([each for each, _ in dealt], job):
            continue
        share = to_read(job)
        if share > budget:
            break
        dealt.append((job, share))
        budget -= share
    return dealt
