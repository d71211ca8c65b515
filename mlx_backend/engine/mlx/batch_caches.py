"""The KV caches of the sequences of a decoder: each sequence has its own, or all are merged into one batch's.

Merged caches are fastest while every sequence gets one token in a step. Caches of their own can take any number of
tokens, and give back those that are rejected, each sequence by itself: so drafts need them. A sequence alone always
has its own. Knows nothing of networks or sampling.

mlx-lm's caches may refuse to be merged, extended, filtered or taken apart, and have changed some layers by then. So
these change all layers or, with a CacheError, none.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.kv_cache import alias, extract_row, merged, select_rows
from mlx_backend.engine.mlx.mlx_lm_patches import RewindableRotatingKVCache
from mlx_backend.engine.mlx.packed_forward import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    import mlx.core as mx

    from mlx_backend.engine.mlx.kv_cache import LayerCaches


class CacheError(Exception):
    """A cache raised the cause when rows were put together or taken apart. All are as they were."""


class BatchCaches:
    """The caches of several sequences, by row: the sequences' order in their decoder."""

    def __init__(self, own: Sequence[LayerCaches] = ()) -> None:
        self._own = list(own)  # of each row; empty while they are merged
        self._merged: LayerCaches | None = None
        self._num_rows = len(self._own)

    @property
    def is_merged(self) -> bool:
        """Whether all rows are in one batch's caches."""
        return self._merged is not None

    def copy(self) -> Self:
        """Return caches with the same contents that stay as they are whatever is done with these."""
        twin = type(self)([[alias(layer) for layer in layers] for layers in self._own])
        if self._merged is not None:
            twin._merged = [alias(layer) for layer in self._merged]
        twin._num_rows = self._num_rows
        return twin

    def join(self, caches: Sequence[LayerCaches], *, merge: bool) -> None:
        """Add rows. Without `merge` all rows have caches of their own afterwards. Raises CacheError."""
        if not merge:
            self.separate()
        with _cause():
            if self._merged is not None:
                extended = [alias(layer) for layer in self._merged]
                for ours, theirs in zip(extended, merged(caches), strict=True):
                    ours.extend(theirs)
                self._merged = extended
            elif merge and self._num_rows + len(caches) > 1:
                self._merged, self._own = merged([*self._own, *caches]), []
            else:
                self._own += caches
        self._num_rows += len(caches)

    def merge(self) -> None:
        """Merge the rows' own caches, if there are several. Raises CacheError."""
        if len(self._own) > 1:
            with _cause():
                self._merged, self._own = merged(self._own), []

    def separate(self) -> None:
        """Give each row caches of its own. Raises CacheError."""
        if self._merged is not None:
            self._own = [self.extract(row) for row in range(self._num_rows)]
            self._merged = None

    def extract(self, row: int) -> LayerCaches:
        """Return the caches of a row, of the model's own kind. Raises CacheError."""
        if self._merged is None:
            return self._own[row]
        with _cause():
            return extract_row(self._merged, row)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some rows. Raises CacheError."""
        if self._merged is None:
            self._own = [self._own[row] for row in rows]
        elif not rows:
            self._merged = None
        elif len(rows) == 1:
            self._own, self._merged = [self.extract(rows[0])], None
        else:
            with _cause():
                self._merged = select_rows(rows, [alias(layer) for layer in self._merged])
        self._num_rows = len(rows)

    def segments(self, tokens: mx.array) -> list[Segment]:
        """Return what runs one token of each row ([rows])."""
        if self._merged is not None:
            return [Segment(tokens[:, None], self._merged)]
        return [Segment(tokens[row : row + 1][None], layers) for row, layers in enumerate(self._own)]

    def rewindable_segment(self, row: int, tokens: mx.array) -> Segment:
        """Return what runs tokens ([length]) of a row that has its own caches; `rewind` can take back all but one."""
        self._own[row] = [RewindableRotatingKVCache.of(layer) for layer in self._own[row]]
        return Segment(tokens[None], self._own[row])

    def rewind(self, row: int, count: int) -> None:
        """Take back the last tokens of a row."""
        for layer in self._own[row] if count else ():
            layer.trim(count)


@contextmanager
def _cause() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CacheError from error
