"""What images need of a network beyond packed runs: their embeddings, and what is added to the outputs of layers.

Half of mlx-lm's networks take no embeddings as an argument, so they come from a replaced class of what embeds tokens
(`patch_for_embeddings`). What Qwen3-VL's first layers get more of an image is added by replaced classes of those
layers (`patch_for_added`). Masks with blocks that attend in both directions, and positions in two dimensions, come in
by `PackedLayer` and `TokenPositions`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer

if TYPE_CHECKING:
    from collections.abc import Iterable

    import mlx.core as mx


def patch_for_added(layers: Iterable[Any]) -> None:
    """Make a network's layers add to their outputs what `PackedLayer` says; other calls work as before."""
    for layer in layers:
        layer.__class__ = _adding(layer.__class__)


def patch_for_embeddings(network: Any) -> None:
    """Make a network take embeddings in place of tokens (`give_embeddings`); other calls work as before."""
    embedding = embedding_of(network)
    embedding.__class__ = _embedding_images(embedding.__class__)
    embedding.next_embeddings = _NextEmbeddings()


def give_embeddings(network: Any, embeddings: mx.array | None) -> None:
    """Have the next call of a network begin with these ([1, tokens, width]), whatever its tokens are; None: no more."""
    embedding_of(network).next_embeddings.given = embeddings


def given_embeddings(embedding: Any) -> mx.array | None:
    """Return what was given to a network's module that embeds tokens, and not taken yet."""
    waiting: _NextEmbeddings | None = getattr(embedding, "next_embeddings", None)
    return waiting.given if waiting is not None else None


def embedding_of(network: Any) -> Any:
    """Return the module that embeds a network's tokens."""
    named = {name.rpartition(".")[2]: module for name, module in network.named_modules()}
    return named.get("embed_tokens") or named["embeddings"]


@dataclass(slots=True)
class _NextEmbeddings:
    given: mx.array | None = None  # in an object of its own, or it would be one of the module's weights


@functools.cache
def _embedding_images(kind: Any) -> type[Any]:
    def call(self: Any, tokens: mx.array) -> Any:
        given, self.next_embeddings.given = self.next_embeddings.given, None
        return kind.__call__(self, tokens) if given is None else given

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@functools.cache
def _adding(kind: Any) -> type[Any]:
    def call(self: Any, hidden: mx.array, mask: Any = None, cache: Any = None) -> Any:
        output = kind.__call__(self, hidden, mask, cache)
        if isinstance(cache, PackedLayer) and cache.added is not None:
            output = output + cache.added
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
