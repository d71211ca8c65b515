"""The memory that images take: while they wait to be seen, while they are, and what is remembered of them.

A prepared image is several times as large as its pixels, and requests wait with theirs. All that wait are counted, and
no more are prepared than may be: who sends them is told to come back. What a vision tower needs while it runs is
measured when the model is loaded.

What a tower has made of images is cached by their digests, the least recently used dropped first: the next turn of a
conversation shows the same images again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.memory import format_bytes
from mlx_backend.engine.kv_cache_budget import RETRY_AFTER
from mlx_backend.errors import EngineBusy, EngineRefused
from mlx_backend.images import Picture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.images import PreparedImage

MEASURED_SIDES = (224, 448)
"""Sides of the pictures that are seen to measure, in pixels."""
MAX_SHARE = 0.25
"""Share of the memory that the model leaves, for all prepared images."""


class PreparedImages:
    """Counts the bytes of the prepared images that exist. Safe to use from any thread.

    `room` says how many bytes the model leaves, of which they may have a share.
    """

    def __init__(self) -> None:
        self.room: Callable[[], int] = lambda: sys.maxsize
        self._guard = threading.Lock()
        self._counted = 0
        # A finalizer may run in the middle of anything, of this thread's own work with the lock too.
        self._gone: deque[int] = deque()

    @property
    def nbytes(self) -> int:
        """The bytes of all that exist."""
        with self._guard:
            return self._count()

    def add(self, image: PreparedImage, others: int = 0) -> None:
        """Count an image for as long as it exists; `others` are the bytes of the same request's other images.

        Raises EngineRefused if there is never room for it, EngineBusy if there is none now.
        """
        nbytes, max_bytes = image.nbytes, max(0, int(self.room() * MAX_SHARE))
        if nbytes > max_bytes:
            raise EngineRefused(
                f"The image takes {format_bytes(nbytes)} of memory as this model sees it; {format_bytes(max_bytes)} "
                "are left for images. Send it smaller, or with the detail low.",
                "images",
            )
        if others + nbytes > max_bytes:
            raise EngineRefused(
                f"The request's images take more than {format_bytes(max_bytes)} of memory as this model sees them, "
                "which is all that is left for images. Send fewer, or smaller, or with the detail low.",
                "images",
            )
        with self._guard:
            counted = self._count()
            if counted + nbytes <= max_bytes:
                self._counted += nbytes
                weakref.finalize(image, self._gone.append, nbytes).atexit = False
                return
        raise EngineBusy(
            f"The images that wait to be seen by this model take {format_bytes(counted)} of memory, and one more of "
            f"{format_bytes(nbytes)} does not fit into the {format_bytes(max_bytes)} for them. Send fewer or smaller "
            f"images at once, or try again in {RETRY_AFTER} s.",
            RETRY_AFTER,
        )

    def _count(self) -> int:
        while self._gone:
            self._counted -= self._gone.popleft()
        return self._counted


@dataclass(frozen=True, slots=True)
class TowerCost:
    """What a vision tower needs in addition to its weights for an image.

    Those are bytes `per_byte` of the prepared image, and `per_pair` of these: attention that is computed in one kernel
    needs none of the latter.
    """

    per_byte: float = 0.0
    per_pair: float = 0.0

    @classmethod
    def of(cls, measured: Sequence[tuple[int, int]]) -> TowerCost:
        """Fit it to a small and a large image: each one's bytes, and what it took."""
        (small, for_small), (large, for_large) = measured
        per_pair = 0.0
        if large > small:
            per_pair = max(0.0, (for_large / large - for_small / small) / (large - small))
        return cls(max(0.0, for_large / large - per_pair * large), per_pair)

    @classmethod
    def measured(
        cls, prepare: Callable[[Picture], PreparedImage], see: Callable[[PreparedImage], object]
    ) -> TowerCost:
        """See two pictures that show nothing, to know what others will take. Raises what that does."""
        taken = []
        for side in MEASURED_SIDES:
            image = prepare(Picture(side, side, bytes(3 * side * side)))
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            see(image)
            taken.append((image.nbytes, max(0, mx.get_peak_memory() - before)))
        return cls.of(taken)

    def working_bytes(self, image: PreparedImage) -> int:
        """Return the bytes that are needed while an image is seen."""
        return int(image.nbytes * (self.per_byte + self.per_pair * image.nbytes))


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
        """Drop features until the others take no more than `nbytes`."""
        while self.nbytes > max(0, nbytes):
            _, dropped = self._features.popitem(last=False)
            self.nbytes -= dropped.nbytes
