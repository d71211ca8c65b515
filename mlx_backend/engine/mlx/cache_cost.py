"""How much memory the KV caches of a sequence take, from shapes and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


GROWTH_TOKENS = 256  # by which mlx-lm's caches grow


@dataclass(frozen=True, slots=True)
class _LayerCost:
    per_token: int  # bytes
    max_tokens: int | None  # of a sliding window
    constant: int  # bytes


class CacheCost:
    """What the caches of one sequence cost, measured on caches that hold `tokens` tokens."""

    def __init__(self, layers: Sequence[Any], tokens: int) -> None:
        self._layers = [each for layer in layers for each in _measure(layer, tokens)]

    @classmethod
    def from_plain(cls, plain: Iterable[Sequence[Any]]) -> CacheCost:
        """Return what another process measured, from its `as_plain`."""
        cost = cls([], 0)
        cost._layers = [_LayerCost(*layer) for layer in plain]
        return cost

    def as_plain(self) -> list[list[Any]]:
        """Return it as plain lists, to send to another process."""
        return [[layer.per_token, layer.max_tokens, layer.constant] for layer in self._layers]

    def __call__(self, tokens: int) -> int:
        """Return the bytes for so many tokens."""
        rounded = -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        return sum(
            layer.constant
            + layer.per_token * (rounded if layer.max_tokens is None else min(rounded, layer.max_tokens))
            for layer in self._layers
        )


def _measure(layer: Any, tokens: int) -> list[_LayerCost]:
    if isinstance(layer, CacheList):
        return [each for part in layer.caches for each in _measure(part, tokens)]
    arrays = [value for _, value in tree_flatten(layer.state) if isinstance(value, mx.array)]
    if not hasattr(layer, "keys"):  # a state of constant size, or an unknown kind
        return [_LayerCost(0, None, sum(value.nbytes for value in arrays))]
    per_token = sum(
        value.nbytes // value.shape[2] for value in arrays if value.ndim == 4 and value.shape[2] >= tokens
    )
    return [_LayerCost(per_token, getattr(layer, "max_size", None), 0)]
