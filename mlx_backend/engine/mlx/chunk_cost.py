"""What a chunk of a prompt takes: seconds, and working memory beside the caches. Knows no MLX."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.chunk_sizes import RUN_OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ManyRowsCost:
    """What chunks take in which some layers use their implementation for many rows (layers/many_rows.py).

    `seconds` maps sizes of such chunks, ascending, to the seconds measured; `nbytes` is their extra working memory.
    """

    seconds: Mapping[int, float]
    nbytes: int

    @property
    def min_tokens(self) -> int:
        """The tokens of the shortest such chunk."""
        return next(iter(self.seconds))

    def seconds_of(self, tokens: int) -> float:
        """Return how long a chunk of so many tokens takes, by those measured next to it."""
        known = list(self.seconds)
        if len(known) == 1:
            return self.seconds[known[0]] * tokens / known[0]
        at = min(max(1, bisect_left(known, tokens)), len(known) - 1)
        short, long = known[at - 1], known[at]
        slope = (self.seconds[long] - self.seconds[short]) / (long - short)
        return self.seconds[long] + max(0.0, slope) * (tokens - long)


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """The bytes that the computation of a chunk needs beside the caches.

    They are `per_token` of the chunk, `per_inner_pair` for each two of them (as in a sliding window), `per_context` for
    each token up to the chunk's end (copies of keys and values), and `per_pair` for each token of the chunk and each
    one up to there. Attention that is computed in one kernel needs nothing for pairs.
    """

    per_token: float = 0.0
    per_inner_pair: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0

    @classmethod
    def from_two(cls, tokens: int, first: float, second: float) -> WorkingMemory:
        """Return what follows from the bytes of two chunks of so many tokens, one behind the other.

        What the second one needs more is counted as `per_pair`, mostly too much for longer chunks.
        """
        per_pair = max(0.0, second - first) / tokens**2
        return cls(per_token=max(0.0, first / tokens - per_pair * tokens), per_pair=per_pair)

    @classmethod
    def from_four(
        cls, tokens: int, context: int, near: Sequence[float], far: Sequence[float]
    ) -> WorkingMemory:
        """Return what follows from the bytes of two chunks, each measured twice.

        They are of so many tokens, and of twice as many; `near` at the beginning of a text, and `far` ending at
        position `context`.
        """
        # With a, b, c and d per token, context, pair and inner pair: t tokens that end at C need at + bC + ctC + dt².
        slopes = [(far[at] - near[at]) / (context - (at + 1) * tokens) for at in (0, 1)]  # b + ct, b + 2ct
        per_pair = max(0.0, slopes[1] - slopes[0]) / tokens
        per_context = max(0.0, slopes[0] - per_pair * tokens)
        all_pairs = max(0.0, near[1] - 2 * near[0]) / (2 * tokens**2)  # c + d
        per_token = max(0.0, near[0] / tokens - per_context - max(all_pairs, per_pair) * tokens)
        found = cls(per_token, max(0.0, all_pairs - per_pair), per_context, per_pair)
        lacking = max(
            (each - found(tokens, end)) / tokens for each, end in ((near[0], tokens), (far[0], context))
        )
        lacking = max(lacking, (far[1] - found(2 * tokens, context)) / (2 * tokens))
        return replace(found, per_token=per_token + max(0.0, lacking))

    def __call__(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of so many tokens that ends at position `context`."""
        own = tokens * (self.per_token + self.per_inner_pair * tokens)
        return int(own + context * (self.per_context + self.per_pair * tokens))


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What a chunk takes: `rate` is in tokens a second, `memory` without what many rows take more."""

    rate: float
    memory: WorkingMemory
    many_rows: ManyRowsCost | None = None

    def work(self, tokens: int) -> float:
        """Return the cost of a chunk of so many tokens, in units of which `rate` are done in a second."""
        many_rows = self.many_rows
        if many_rows is None or tokens < many_rows.min_tokens:
            return tokens + RUN_OVERHEAD
        return self.rate * many_rows.seconds_of(tokens)

    def working_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of so many tokens that ends at position `context`."""
        nbytes = self.memory(tokens, context)
        if self.many_rows is not None and tokens >= self.many_rows.min_tokens:
            nbytes += self.many_rows.nbytes
        return nbytes
