"""The images of one prompt: where chunks may end, what a chunk with images is run with, how prefixes are told apart.

Positions with rows and columns (mrope): text counts on by one, an image's places have the time of its first one and
their own row and column after it, and what follows goes on after the longest side. mlx-vlm has computed an image's.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from mlx_backend.engine.kv_cache_budget import NO_IMAGES, ImageBytes
from mlx_backend.engine.mlx.mlx_lm_patches.image_inputs import embedding_of
from mlx_backend.engine.mlx.packed_forward import ChunkImages, ForwardError, Segment, shift_of
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.images import PreparedImage, PromptImage
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.vision.image_memory import FeatureCache, TowerCost
    from mlx_backend.engine.mlx.vision.tower import Vision

# The bit of a word in a prefix's key that marks an image; token ids are below.
_IMAGE_BIT = 1 << 31
MIN_KEYED_PLACES = 4
"""An image with fewer places has fewer than 124 bits of its hash in a prefix's key: such a prefix is not cached."""


class PromptImages:
    """The images of one prompt, in their order; most prompts have none. Belongs to the engine's thread.

    `vision` may be None only if there are none.
    """

    def __init__(self, images: Sequence[PromptImage] = (), vision: Vision | None = None) -> None:
        self._images = images
        self._starts = [each.start for each in images]
        self._vision = cast("Vision", vision)  # asked only for images
        # What is made of images that are being prefilled, and of those that cannot be seen again.
        self._seen: dict[bytes, mx.array] = {
            each.image.digest: features
            for each in images
            if not each.image.can_be_seen
            and (features := self._vision.features.find(each.image.digest)) is not None
        }
        # By how much positions are less than the tokens' numbers after each image, and before the first.
        self._shifts = [0]
        for each in images:
            saved = each.image.written.shift if self._vision.traits.axes is not None else 0
            self._shifts.append(self._shifts[-1] + saved)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def shift(self) -> int:
        """What is added to a token's number to get its position, after all images."""
        return self._shifts[-1]

    def unseen(self, start: int, end: int) -> PreparedImage | None:
        """Return the first image between two positions that is not seen yet; let go of what is before them."""
        ahead = {each.image.digest for each in self._images if each.end > start}
        self._seen = {digest: features for digest, features in self._seen.items() if digest in ahead}
        for _, each, _, _ in self._within(start, end):
            digest = each.image.digest
            if digest not in self._seen:
                found = self._vision.features.find(digest)
                if found is None:
                    return each.image
                self._seen[digest] = found
        return None

    def see(self, image: PreparedImage) -> None:
        """See an image: its chunks can then be run."""
        self._seen[image.digest] = self._vision.see(image)

    def forget(self) -> None:
        """Let go of what was made of images."""
        self._seen = {}

    def seeing_bytes(self, start: int) -> int:
        """Return the working memory for seeing the largest of the images after a position that are not seen yet."""
        return max(
            (
                self._vision.cost.working_bytes(each.image)
                for each in self._images
                if each.end > start and each.image.digest not in self._seen
            ),
            default=0,
        )

    def whole_end(self, position: int) -> int:
        """Return where a chunk may end that was to end here: after an image that may not be cut."""
        image = self._around(position)
        return image.end if image is not None and self._vision.traits.attends_both_ways else position

    def can_store(self, position: int) -> bool:
        """Whether a prefix that ends here may be cached: not inside an image, and every image is told apart."""
        before = self._images[: bisect_right(self._starts, position - 1)]
        return self._around(position) is None and all(
            each.image.num_tokens >= MIN_KEYED_PLACES for each in before
        )

    def keyed(self, start: int, tokens: Sequence[int]) -> array[int]:
        """Return tokens from position `start` as prefixes are compared by: in an image's places stands its hash."""
        words = array("I", tokens)
        for _, each, first, last in self._within(start, start + len(tokens)):
            own = array("I", hashlib.shake_256(each.image.digest).digest(4 * each.image.num_tokens))
            for place in range(first, last):
                words[place - start] = own[place - each.start] | _IMAGE_BIT
        return words

    def segment(
        self, network: Any, tokens: Sequence[int], start: int, end: int, layers: LayerCaches
    ) -> Segment:
        """Return what runs the tokens from `start` to `end`, and some after them. Raises ForwardError."""
        array_of_tokens = mx.array([list(tokens)])
        if not any(True for _ in self._within(start, end)):
            shift = self._shifts[bisect_right(self._starts, start)]
            return Segment(array_of_tokens, layers, shift=shift_of([shift]))
        try:
            embeddings, *added = self._embeddings(network, array_of_tokens[0], start, end)
        except Exception as error:
            raise ForwardError from error
        traits = self._vision.traits
        if traits.reads_pads_as is not None:
            is_pad = array_of_tokens == self._vision.processor.pad_token
            array_of_tokens = mx.where(is_pad, traits.reads_pads_as, array_of_tokens)
        return Segment(
            array_of_tokens,
            layers,
            ChunkImages(
                embeddings,
                mx.array(self.positions(start, start + len(tokens))) if traits.axes is not None else None,
                traits.axes,
                mx.array(self._blocks(start, len(tokens))) if traits.attends_both_ways else None,
                mx.stack(added) if added else None,
                traits.both_ways_in_windows,
            ),
        )

    def positions(self, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the positions of tokens by time, row and column ([3, tokens])."""
        numbers = np.arange(start, end)
        shifts = np.array(self._shifts)[np.searchsorted(self._starts, numbers, side="right")]
        found = np.broadcast_to(numbers + shifts, (3, end - start)).astype(np.int32)
        for index, each, first, last in self._within(start, end):
            own = each.image.written.positions[:, first - each.start : last - each.start]
            found[:, first - start : last - start] = own + each.start + self._shifts[index]
        return found

    def _embeddings(self, network: Any, tokens: mx.array, start: int, end: int) -> mx.array:
        """Return the embeddings of tokens, and what is added to the outputs of layers ([1 + layers, tokens, width])."""
        embedded: mx.array = embedding_of(network)(tokens[None])
        within = self._within(start, end)
        layers = self._seen[within[0][1].image.digest].shape[0] - 1
        if layers:
            nothing = mx.zeros((layers, *embedded.shape[1:]), embedded.dtype)
            embedded = mx.concatenate([embedded, nothing])
        pieces, at = [], start
        for _, each, first, last in within:
            features = self._seen[each.image.digest][:, first - each.start : last - each.start]
            pieces += [embedded[:, at - start : first - start], features.astype(embedded.dtype)]
            at = last
        return mx.concatenate([*pieces, embedded[:, at - start :]], axis=1)

    def _blocks(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        blocks = np.full(count, -1, np.int32)
        for index, _, first, last in self._within(start, start + count):
            blocks[first - start : last - start] = index
        return blocks

    def _around(self, position: int) -> PromptImage | None:
        """Return the image that is cut by an end at this position."""
        at = bisect_right(self._starts, position - 1) - 1
        image = self._images[at] if at >= 0 else None
        return image if image is not None and image.start < position < image.end else None

    def _within(self, start: int, end: int) -> list[tuple[int, PromptImage, int, int]]:
        """Return the images with places from `start` to `end`: number, image, the first of these places, their end."""
        first = max(0, bisect_right(self._starts, start) - 1)
        found = []
        for index in range(first, len(self._images)):
            each = self._images[index]
            if each.start >= end:
                break
            if each.end > start:
                found.append((index, each, max(each.start, start), min(each.end, end)))
        return found


def check_images(
    request: GenerationRequest, cost: TowerCost | None, features: FeatureCache | None = None
) -> ImageBytes:
    """Return what a request's images need in addition to its caches.

    With `features`, what was made of images is cached there, and they are seen one after the other; without, all at
    once. Raises EngineRefused for images that cannot be seen here, or that do not stand where their pad tokens are.
    """
    if not request.images:
        return NO_IMAGES
    if cost is None:
        raise EngineRefused("This model cannot see images here.", "images")
    for before, after in pairwise(request.images):
        if before.end > after.start:
            raise EngineRefused("The images of a prompt overlap, or are not in order.", "images")
    for each in request.images:
        if not each.image.can_be_seen and (features is None or features.find(each.image.digest) is None):
            raise EngineRefused(
                "What was made of an image that was seen before is not kept any more.", "images"
            )
        places = request.prompt[each.start : each.end] if each.start >= 0 else ()
        if tuple(places) != each.image.written.tokens:
            raise EngineRefused(
                f"An image of {each.image.num_tokens} places does not stand on pad tokens at position {each.start}.",
                "images",
            )
    images = {id(each.image): each.image for each in request.images}.values()
    waiting = sum(each.nbytes for each in images)
    if features is None:
        return ImageBytes(waiting, sum(cost.working_bytes(each.image) for each in request.images))
    return ImageBytes(waiting, max(map(cost.working_bytes, images)))
