"""Sliding windows that are rewound and shrunk, for which `RotatingKVCache`'s private write index `_idx` is needed.

Speculative decoding and checkpoints inside a chunk take back the last tokens of a step. mlx-lm refuses that once the
window is full, although it still holds them. And after a chunk of S tokens a rotating cache holds window - 1 + S of
them; a stored prefix needs only the window. `_idx` says whether they are in order, and whether none has left it yet.

Most layers of Llama 4 attend in chunks: a token sees those of its own chunk. mlx-lm has a cache of its own for them,
which holds as many tokens as a chunk has; so does a window, with all that is done with windows here
(`patch_for_windows`). It is a window that begins where the token's chunk does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import base, llama4
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer


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


def patch_for_windows(network: Any) -> None:
    """Have a network of Llama 4 hold its chunks in sliding windows; others stay as they are."""
    for module in network.modules():
        if type(module) in _IN_CHUNKS:
            module.__class__ = _IN_CHUNKS[type(module)]


def _chunk_mask(chunk: int, cache: Any, length: int) -> Any:
    """Return the mask of the next `length` tokens after those of a cache, which see those of their own chunk."""
    before, is_first = cache.offset % chunk, cache.offset + length <= chunk
    if is_first or length == 1:
        return cache.make_mask(length, return_array=False, window_size=None if is_first else before + 1)
    held = min(cache.offset, getattr(cache, "max_size", cache.offset + 1) - 1)
    seen = mx.arange(before, before + length) % chunk + 1
    return base.create_causal_mask(length, held, window_size=seen[:, None])


class _Model(llama4.Model):  # type: ignore[misc]  # as above
    def make_cache(self) -> list[Any]:
        return [
            RotatingKVCache(each.chunk_size) if isinstance(each, ChunkedKVCache) else each
            for each in super().make_cache()
        ]


class _LlamaModel(llama4.LlamaModel):  # type: ignore[misc]  # as above
    """Takes each segment's mask from its own window; mlx-lm's makes one from the first layer's cache."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None:
            return super().__call__(inputs)  # type: ignore[no-any-return]
        hidden, window = self.embed_tokens(inputs), cache[0]
        mask = partial(_chunk_mask, self.attention_chunk_size)
        is_packed = isinstance(window, PackedLayer)
        in_chunk = window.make_masks(mask) if is_packed else mask(window, inputs.shape[1])
        whole = base.create_attention_mask(hidden, cache[3])
        for number, (layer, own) in enumerate(zip(self.layers, cache, strict=True), 1):
            hidden = layer(hidden, in_chunk if number % 4 else whole, cache=own)
        return self.norm(hidden)  # type: ignore[no-any-return]


_IN_CHUNKS = {llama4.Model: _Model, llama4.LlamaModel: _LlamaModel}
