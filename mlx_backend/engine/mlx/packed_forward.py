"""Packed runs: prompt chunks and replies in one forward pass without padding, laid out as one row of tokens.

Everything in a network but attention and recurrence looks at one token at a time. So the tokens of several sequences,
each with caches of its own, can be one row, if those two know which token belongs to which sequence: tokens are rotated
by their positions in their own sequences, and attention and recurrence are computed for each sequence by itself, just
as they would be alone. A run costs what its tokens cost, and the weights, whose transfer from memory takes most of the
time when there are few tokens, are transferred once for all.

With CUDA replies without prompts are packed too: for MLX's kernels there the tokens of one row are one matrix and rows
are many (32 replies: 38 ms a step instead of 49; gpt-oss-20b's shapes on an H200). Elsewhere they run as rows of a
batch, which takes fewer operations (8 replies on a CPU: 0.9 of the processor time).

What this replaces in mlx-lm's networks is in mlx_lm_patches. Knows nothing of requests.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from mlx_backend.engine.mlx.kv_cache import alias, parts_of
from mlx_backend.engine.mlx.mlx_lm_patches.image_inputs import embedding_of, give_embeddings
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import LayerView, PackedLayer, TokenPositions, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """What a chunk that holds images is run with.

    `embeddings` are of all its tokens ([tokens, width]). `positions` are theirs by time, row and column ([3, tokens]),
    with the axis that each element of a head is rotated by ([size]); None: they count on as always. `blocks` has the
    number of the image that each token belongs to, -1 for text ([tokens]), where images attend in both directions; with
    `blocks_in_windows` they do so only in layers with a window. `added` is added to the outputs of the first layers
    ([layers, tokens, width]).
    """

    embeddings: mx.array
    positions: mx.array | None = None
    frequency_axes: mx.array | None = None
    blocks: mx.array | None = None
    added: mx.array | None = None
    blocks_in_windows: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow what `layers` hold: a prompt's next chunk ([1, length]), or one per reply ([rows, 1])."""

    tokens: mx.array
    layers: LayerCaches
    images: ChunkImages | None = None  # those among a chunk's tokens
    shift: mx.array | None = None  # what is added to the positions of each row's tokens ([rows])

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are embedded by their ids, and their positions count on from what precedes them."""
        return self.images is None and self.shift is None

    def after(self, tokens: Sequence[int]) -> Segment:
        """Return a segment of the same single row that runs other tokens first, and then its own."""
        first = mx.array([list(tokens)], dtype=self.tokens.dtype)
        return replace(self, tokens=mx.concatenate([first, self.tokens], axis=1))

    @property
    def has_to_be_packed(self) -> bool:
        """Whether its positions have rows and columns, or something is added to the outputs of layers."""
        images = self.images
        return images is not None and (images.positions is not None or images.added is not None)


def token_ids(rows: Sequence[Sequence[int]]) -> mx.array:
    """Return tokens as a network gets them ([rows, tokens]): of the type that sampled ones have.

    MLX's CUDA build compiles a kernel for each type by which embeddings are looked up.
    """
    return mx.array(rows, dtype=mx.uint32)  # type: ignore[arg-type]  # declared as lists of lists


def shift_of(rows: Sequence[int]) -> mx.array | None:
    """Return the `shift` of a segment with these rows; None if no row is shifted."""
    return mx.array(list(rows)) if any(rows) else None


class ForwardError(Exception):
    """The network raised its cause. Caches that are to be restored are as they were before."""


def run_packed(
    network: Any, segments: Sequence[Segment], *, restore: bool = True, single_queries: bool = False
) -> mx.array:
    """Run all segments through the network at once; return the logits of all their tokens ([tokens, vocabulary]).

    Does not wait for the computation. Raises ForwardError. To be able to `restore` the segments' caches then takes time
    in each layer of each, but nothing is copied for it. A single segment of one row also runs on a network that cannot
    be packed, unless it `has_to_be_packed`, and its layers may have states instead of keys and values.

    With `single_queries` the attention of a few tokens, as of drafts, is computed token by token (PackedLayer).
    """
    before: list[LayerCaches] = []
    try:
        if restore:
            before = [[alias(layer) for layer in segment.layers] for segment in segments]
        is_single = len(segments) == 1 and segments[0].tokens.shape[0] == 1
        if is_single and not segments[0].has_to_be_packed and not single_queries:
            logits = _forward(network, segments[0].tokens, _views(segments[0]), segments)
        else:
            logits = _run(network, segments, single_queries=single_queries)
    except Exception as error:
        for segment, aliases in zip(segments, before, strict=False):
            segment.layers[:] = aliases
        raise ForwardError from error
    return logits[0]


def _run(network: Any, segments: Sequence[Segment], *, single_queries: bool) -> mx.array:
    shapes = [(segment.tokens.shape[0], segment.tokens.shape[1]) for segment in segments]
    positions, added = _all_positions(segments), _added(segments)
    layers = [
        PackedLayer(
            each,
            shapes,
            positions,
            _blocks(segments, each),
            added.get(at),
            shifts=[segment.shift for segment in segments],
            single_queries=single_queries,
        )
        for at, each in enumerate(zip(*(segment.layers for segment in segments), strict=True))
    ]
    tokens = joined([segment.tokens.reshape(-1) for segment in segments])
    return _forward(network, tokens[None], layers, segments)


def run_rows(network: Any, replies: Segment) -> mx.array:
    """Run one token of each reply, as rows of a batch; return the next logits ([rows, vocabulary])."""
    logits: mx.array = network(replies.tokens, cache=_views(replies))
    return logits[:, -1]


def _views(segment: Segment) -> LayerCaches:
    """Return a segment's caches as its network has to see them."""
    if segment.is_plain:
        return segment.layers
    return [
        layer
        if isinstance(layer, ArraysCache)
        else LayerView(layer, segment.shift, *_blocks([segment], [layer]))
        for layer in segment.layers
    ]


def _blocks(segments: Sequence[Segment], caches: Sequence[Any]) -> list[mx.array | None]:
    """Return the segments' blocks for a layer, of which these are the caches."""
    found = list[mx.array | None]()
    for segment, cache in zip(segments, caches, strict=True):
        images = segment.images
        if images is None or (images.blocks_in_windows and not isinstance(cache, RotatingKVCache)):
            found.append(None)
        else:
            found.append(images.blocks)
    return found


def _forward(network: Any, tokens: mx.array, layers: Sequence[Any], segments: Sequence[Segment]) -> mx.array:
    embeddings = _embeddings(network, segments)
    if embeddings is not None:
        give_embeddings(network, embeddings)
    try:
        logits: mx.array = network(tokens.astype(mx.uint32), cache=layers)
    finally:
        if embeddings is not None:
            give_embeddings(network, None)  # else the next reply would be about these images
    return logits


def _positions(segment: Segment) -> mx.array:
    rows, length = segment.tokens.shape
    # A layer without attention has a state, or an empty cache, which say nothing of positions.
    parts = (part for layer in segment.layers for part in parts_of(layer))
    attending = [part for part in parts if not isinstance(part, ArraysCache)]
    layer = next((each for each in attending if not each.empty()), attending[0] if attending else None)
    offset = layer.offset if layer is not None else 0
    if length == 1 and isinstance(offset, mx.array) and offset.shape == (rows,):
        return copy(offset)  # the cache may change its own in place
    start = mx.broadcast_to(mx.array(offset), (rows,))
    return (start[:, None] + mx.arange(length)).reshape(-1)


def _all_positions(segments: Sequence[Segment]) -> TokenPositions:
    """Return the positions of all tokens; with rows and columns, if any image has them."""
    found, axes = [], None
    for segment in segments:
        images = segment.images
        if images is not None and images.positions is not None:
            found.append(images.positions)
            axes = images.frequency_axes
            continue
        positions = _positions(segment)
        if segment.shift is not None:
            positions = positions + mx.repeat(segment.shift, segment.tokens.shape[1])
        found.append(positions)
    if axes is not None:
        found = [each if each.ndim == 2 else mx.broadcast_to(each, (3, each.size)) for each in found]
    return TokenPositions(joined(found, axis=-1), axes)


def _embeddings(network: Any, segments: Sequence[Segment]) -> mx.array | None:
    """Return the embeddings of all tokens ([1, tokens, width]); None where the network can make them of the tokens."""
    if all(segment.images is None for segment in segments):
        return None
    embed = embedding_of(network)
    pieces = [
        segment.images.embeddings if segment.images is not None else embed(segment.tokens.reshape(1, -1))[0]
        for segment in segments
    ]
    # A copy: Gemma 3's network multiplies what it is given, in place.
    return mx.concatenate(pieces)[None] + 0


def _added(segments: Sequence[Segment]) -> dict[int, mx.array]:
    """Return what is added to the outputs of layers, by their numbers, for all tokens ([tokens, width])."""
    found = [segment.images.added if segment.images is not None else None for segment in segments]
    like = next((each for each in found if each is not None), None)
    if like is None:
        return {}
    count, _, width = like.shape
    pieces = [
        mx.zeros((count, segment.tokens.size, width), like.dtype) if each is None else each
        for segment, each in zip(segments, found, strict=True)
    ]
    return dict(enumerate(joined(pieces, axis=1)))
