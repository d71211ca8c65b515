"""What vision towers have made of images, by their digests: the least recently used are dropped first.

The next turn of a conversation shows the same images again, and often finds them here. Belongs to the engine's thread,
but whether an image is here may be asked from any.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

MAX_BYTES = 256 << 20


class FeatureCache:
    """The features of images, as long as they fit into `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._features: OrderedDict[bytes, mx.array] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._features

    def find(self, digest: bytes) -> mx.array | None:
        """Return the features of an image, which count as used; None if they are not here."""
        found = self._features.get(digest)
        if found is not None:
            self._features.move_to_end(digest)
        return found

    def put(self, digest: bytes, features: mx.array) -> None:
        """Hold the features of an image, which must not be here yet."""
        self._features[digest] = features
        self.nbytes += features.nbytes
        self.evict_to(self._max_bytes)

    def evict_to(self, nbytes: int) -> None:
        """Drop features until the others take no more than so many bytes."""
        while self.nbytes > max(0, nbytes):
            _, dropped = self._features.popitem(last=False)
            self.nbytes -= dropped.nbytes
