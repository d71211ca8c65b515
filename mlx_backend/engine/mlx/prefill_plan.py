"""Planning prefill: where the chunks of a prompt end, and how many tokens are prefilled between two decode steps.

Chunks have sizes of a short list (chunk_sizes.py) and end at multiples of those, counted from the start of the text:
what a device prepares for the lengths of one prompt then serves the next one too.

Knows no MLX.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from statistics import median_high
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.chunk_sizes import CHUNK_SIZES, RUN_OVERHEAD, padded_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sequences import DecodingSequence

FIRST_CHUNK = 256  # where nothing was measured
MAX_STALL_SECONDS = 0.3  # that a running reply should wait for a chunk
MAX_CHUNK_SECONDS = 1.0  # where no reply is running, but a request may arrive
MEASURED_CHUNKS = 3  # the last ones, by which the machine's speed is judged
MIN_CHECKPOINT_DISTANCE = 16
"""Tokens between two checkpoints of a prompt, where caches cannot be rewound.

Each is a run of the network there, for which the first token waits, and holds the states of all layers. To prefill a
few tokens again where prompts part between two is cheaper.
"""


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

    def whole_end(self, position: int) -> int:
        """Return where a chunk may end that was to end at this position, which may be in the middle of an image."""
        images = self.sequence.images
        return position if images is None else images.whole_end(position)

    def unseen_image(self, end: int) -> PreparedImage | None:
        """Return the first image up to a position that has to be seen before the tokens there are prefilled."""
        images = self.sequence.images
        return images.unseen(self.num_prefilled, end) if images is not None else None

    def forget_images(self) -> None:
        """Let go of what was made of the images, which the caches hold now."""
        if self.sequence.images is not None:
            self.sequence.images.forget()

    @property
    def has_reply(self) -> bool:
        """Whether a reply follows; if not, the prompt is only prefilled for the prefix cache."""
        return self.sequence.request.max_tokens > 0

    def chunk_ends(
        self,
        until: int,
        *,
        can_rewind: bool,
        max_spare_logits: int,
        window: int | None = None,
        pad: bool = False,
    ) -> list[int]:
        """Return where the chunks end that prefill up to `until`, which is the last of these positions.

        Every chunk costs a run of the whole network. Where caches can be rewound, no chunk has to end at a boundary: a
        checkpoint is then what the chunk leaves, with some tokens taken back. So the rest of a prompt is one chunk, as
        long as that computes at most `max_spare_logits` logits (all but the last are thrown away), which is cheaper
        than another run. If it is longer it is two, of which the second is the last token, as in mlx-lm: a run of one
        token is what devices do best.

        `window` is how many tokens caches hold that keep the first ones for good. What follows them is a reply that was
        preempted, and is prefilled as it was decoded, token by token: a chunk would not see the tokens that are kept.

        With `pad` every chunk but the last token's can be filled up to one of `PADDED_SIZES`.
        """
        if not can_rewind:
            ends = {end for end in self.boundaries if self.num_prefilled < end < until} | {until}
            if window is not None:
                ends |= set(range(max(window, self.num_prefilled + 1), until))
            return sorted(ends)
        is_last = until == self.boundaries[-1] and self.has_reply
        if is_last and self.remaining <= (1 if pad else max(1, max_spare_logits)):
            return [until]
        ahead = until - 1 if is_last else until
        sizes = padded_sizes(ahead - self.num_prefilled) if pad else []
        return [*accumulate(sizes[:-1], initial=self.num_prefilled), ahead, until][
            1 : None if is_last else -1
        ]


class PrefillPacer:
    """Decides how large a chunk may be: as large as fits into the longest stall, as measured on this machine.

    `rate` is how many tokens a second are prefilled, if that is known already; with `fixed` it does not matter. `work`
    gives the cost of a chunk of so many tokens, in units of which `rate` are done in a second.
    """

    def __init__(
        self,
        fixed: int | None,
        rate: float | None = None,
        work: Callable[[int], float] = lambda tokens: tokens + RUN_OVERHEAD,
    ) -> None:
        self._fixed = fixed
        self._work = work
        self._rates: deque[float] = deque(() if rate is None else (rate,), maxlen=MEASURED_CHUNKS)

    @property
    def rate(self) -> float | None:
        """How many tokens a second are prefilled; None before anything was measured.

        The middle one of what was measured last: a chunk that took many times what its neighbours took, because
        something was prepared for it or another process was busy, does not count.
        """
        return median_high(self._rates) if self._rates else None

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._rates.clear()
        if rate is not None:
            self._rates.append(rate)

    def chunk_size(self, start: int, *, others_wait: bool, share: float = 1.0) -> int:
        """Return how long a chunk from position `start` may be, or a share of one.

        `others_wait` is whether anything else could run.
        """
        if self._fixed is not None:
            return max(1, int(self._fixed * share))
        size = FIRST_CHUNK
        if self.rate is not None:
            work = self.rate * (MAX_STALL_SECONDS if others_wait else MAX_CHUNK_SECONDS)
            longest = next(
                (size for size in reversed(CHUNK_SIZES) if self._work(size) <= work), CHUNK_SIZES[0]
            )
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


def spaced_checkpoints(positions: Sequence[int]) -> list[int]:
    """Return positions, which ascend, without those too close behind another, which does in their place."""
    spaced: list[int] = []
    for position in positions:
        if not spaced or position - spaced[-1] >= MIN_CHECKPOINT_DISTANCE:
            spaced.append(position)
    return spaced


def will_extend_prefix(group: Sequence[PrefillJob], other: PrefillJob, covered: int) -> bool:
    """Whether a prompt, of which `covered` tokens are cached, will find more once the group's are prefilled."""
    length = len(other.sequence.tokens)
    return any(
        covered < boundary < length and job.sequence.packed(boundary) == other.sequence.packed(boundary)
        for job in group
        if job.sequence.adapter == other.sequence.adapter
        for boundary in job.boundaries
    )


def share_chunk(
    jobs: Sequence[PrefillJob],
    chunk_size: Callable[[int, float], int],
    *,
    count_remaining: Callable[[PrefillJob], int],
    estimate_remaining: Callable[[PrefillJob], int],
    should_wait: Callable[[Sequence[PrefillJob], PrefillJob], bool],
) -> list[tuple[PrefillJob, int]]:
    """Share a chunk out; return the jobs that get some of it, and how many tokens.

    `chunk_size` gives the tokens for a position and a share. The first job gets all that it needs, or half of the chunk
    if others can be completed with the other half. `count_remaining` looks the prompt up in the prefix cache;
    `estimate_remaining` is an upper bound without that. A job that `should_wait` for a prefix which the jobs before it
    will leave in the cache gets nothing yet.
    """
    first, *others = jobs
    share = count_remaining(first)
    budget = chunk_size(first.num_prefilled, 1.0)
    if share > budget:
        half = chunk_size(first.num_prefilled, 0.5)
        others = [other for other in others if estimate_remaining(other) <= budget - half]
        share = half if others else budget
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
