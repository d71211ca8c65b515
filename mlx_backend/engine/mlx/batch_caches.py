"""The KV caches of the sequences of a decoder: short ones are merged into one batch's, long ones stay by themselves.

Merged caches are fastest while there is little in them: a layer takes one operation for all rows. But every row is
padded to the longest, attention then needs a mask, for which devices have slower kernels, and whenever a row joins or
leaves, all of them are copied. All of that grows with the longest row: four rows of 100,000 tokens took 26.7 ms a step
on an H200, and one alone 3.6. So a row of more than `max_merged_length` tokens keeps its own caches, on which it is
decoded as it would be alone (packed_forward.py), and the others are never padded to its length. A sequence alone always
has its own.

Caches of their own can also take any number of tokens, and give back those that are rejected, each sequence by itself:
so drafts need them. Knows nothing of networks or sampling.

mlx-lm's caches may refuse to be merged, extended, filtered or taken apart, and have changed some layers by then. After
an exception, of whatever kind, these are not to be used any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.engine.mlx.kv_cache import extract_row, merged, select_rows
from mlx_backend.engine.mlx.mlx_lm_patches.sliding_windows import RewindableRotatingKVCache
from mlx_backend.engine.mlx.packed_forward import Segment, shift_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches

MAX_MERGED_LENGTH = 4096
"""Tokens of a row up to which it is merged, unless a network runs much slower on several caches (batch_trial.py)."""


class BatchCaches:
    """The caches of several sequences, by row: the sequences' order in their decoder.

    Without a `max_merged_length` all are merged, and with 0 none. Lengths are those of all rows, in tokens.
    """

    def __init__(self, *, max_merged_length: int | None = None) -> None:
        self._own: list[LayerCaches | None] = []  # by row; None: its caches are merged
        self._merged: LayerCaches | None = None
        self._merged_rows: list[int] = []  # in the order in which the merged caches hold them
        self._max_merged_length = max_merged_length

    @property
    def is_merged(self) -> bool:
        """Whether any rows are in one batch's caches."""
        return self._merged is not None

    def add(self, caches: Sequence[LayerCaches]) -> None:
        """Add rows, which have caches of their own until they are merged."""
        self._own += caches

    def merge(self, lengths: Sequence[int]) -> None:
        """Merge the caches of the rows that are short enough, if there are several."""
        self.separate_long(lengths)
        joining = {
            row: own
            for row, own in enumerate(self._own)
            if own is not None and not self._is_long(lengths[row])
        }
        if not joining or len(self._merged_rows) + len(joining) < 2:
            return
        together = merged(list(joining.values()))
        if self._merged is None:
            self._merged = together
        else:
            for ours, theirs in zip(self._merged, together, strict=True):
                ours.extend(theirs)
        self._merged_rows += joining
        for row in joining:
            self._own[row] = None

    def separate(self) -> None:
        """Give each row caches of its own."""
        self._separate(self._merged_rows)

    def separate_long(self, lengths: Sequence[int]) -> None:
        """Give rows that have become too long to be merged caches of their own."""
        if long := [row for row in self._merged_rows if self._is_long(lengths[row])]:
            self._separate(long)

    def extract(self, row: int) -> LayerCaches:
        """Return the caches of a row, of the model's own kind."""
        own = self._own[row]
        if own is not None:
            return own
        assert self._merged is not None
        return extract_row(self._merged, self._merged_rows.index(row))

    def own(self, row: int) -> LayerCaches:
        """Return the caches of a row, and give each row its own before."""
        self.separate()
        return self.extract(row)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep some rows, in ascending order."""
        self._keep_merged(rows)
        self._own = [self._own[row] for row in rows]
        new = {row: at for at, row in enumerate(rows)}
        self._merged_rows = [new[row] for row in self._merged_rows]

    def segments(self, tokens: mx.array, shifts: Sequence[int] = ()) -> list[Segment]:
        """Return what runs one token of each row ([rows]); `positions` says in which order.

        `shifts` are added to the rows' positions.
        """
        return [
            Segment(
                _pick(tokens, rows)[:, None], layers, shift=shift_of([shifts[row] for row in rows if shifts])
            )
            for rows, layers in self._groups()
        ]

    def positions(self) -> list[int]:
        """Return which of the tokens that `segments` run, in their order, is that of each row."""
        order = [row for rows, _ in self._groups() for row in rows]
        return sorted(range(len(order)), key=order.__getitem__)

    def rewindable_segment(self, row: int, tokens: mx.array, shift: int = 0) -> Segment:
        """Return what runs tokens ([length]) of a row that has its own caches; all but the first can be taken back."""
        layers = [RewindableRotatingKVCache.of(layer) for layer in self.extract(row)]
        self._own[row] = layers
        return Segment(tokens[None], layers, shift=shift_of([shift]))

    def _is_long(self, length: int) -> bool:
        return self._max_merged_length is not None and length > self._max_merged_length

    def _separate(self, rows: Sequence[int]) -> None:
        own = {row: self.extract(row) for row in rows}
        self._keep_merged([row for row in self._merged_rows if row not in own])
        for row, layers in own.items():
            self._own[row] = layers

    def _keep_merged(self, rows: Sequence[int]) -> None:
        """Keep some of the rows that are merged; one alone gets caches of its own."""
        kept = set(rows)
        staying = [at for at, row in enumerate(self._merged_rows) if row in kept]
        if self._merged is None or len(staying) == len(self._merged_rows):
            return
        if len(staying) > 1:
            self._merged = select_rows(staying, self._merged)
            self._merged_rows = [self._merged_rows[at] for at in staying]
        else:
            for row in (self._merged_rows[at] for at in staying):
                self._own[row] = self.extract(row)
            self._merged, self._merged_rows = None, []

    def _groups(self) -> list[tuple[list[int], LayerCaches]]:
        """Return the caches, each with its rows, so that rows that are merged side by side run in their order."""
        groups = [([row], layers) for row, layers in enumerate(self._own) if layers is not None]
        if self._merged is not None:
            groups.append((self._merged_rows, self._merged))
        return sorted(groups, key=lambda group: group[0][0])


def _pick(tokens: mx.array, rows: Sequence[int]) -> mx.array:
    start, end = rows[0], rows[0] + len(rows)
    if list(rows) == list(range(start, end)):
        return tokens if len(rows) == tokens.size else tokens[start:end]
    return tokens[mx.array(list(rows))]
