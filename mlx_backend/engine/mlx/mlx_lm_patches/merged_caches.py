"""Caches of several rows, from which one is taken without waiting for the device.

mlx-lm keeps the rows' padding and lengths in arrays that every step changes. To take a row out, or to drop rows, its
`BatchKVCache` and `BatchRotatingKVCache` read them back, and so wait for the step that is being computed: once for
every layer, whenever a reply ends. But all of it follows from the lengths that the rows had when they were merged,
which are plain numbers. Subclasses know these. They use `_idx`, `_offset`, `rotated` and `_temporal_order`, and
replace `merge` of one row, which mlx-lm first copies into a batch of one, `filter` and `extract`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache, SharedArrays

if TYPE_CHECKING:
    from collections.abc import Sequence


class MergedKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """The caches of several rows. Each row ends where all do, and begins after its padding."""

    keys: Any
    values: Any
    offset: mx.array
    left_padding: mx.array

    def __init__(self, left_padding: Sequence[int]) -> None:
        super().__init__(list(left_padding))
        self._paddings = list(left_padding)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return the caches of several sequences as one batch's, in their order."""
        [first, *others] = caches
        if all(each.empty() for each in caches):
            return cls([0] * len(caches))
        if others:
            merged: Self = super().merge(caches)
            return merged
        alone = cls([0])
        alone.keys, alone.values = first.keys[..., : first.offset, :], first.values[..., : first.offset, :]
        alone.offset = mx.array([first.offset])
        alone._idx = first.offset
        return alone

    def extend(self, other: Any) -> None:
        """Add the rows of another."""
        end = max(self._idx, other._idx)
        paddings = [each + end - rows._idx for rows in (self, other) for each in rows._paddings]
        super().extend(other)
        self._paddings = paddings

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep some rows, and of their padding what the longest does not need."""
        rows = list(batch_indices)
        paddings = [self._paddings[row] for row in rows]
        shift = min(paddings)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
        if shift:
            if self.keys is not None:
                self.keys, self.values = self.keys[..., shift:, :], self.values[..., shift:, :]
            self.left_padding = self.left_padding - shift
            self._idx -= shift
        self._paddings = [each - shift for each in paddings]

    def extract(self, idx: int) -> Any:
        """Return a row's cache, of the model's own kind."""
        if self.keys is None:
            return GrowingKVCache()
        arrays = SharedArrays(_row(self, idx, self._paddings[idx], self._idx))
        return GrowingKVCache(arrays, self._idx - self._paddings[idx])


class MergedRotatingKVCache(BatchRotatingKVCache):  # type: ignore[misc]  # as above
    """The sliding windows of several rows."""

    keys: Any
    values: Any

    def __init__(self, max_size: int, left_padding: Sequence[int]) -> None:
        super().__init__(max_size, list(left_padding))
        # How many tokens each row has had more than `_offset` counts, which every step adds to.
        self._ahead = [-each for each in left_padding]

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return the caches of several sequences as one batch's, in their order."""
        [first, *others] = caches
        if all(each.empty() for each in caches):
            return cls(first.max_size, [0] * len(caches))
        merged: Self
        if others:
            merged = super().merge(caches)
        else:
            merged, length = cls(first.max_size, [0]), first.size()
            merged.keys = first._temporal_order(first.keys)[..., -length:, :]
            merged.values = first._temporal_order(first.values)[..., -length:, :]
            merged.offset = mx.array([first.offset])
            merged._idx = merged._offset = length
        merged._ahead = [each.offset - merged._offset for each in caches]
        return merged

    def extend(self, other: Any) -> None:
        """Add the rows of another."""
        offsets = [rows._offset + each for rows in (self, other) for each in rows._ahead]
        super().extend(other)
        self._ahead = [each - self._offset for each in offsets]

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep some rows."""
        super().filter(list(batch_indices))
        self._ahead = [self._ahead[row] for row in batch_indices]

    def extract(self, idx: int) -> Any:
        """Return a row's cache, of the model's own kind."""
        own = RotatingKVCache(self.max_size)
        if self.keys is None:
            return own
        own.offset = self._offset + self._ahead[idx]
        length = min(own.offset, self.max_size)
        if self.rotated:  # the token that is overwritten next is the oldest
            row = slice(idx, idx + 1)
            own.keys, own.values = (
                mx.contiguous(
                    mx.concatenate([each[row, :, self._idx :], each[row, :, : self._idx]], axis=2)[
                        :, :, self.max_size - length :
                    ]
                )
                for each in (self.keys, self.values)
            )
        else:
            own.keys, own.values = _row(self, idx, self._idx - length, self._idx)
        own._idx = length
        return own


def _row(rows: Any, index: int, start: int, end: int) -> list[mx.array]:
    """Return copies of a row's keys and values: slices would hold on to all rows."""
    return [mx.contiguous(each[index : index + 1, :, start:end]) for each in (rows.keys, rows.values)]


def merge_rows(caches: Sequence[Any]) -> Any:
    """Return one layer's caches of several sequences as one batch's, in their order."""
    match caches[0]:
        case KVCache():
            return MergedKVCache.merge(caches)
        case RotatingKVCache():
            return MergedRotatingKVCache.merge(caches)
    return caches[0].merge(list(caches))
