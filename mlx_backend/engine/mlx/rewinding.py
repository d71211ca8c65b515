"""Taking back what a run added to one sequence's caches, such as drafts that are rejected.

A run is one forward pass of the network, over one or several tokens of the sequence. Keys and values are trimmed: those
of any number of tokens at the end can be dropped. A recurrent state cannot be trimmed, since each token changes all of
it. But each run replaces a state and never writes to the old one, so holding the old one copies nothing. If any token
of the run has to be dropped, the old state is put back, everything else is trimmed to the same length, and the tokens
of the run that were right have to run again: in one run with the next tokens, where they cost little.

Sliding windows next to states are put back like states. They cannot be trimmed by a whole run: its first token has
pushed out the oldest one. Knows nothing of drafts, networks or replies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from mlx_backend.engine.mlx.kv_cache import alias, can_rewind, rewind
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache

if TYPE_CHECKING:
    from mlx_backend.engine.mlx.kv_cache import LayerCaches


def can_take_back(layer: Any) -> bool:
    """Whether a cache of this kind can be set back to before a run. Its network may still not go on from there."""
    if isinstance(layer, CacheList):
        return all(can_take_back(each) for each in layer.caches)
    return type(layer) is ArraysCache or can_rewind(layer)


def has_to_replay(layers: LayerCaches) -> bool:
    """Whether taking any token of a run back means that the right tokens before it have to run again."""
    return not all(can_rewind(layer) or _is_trimmable(layer) for layer in layers)


def held_layers(layers: LayerCaches) -> LayerCaches:
    """Return the layers of one network whose old version is held until the outcome of a run is known."""
    if not (has_to_replay(layers) and all(map(can_take_back, layers))):
        return []
    return [each for layer in layers for each in _held(layer)]


class RewindPoint:
    """One sequence's caches as they are now, so that a run can be taken back. Copies nothing.

    `layers` is the list that holds them; what is put back replaces layers in that list.
    """

    def __init__(self, layers: LayerCaches) -> None:
        self._layers = layers
        self._before = [_saved(layer) for layer in layers] if has_to_replay(layers) else None

    def rewind(self, count: int, num_run: int) -> int:
        """Take back the last `count` of the `num_run` tokens that were run since; `count` must be less than `num_run`.

        Returns how many of the other tokens were taken back too and have to run again: all of them or none.
        """
        if not count:
            return 0
        if self._before is None:
            rewind(self._layers, count)
            return 0
        pairs = zip(self._layers, self._before, strict=True)
        self._layers[:] = [_restored(layer, before, num_run) for layer, before in pairs]
        return num_run - count


def _is_trimmable(layer: Any) -> bool:
    """Whether all tokens of a run can be trimmed, including the first."""
    if isinstance(layer, CacheList):
        return all(_is_trimmable(each) for each in layer.caches)
    return type(layer) in (KVCache, GrowingKVCache)


def _held(layer: Any) -> LayerCaches:
    if isinstance(layer, CacheList):
        return [each for part in layer.caches for each in _held(part)]
    return [] if _is_trimmable(layer) else [layer]


def _saved(layer: Any) -> Any:
    """Return what puts a layer back; None if it is trimmed."""
    if isinstance(layer, CacheList):
        return [_saved(each) for each in layer.caches]
    return None if _is_trimmable(layer) else alias(layer)


def _restored(layer: Any, before: Any, num_run: int) -> Any:
    """Return a layer as it was before a run of `num_run` tokens."""
    if isinstance(layer, CacheList):
        pairs = zip(layer.caches, before, strict=True)
        layer.caches = tuple(_restored(each, saved, num_run) for each, saved in pairs)
        return layer
    if before is not None:
        return before
    layer.trim(num_run)
    return layer
