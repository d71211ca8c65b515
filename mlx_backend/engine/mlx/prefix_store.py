"""What is kept of prompts and replies, in memory and on disk, and found again where a prompt begins alike.

When something is to be kept is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.engine.mlx.kv_cache import compact_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefill_plan import PrefillJob
    from mlx_backend.engine.mlx.prefix_cache import PrefixCache
    from mlx_backend.engine.mlx.sequences import DecodingSequence


class PrefixStore:
    """The prefixes that are kept. They get the room that nobody has set aside, and give it up when asked to."""

    def __init__(
        self,
        prefixes: PrefixCache,
        disk: DiskCheckpoints | None,
        cache_budget: KVCacheBudget,
        on_disk: str = "",
    ) -> None:
        self._prefixes = prefixes
        self._disk = disk
        self._cache_budget = cache_budget
        self._on_disk = on_disk  # the space whose prefixes are kept there
        self._reads_ahead = False

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._prefixes.enabled or self._disk is not None

    def covered_tokens(self, sequence: DecodingSequence) -> int:
        """Return how many tokens of a prompt need not be read, as far as memory knows; it counts as no use."""
        return self._prefixes.covered_tokens(sequence.tokens, sequence.adapter)

    def find(self, sequence: DecodingSequence, most: int) -> tuple[int, LayerCaches | None]:
        """Find the longest prefix that is known, of `most` tokens at most, and caches that may be written to."""
        known, layers = self._prefixes.find_longest(sequence.tokens[:most], sequence.adapter)
        if self._disk is not None and sequence.adapter == self._on_disk:
            stored = self._disk.find_longest(sequence.tokens[:most], beyond=known)
            if stored is not None and (read := self._disk.read(stored)) is not None:
                known, layers = stored.length, read
                self._prefixes.keep(sequence.tokens[:known], layers, sequence.adapter)
        return known, layers

    def keep(
        self, sequence: DecodingSequence, tokens: Sequence[int], layers: LayerCaches, *, persist: bool = False
    ) -> None:
        """Keep caches as they are now, on disk too if they are to `persist`."""
        if not self.enabled:
            return
        self._prefixes.keep(tokens, layers, sequence.adapter)
        self.evict_to_fit()
        if not persist or self._disk is None or sequence.adapter != self._on_disk or self._disk.has(tokens):
            return
        layers = compact_copies(layers)
        mx.eval([layer.state for layer in layers])  # another thread writes them
        self._disk.write(tokens, layers)

    def store_checkpoint(self, job: PrefillJob, boundary: int, layers: LayerCaches) -> None:
        """Keep a checkpoint of a prompt."""
        sequence = job.sequence
        self.keep(
            sequence, sequence.tokens[:boundary], layers, persist=self._outlives(sequence.request, boundary)
        )

    def evict_to_fit(self) -> None:
        """Give up what does not fit beside what has been set aside."""
        self._prefixes.evict_to(max(0, self._cache_budget.room - self._cache_budget.used))

    def report_usage(self) -> None:
        """Tell the budget how much the cached prefixes take."""
        self._cache_budget.set_prefix_bytes(self._prefixes.nbytes)

    def _outlives(self, request: GenerationRequest, position: int) -> bool:
        """Whether a checkpoint is worth a place on disk: what others begin with, and what is likely to come.

        Where nothing is read ahead, the end of a prompt's history has to do for the latter.
        """
        if request.max_tokens == 0:
            self._reads_ahead = True
            return True
        return position in (request.checkpoints[:1] if self._reads_ahead else request.checkpoints)
