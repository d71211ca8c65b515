"""How much memory the KV caches of a sequence take, from shapes and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


GROWTH_TOKENS = 256  # mlx-lm's caches grow by so many tokens


@dataclass(frozen=True, slots=True)
class _LayerCost:
    per_token: int
    most_tokens: int | None
    constant: int


class CacheCost:
    """What the caches of one row take, from caches that have read some tokens."""

    def __init__(self, layers: Sequence[Any], tokens: int) -> None:
        self._layers = [each for layer in layers for each in _measured(layer, tokens)]

    @classmethod
    def of(cls, plain: Iterable[Sequence[Any]]) -> CacheCost:
        """Read what another process measured."""
        cost = cls([], 0)
        cost._layers = [_LayerCost(*layer) for layer in plain]
        return cost

    def as_plain(self) -> list[list[Any]]:
        """Write it for another process."""
        return [[layer.per_token, layer.most_tokens, layer.constant] for layer in self._layers]

    def __call__(self, tokens: int) -> int:
        """Return the bytes for so many tokens."""
        rounded = -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        return sum(
            layer.constant
            + layer.per_token * (rounded if layer.most_tokens is None else min(rounded, layer.most_tokens))
            for layer in self._layers
        )


def _measured(layer: Any, tokens: int) -> list[_LayerCost]:
    if isinstance(layer, CacheList):
        return [each for part in layer.caches for each in _measured(part, tokens)]
    arrays = [value for _, value in tree_flatten(layer.state) if isinstance(value, mx.array)]
    if not hasattr(layer, "keys"):  # a state of one size, or something that is not known here
        return [_LayerCost(0, None, sum(value.nbytes for value in arrays))]
    per_token = sum(
        value.nbytes // value.shape[2] for value in arrays if value.ndim == 4 and value.shape[2] >= tokens
    )
    return [_LayerCost(per_token, getattr(layer, "max_size", None), 0)]
