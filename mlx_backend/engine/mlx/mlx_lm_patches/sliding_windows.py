"""Sliding windows that are rewound and shrunk, for which `RotatingKVCache`'s private write index `_idx` is needed.

Speculative decoding and checkpoints inside a chunk take back the last tokens of a step. mlx-lm refuses that once the
window is full, although it still holds them. And after a chunk of S tokens a rotating cache holds window - 1 + S of
them; a stored prefix needs only the window. `_idx` says whether they are in order, and whether none has left it yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import RotatingKVCache

if TYPE_CHECKING:
    import mlx.core as mx


class RewindableRotatingKVCache(RotatingKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A sliding window from which the tokens of the last step can be taken back, all but one.

    After a step of S > 1 tokens mlx-lm's rotating cache holds the last `window - 1 + S` in order. Taking back S - 1 of
    them leaves the whole window of the token before.
    """

    @classmethod
    def of(cls, layer: Any) -> Any:
        """Return a rewindable cache with the same contents, or the layer itself if it is not a rotating cache."""
        if type(layer) is not RotatingKVCache:
            return layer
        ours = cls(layer.max_size, layer.keep)
        ours.__dict__.update(layer.__dict__)
        return ours

    def is_trimmable(self) -> bool:
        """Return True, which holds directly after a step of several tokens."""
        return True

    def trim(self, n: int) -> int:
        """Take back the last n tokens of the last step."""
        if n:
            self.keys: mx.array = self.keys[..., :-n, :]
            self.values: mx.array = self.values[..., :-n, :]
            self.offset -= n
            self._idx = self.keys.shape[2]
        return n


def is_in_order(layer: RotatingKVCache) -> bool:
    """Whether a cache that is not empty holds its tokens in order, as a prefill chunk leaves them."""
    return bool(layer._idx == layer.keys.shape[2])


def holds_every_token(layer: RotatingKVCache) -> bool:
    """Whether no token has left a window yet, so that all are in order from the first."""
    return bool(layer._idx == layer.offset)


def set_write_index(layer: RotatingKVCache, index: int) -> None:
    """Say where the next token goes, after the keys and values were replaced."""
    layer._idx = index
