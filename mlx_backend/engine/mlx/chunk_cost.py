"""What the caches of a sequence and a chunk of its prompt take: bytes and seconds, and the sizes that chunks have.

The sizes are few, so that what a device prepares for one serves the next: MLX's CUDA backend takes 0.1 to 0.6 seconds
for a length of a chunk that it has not seen, and 0.06 to 0.1 for a length of what is attended to (H200).

Knows shapes and lengths; nothing of requests, or of how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import allocated_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CHUNK_SIZES = (64, 128, 256, 512, 1024, 2048)
"""Tokens of a chunk."""
PADDED_SIZES = (8, 16, 32, *CHUNK_SIZES)
"""Tokens of a chunk that is filled up, to have one of few lengths."""
RUN_OVERHEAD = 64
"""What a run of the network takes apart from its tokens, in tokens that take as long, where it is not measured."""


MAX_SPARE_TOKENS = 256
"""The most tokens that fill a chunk up, to save another run and, after a text of a length not seen before, planning.

To plan attention for one more number of keys takes as long as 400 tokens of a prompt (H200).
"""


def padded_sizes(tokens: int) -> list[int]:
    """Return the sizes of the chunks that hold `tokens`, where each has to have one of `PADDED_SIZES`.

    The last one may be longer than what is left for it, by less than another run would cost.
    """
    sizes: list[int] = []
    while tokens > 0:
        allowed = [size for size in PADDED_SIZES if size < tokens + MAX_SPARE_TOKENS]
        sizes.append(next((size for size in allowed if size >= tokens), allowed[-1]))
        tokens -= sizes[-1]
    return sizes


@dataclass(frozen=True, slots=True)
class _LayerCost:
    per_token: int  # bytes
    max_tokens: int | None  # of a sliding window
    constant: int  # bytes


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What the caches of one sequence cost."""

    layers: tuple[_LayerCost, ...]

    @classmethod
    def of(cls, layers: Sequence[Any], tokens: int) -> CacheCost:
        """Measure it on caches that hold `tokens` tokens."""
        return cls(tuple(each for layer in layers for each in _measure(layer, tokens)))

    @classmethod
    def from_plain(cls, plain: Iterable[Sequence[Any]]) -> CacheCost:
        """Return what another process measured, from its `as_plain`."""
        return cls(tuple(_LayerCost(*layer) for layer in plain))

    def as_plain(self) -> list[list[Any]]:
        """Return it as plain lists, to send to another process."""
        return [[layer.per_token, layer.max_tokens, layer.constant] for layer in self.layers]

    def __call__(self, tokens: int) -> int:
        """Return the bytes for a number of tokens."""
        rounded = allocated_tokens(tokens)
        return sum(
            layer.constant
            + layer.per_token * (rounded if layer.max_tokens is None else min(rounded, layer.max_tokens))
            for layer in self.layers
        )


def _measure(layer: Any, tokens: int) -> list[_LayerCost]:
    if hasattr(layer, "caches"):  # mlx-lm's list of caches, or mlx-vlm's
        return [each for part in layer.caches for each in _measure(part, tokens)]
    arrays = [value for _, value in tree_flatten(layer.state) if isinstance(value, mx.array)]
    if not hasattr(layer, "keys"):  # a state of constant size, or an unknown kind
        return [_LayerCost(0, None, sum(value.nbytes for value in arrays))]
    per_token = sum(
        value.nbytes // value.shape[2] for value in arrays if value.ndim == 4 and value.shape[2] >= tokens
    )
    return [_LayerCost(per_token, getattr(layer, "max_size", None), 0)]


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """The bytes that the computation of a chunk needs in addition to the caches.

    They are `per_token` of the chunk, and `per_pair` for each token of the chunk and each one up to its end. Attention
    that is computed in one kernel needs nothing for pairs.
    """

    per_token: float = 0.0
    per_pair: float = 0.0

    @classmethod
    def from_two(cls, tokens: int, first: float, second: float) -> WorkingMemory:
        """Return what follows from the bytes of two chunks of `tokens` each, one after the other.

        What the second one needs more is counted as `per_pair`, mostly too much for longer chunks.
        """
        per_pair = max(0.0, second - first) / tokens**2
        return cls(per_token=max(0.0, first / tokens - per_pair * tokens), per_pair=per_pair)

    def __call__(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of `tokens` that ends at position `context`."""
        return int(tokens * (self.per_token + self.per_pair * context))


@dataclass(slots=True)
class ChunkCost:
    """What a chunk takes: as long as `overhead` tokens more than it has, of which `rate` are done in a second.

    It needs `memory`, `context_bytes` for each token up to its end, and from `many_rows_from` tokens on
    `many_rows_bytes` more, for layers that use their implementation for many rows (layers/many_rows.py). All but the
    second may be measured again later (tuning.py).
    """

    rate: float
    memory: WorkingMemory
    overhead: float = RUN_OVERHEAD
    many_rows_from: int = 0
    many_rows_bytes: int = 0
    context_bytes: int = 0

    def work(self, tokens: int) -> float:
        """Return the cost of a chunk of `tokens`, in units of which `rate` are done in a second."""
        return tokens + self.overhead

    def working_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes for a chunk of `tokens` that ends at position `context`."""
        many_rows = self.many_rows_bytes if tokens >= self.many_rows_from else 0
        return self.memory(tokens, context) + self.context_bytes * context + many_rows
