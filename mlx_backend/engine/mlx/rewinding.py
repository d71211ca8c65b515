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

from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_backend.engine.mlx.kv_cache import alias, can_rewind, parts_of, rewind
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache

if TYPE_CHECKING:
    from mlx_backend.engine.mlx.kv_cache import LayerCaches


def can_take_back(layer: Any) -> bool:
    """Whether a cache of this kind can be set back to before a run. Its network may still not go on from there."""
    return all(type(part) is ArraysCache or can_rewind(part) for part in parts_of(layer))


def has_to_replay(layers: LayerCaches) -> bool:
    """Whether taking any token of a run back means that the right tokens before it have to run again."""
    return not all(can_rewind(layer) or all(map(_is_trimmable, parts_of(layer))) for layer in layers)


def held_layers(layers: LayerCaches) -> LayerCaches:
    """Return the layers of one network whose old version is held until the outcome of a run is known."""
    if not (has_to_replay(layers) and all(map(can_take_back, layers))):
        return []
    return [part for part in _parts(layers) if not _is_trimmable(part)]


class RewindPoint:
    """One sequence's caches as they are now, so that a run can be taken back. Copies nothing."""

    def __init__(self, layers: LayerCaches) -> None:
        self._layers = layers
        self._before: LayerCaches | None = None  # of each part; None for one that is trimmed
        if has_to_replay(layers):
            self._before = [None if _is_trimmable(part) else alias(part) for part in _parts(layers)]

    def rewind(self, count: int, num_run: int) -> int:
        """Take back the last `count` of the `num_run` tokens that were run since; `count` must be less than `num_run`.

        Returns how many of the other tokens were taken back too and have to run again: all of them or none.
        """
        if not count:
            return 0
        if self._before is None:
            rewind(self._layers, count)
            return 0
        for part, before in zip(_parts(self._layers), self._before, strict=True):
            if before is None:
                part.trim(num_run)
            else:
                part.__dict__ = before.__dict__
        return num_run - count


def _parts(layers: LayerCaches) -> LayerCaches:
    return [part for layer in layers for part in parts_of(layer)]


def _is_trimmable(part: Any) -> bool:
    """Whether all tokens of a run can be trimmed, including the first."""
    return type(part) in (KVCache, GrowingKVCache)
