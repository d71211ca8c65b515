"""Prompts and replies in one run of the network, without padding, one behind the other as if they were one text.

All of a network but its attention looks at one token at a time. So tokens of several texts, each with caches of
its own, can be one row, and only attention has to be told whose is whose: tokens are rotated by their places in
their own texts, and attention is computed for each text by itself, just as it would be alone. A run costs what its
tokens cost, and the weights, which take most of the time when the tokens are few, are fetched once for all.

Replies alone are run so too: for MLX's CUDA kernels the tokens of one row are one matrix and rows are many (32 of
them: 38 ms a step in place of 49, gpt-oss-20b's shapes on an H200).

mlx-lm's networks rotate with a few classes and attend with one function. Where that holds (`packs` tries it), these
are replaced by some that know the places and caches of this module when they see them, and do the same as before
with all others. Knows nothing of requests.
"""

from __future__ import annotations

import functools
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, rope_utils

from mlx_backend.engine.mlx.kv_cache import alias, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches

log = logging.getLogger(__name__)

NAME = "scaled_dot_product_attention"
SAME = 0.03  # how far logits may lie apart, as a part of their size, and still be taken for the same


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow what `layers` hold: a prompt's next piece ([1, length]), or one of every reply ([rows, 1])."""

    tokens: mx.array
    layers: LayerCaches


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where each token stands in its own text ([tokens])."""

    of_tokens: mx.array


class PackedLayer:
    """Stands for one layer's caches of all parts, in the order of their tokens."""

    def __init__(
        self, caches: Sequence[Any], shapes: Sequence[tuple[int, int]], places: TokenPositions
    ) -> None:
        self.offset = places
        self.shapes = shapes  # of the parts: rows, and tokens of each
        self._caches = caches

    def make_mask(self, _: int, **named: Any) -> list[Any]:
        """Return each part's own mask, which the network only passes on."""
        return [
            cache.make_mask(length, **named)
            for cache, (_, length) in zip(self._caches, self.shapes, strict=True)
        ]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Give every part its own keys and values, and return those of its whole text."""
        fetched = [
            cache.update_and_fetch(*pair)
            for cache, pair in zip(
                self._caches, zip(self._own(keys), self._own(values), strict=True), strict=True
            )
        ]
        return [pair[0] for pair in fetched], [pair[1] for pair in fetched]

    def attend(
        self,
        attention: Callable[..., mx.array],
        queries: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        scale: float,
        mask: list[Any],
        sinks: mx.array | None,
    ) -> mx.array:
        """Compute every part's attention by itself."""
        parts = zip(self._own(queries), keys, values, self._caches, mask, strict=True)
        found = [attention(q, k, v, cache, scale, own, sinks) for q, k, v, cache, own in parts]
        return mx.concatenate([_packed(each) for each in found], axis=2)

    def _own(self, heads: mx.array) -> list[mx.array]:
        """Take [1, heads, tokens, size] apart, into [rows, heads, length, size] for every part."""
        parts, start = [], 0
        for rows, length in self.shapes:
            part = heads[:, :, start : start + rows * length]
            parts.append(part.swapaxes(0, 2) if rows > 1 else part)
            start += rows * length
        return parts


class ForwardError(Exception):
    """What the network raised, which is the cause. If there were several parts, their caches are as they were."""


def run(network: Any, parts: Sequence[Segment]) -> mx.array:
    """Run all parts through the network at once; return the logits of all their tokens ([tokens, vocabulary]).

    Nothing is computed yet. Raises NotRun.
    """
    if len(parts) == 1 and parts[0].tokens.shape[0] == 1:
        return _called(network, parts[0].tokens, parts[0].layers)
    shapes = [(part.tokens.shape[0], part.tokens.shape[1]) for part in parts]
    places = TokenPositions(mx.concatenate([_places(part) for part in parts]))
    caches = zip(*(part.layers for part in parts), strict=True)
    layers = [PackedLayer(each, shapes, places) for each in caches]
    tokens = mx.concatenate([part.tokens.reshape(-1) for part in parts])
    before = [[alias(layer) for layer in part.layers] for part in parts] if len(parts) > 1 else []
    try:
        return _called(network, tokens[None], layers)
    except ForwardError:
        for part, aliases in zip(parts, before, strict=False):
            part.layers[:] = aliases
        raise


def can_pack(network: Any, fresh: Callable[[], LayerCaches]) -> bool:
    """Prepare a network for packed runs, and try one: whether it says what the network says of each part alone."""
    texts = mx.array([[1, 2, 3, 4]]), mx.array([[5, 3]]), mx.array([[2, 6, 1]])
    nexts = mx.array([[4], [7]])
    try:
        _prepare(network)
        alone = [fresh() for _ in texts]
        expected = [network(text, cache=layers) for text, layers in zip(texts, alone, strict=True)]
        expected.append(network(nexts, cache=merged(alone[:2])))
        own = [fresh() for _ in texts]
        first = run(network, [Segment(*pair) for pair in zip(texts[:2], own[:2], strict=True)])
        second = run(network, [Segment(nexts, merged(own[:2])), Segment(texts[2], own[2])])
        count = nexts.shape[0]
        found = mx.concatenate([first, second[count:], second[:count]])
    except Exception as error:  # it is no reason not to serve the network, one text after the other
        log.debug("This network cannot be run packed: %r", error.__cause__ or error)
        return False
    wanted = mx.concatenate([each.reshape(-1, each.shape[-1]) for each in expected]).astype(mx.float32)
    apart = mx.linalg.norm(found.astype(mx.float32) - wanted) / mx.linalg.norm(wanted)
    log.debug("Packed runs are %.2g from single ones.", apart.item())
    return bool((apart <= SAME).item())


def _called(network: Any, tokens: mx.array, layers: Sequence[Any]) -> mx.array:
    try:
        logits: mx.array = network(tokens, cache=layers)
    except Exception as error:
        raise ForwardError from error
    return logits[0]


def _prepare(network: Any) -> None:
    modules = network.modules()
    for module in modules:
        if type(module) in _PACKABLE:
            module.__class__ = _PACKABLE[type(module)]
    for name in {type(module).__module__ for module in modules}:
        module = sys.modules[name]
        if getattr(module, NAME, None) is base.scaled_dot_product_attention:
            setattr(module, NAME, _attention)


def _packable(rotation: type[Any]) -> type[Any]:
    def call(self: Any, heads: mx.array, offset: Any = 0, **named: Any) -> Any:
        if isinstance(offset, TokenPositions):
            return rotation.__call__(self, heads.swapaxes(0, 2), offset=offset.of_tokens, **named).swapaxes(
                0, 2
            )
        return rotation.__call__(self, heads, offset=offset, **named)

    return type(rotation.__name__, (rotation,), {"__call__": call, "__module__": rotation.__module__})


_PACKABLE = {
    rotation: _packable(rotation)
    for rotation in (
        nn.RoPE,
        rope_utils.Llama3RoPE,
        rope_utils.ProportionalRoPE,
        rope_utils.SuScaledRoPE,
        rope_utils.YarnRoPE,
    )
}


@functools.wraps(base.scaled_dot_product_attention)
def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    attend = base.scaled_dot_product_attention
    if isinstance(cache, PackedLayer):
        return cache.attend(attend, queries, keys, values, scale, mask, sinks)
    attended: mx.array = attend(queries, keys, values, cache, scale, mask, sinks)
    return attended


def _places(part: Segment) -> mx.array:
    rows, length = part.tokens.shape
    begin = mx.broadcast_to(mx.array(part.layers[0].offset), (rows,))
    return (begin[:, None] + mx.arange(length)).reshape(-1)


def _packed(heads: mx.array) -> mx.array:
    """Turn [rows, heads, length, size], of a part, into [1, heads, rows x length, size]."""
    return heads.swapaxes(0, 2) if heads.shape[0] > 1 else heads
