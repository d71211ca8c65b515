"""KV caches copied, merged, rewound and trimmed. A list of layers (mlx-lm's cache objects) is one sequence's cache."""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence


type LayerCaches = list[Any]


TOKEN = 4  # bytes
MAX_SLACK = 1.25  # how much room a full layer may have for each of its tokens; more is worth a copy


def alias(layer: Any) -> Any:
    """Return a cache layer with the same contents, independent of the first: writing to either copies."""
    match layer:
        case mx.array():
            return copy.copy(layer)
        case list():
            return [alias(item) for item in layer]
        case tuple():
            return tuple(alias(item) for item in layer)
        case _ if hasattr(layer, "state"):
            twin = layer.__class__.__new__(layer.__class__)
            twin.__dict__.update({name: alias(value) for name, value in layer.__dict__.items()})
            return twin
        case _:
            return layer


class RewindableRotatingKVCache(RotatingKVCache):  # type: ignore[misc]
    """A sliding window from which the tokens of the last step can be taken back, all but one.

    After a step of S tokens mlx-lm's rotating cache holds the last `window - 1 + S` in their order, so that
    many are there to go back over; it only does not know that it can be trimmed.
    """

    @classmethod
    def of(cls, layer: Any) -> Any:
        """Return a rewindable cache with the same contents, or the layer itself if it is no rotating one."""
        if type(layer) is not RotatingKVCache:
            return layer
        ours = cls(layer.max_size, layer.keep)
        ours.__dict__.update(layer.__dict__)
        return ours

    def is_trimmable(self) -> bool:
        """It is, directly after a step of several tokens."""
        return True

    def trim(self, n: int) -> int:
        """Take back the last n tokens of the last step."""
        if n:
            self.keys: mx.array = self.keys[..., :-n, :]
            self.values: mx.array = self.values[..., :-n, :]
            self.offset -= n
            self._idx = self.keys.shape[2]
        return n


def merged(texts: Sequence[LayerCaches]) -> LayerCaches:
    """Return the caches of several texts as those of one batch, in their order."""
    return [each[0].merge(list(each)) for each in zip(*texts, strict=True)]


def can_rewind(layer: Any) -> bool:
    """Whether the tokens of a step can be taken back from a cache, all but the first."""
    if isinstance(layer, RotatingKVCache):
        return not layer.keep
    return type(layer) in (KVCache, QuantizedKVCache)


def rewind_copies(layers: LayerCaches, count: int) -> LayerCaches:
    """Return copies of caches without the last tokens of their last step, of which there were more."""
    copies = [RewindableRotatingKVCache.of(alias(layer)) for layer in layers]
    for layer in copies:
        layer.trim(count)
    return copies


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Write tokens as bytes, four each: comparing two prefixes is then one memcmp."""
    return array("I", tokens).tobytes()


def compact_copies(layers: LayerCaches) -> LayerCaches:
    """Return copies of caches that hold what is in them and little else."""
    return [_compacted(alias(layer)) for layer in layers]


def _compacted(layer: Any) -> Any:
    """Give back what a layer holds beside its tokens: what has left a window, and much of the room for more."""
    match layer:
        case CacheList():
            layer.caches = tuple(_compacted(each) for each in layer.caches)
        case ArraysCache():  # whose arrays may be one text's part of a batch's
            layer.cache = [mx.contiguous(each) if each is not None else None for each in layer.cache]
        case KVCache() if layer.keys is not None and layer.keys.shape[2] > MAX_SLACK * layer.offset:
            keep_slice(layer, slice(layer.offset))
        case RotatingKVCache(keep=0) if layer.keys is not None and layer._idx == layer.keys.shape[2]:
            # In order, as a piece of prompt leaves it.
            length = layer.keys.shape[2]
            keep_slice(layer, slice(max(0, length - layer.max_size), length))
            layer._idx = min(length, layer.max_size)
    return layer


def keep_slice(layer: Any, tokens: slice) -> None:
    """Keep some tokens of a layer, and the memory of no others."""
    # Unlike a slice, which holds on to all that it is a part of, and unlike `whole[...] = part`, which is that slice.
    layer.keys = mx.contiguous(layer.keys[..., tokens, :])
    layer.values = mx.contiguous(layer.values[..., tokens, :])
