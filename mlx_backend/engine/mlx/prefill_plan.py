"""Planning prefill: where the chunks of a prompt end, and how many tokens are prefilled between two decode steps.

Knows no MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sequences import DecodingSequence

LAST_CHUNK_TOKENS = 2  # of a prompt that takes two chunks: its last token, and one that can be taken back
MIN_CHUNK, MAX_CHUNK = 64, 2048  # tokens
FIRST_CHUNK = 256  # tokens, before anything was measured
MAX_STALL_SECONDS = 0.25  # that a running reply should wait for a chunk
MAX_CHUNK_SECONDS = 1.0  # where no reply is running, but a request may arrive


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt on its way into a KV cache. `layers` is None until its first chunk is planned."""

    sequence: DecodingSequence
    boundaries: tuple[int, ...]  # positions of checkpoints, ascending; the last is the prompt's end
    layers: LayerCaches | None = None
    num_prefilled: int = 0

    @property
    def remaining(self) -> int:
        """Return how many tokens are still to be prefilled."""
        return self.boundaries[-1] - self.num_prefilled

    @property
    def has_reply(self) -> bool:
        """Whether a reply follows; if not, the prompt is only prefilled for the prefix cache."""
        return self.sequence.request.max_tokens > 0

    def chunk_ends(
        self, until: int, *, can_rewind: bool, max_spare_logits: int, window: int | None = None
    ) -> list[int]:
        """Return where the chunks end that prefill up to `until`, which is the last of these positions.

        Every chunk costs a run of the whole network. Where caches can be rewound, no chunk has to end at a boundary: a
        checkpoint is then what the chunk leaves, with some tokens taken back. So the rest of a prompt is one chunk, as
        long as that computes at most `max_spare_logits` logits (all but the last are thrown away), which is cheaper
        than another run. If it is longer it is two, of which the second is as short as possible.

        `window` is how many tokens caches hold that keep the first ones for good. What follows them is a reply that was
        preempted, and is prefilled as it was decoded, token by token: a chunk would not see the tokens that are kept.
        """
        if not can_rewind:
            ends = {end for end in self.boundaries if self.num_prefilled < end < until} | {until}
            if window is not None:
                ends |= set(range(max(window, self.num_prefilled + 1), until))
            return sorted(ends)
        end = self.boundaries[-1]
        tail = end - LAST_CHUNK_TOKENS
        if (
            until < end
            or self.remaining <= max_spare_logits
            or self.num_prefilled >= tail
            or not self.has_reply
        ):
            return [until]
        return [tail, until]


class PrefillPacer:
    """Decides how large a chunk may be: as large as fits into the longest stall, as measured on this machine."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self.rate: float | None = None  # tokens a second

    def chunk_size(self, *, others_wait: bool) -> int:
        """Return how many tokens to prefill in this step; `others_wait` is whether anything else could run."""
        if self._fixed is not None:
            return self._fixed
        if self.rate is None:
            return FIRST_CHUNK
        seconds = MAX_STALL_SECONDS if others_wait else MAX_CHUNK_SECONDS
        return max(MIN_CHUNK, min(MAX_CHUNK, int(self.rate * seconds)))

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk's time. Short chunks say little and are ignored."""
        if tokens >= MIN_CHUNK and seconds > 0:
            rate = tokens / seconds
            self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate


def will_extend_prefix(group: Sequence[PrefillJob], other: PrefillJob, covered: int) -> bool:
    """Whether a prompt, of which `covered` tokens are cached, will find more once the group's are prefilled."""
    tokens = other.sequence.tokens
    return any(
        covered < boundary < len(tokens) and job.sequence.tokens[:boundary] == tokens[:boundary]
        for job in group
        if job.sequence.adapter == other.sequence.adapter
        for boundary in job.boundaries
    )


def share_chunk(
    jobs: Sequence[PrefillJob],
    budget: int,
    *,
    count_remaining: Callable[[PrefillJob], int],
    estimate_remaining: Callable[[PrefillJob], int],
    should_wait: Callable[[Sequence[PrefillJob], PrefillJob], bool],
) -> list[tuple[PrefillJob, int]]:
    """Share a chunk of `budget` tokens out; return the jobs that get some, and how many.

    The first job gets all that it needs, or half the budget if others can be completed with the other half.
    `count_remaining` looks the prompt up in the prefix cache; `estimate_remaining` is an upper bound without that.
    A job that `should_wait` for a prefix which the jobs before it will leave in the cache gets nothing yet.
    """
    first, *others = jobs
    share = count_remaining(first)
    if share > budget:
        others = [other for other in others if estimate_remaining(other) <= budget // 2]
        share = budget // 2 if others else budget
    shares = [(first, share)]
    budget -= share
    for job in others:
        if should_wait([each for each, _ in shares], job):
            continue
        share = count_remaining(job)
        if share > budget:
            break
        shares.append((job, share))
        budget -= share
    return shares
