"""What is kept of prompts and replies, in memory and on disk, and found again where a prompt begins alike.

When something is to be kept is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.engine.mlx.kv_cache import trimmed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.device.memory import Ledger
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.kv_cache import Layers
    from mlx_backend.engine.mlx.prefill_plan import Reading
    from mlx_backend.engine.mlx.prefix_cache import PrefixCache
    from mlx_backend.engine.mlx.sequences import Row


class Keeping:
    """The prefixes that are kept. They get the room that nobody has set aside, and give it up when asked to."""

    def __init__(
        self, prefixes: PrefixCache, disk: DiskCheckpoints | None, ledger: Ledger, on_disk: str = ""
    ) -> None:
        self._prefixes = prefixes
        self._disk = disk
        self._ledger = ledger
        self._on_disk = on_disk  # the space whose prefixes are kept there
        self._reads_ahead = False

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._prefixes.enabled or self._disk is not None

    def covered(self, row: Row) -> int:
        """Return how many tokens of a prompt need not be read, as far as memory knows; it counts as no use."""
        return self._prefixes.covered(row.tokens, row.space)

    def find(self, row: Row, most: int) -> tuple[int, Layers | None]:
        """Find the longest prefix that is known, of `most` tokens at most, and caches that may be written to."""
        known, layers = self._prefixes.longest(row.tokens[:most], row.space)
        if self._disk is not None and row.space == self._on_disk:
            stored = self._disk.longest(row.tokens[:most], beyond=known)
            if stored is not None and (read := self._disk.read(stored)) is not None:
                known, layers = stored.length, read
                self._prefixes.keep(row.tokens[:known], layers, row.space)
        return known, layers

    def keep(self, row: Row, tokens: Sequence[int], layers: Layers, *, persist: bool = False) -> None:
        """Keep caches as they are now, on disk too if they are to `persist`."""
        if not self.enabled:
            return
        self._prefixes.keep(tokens, layers, row.space)
        self.make_room()
        if not persist or self._disk is None or row.space != self._on_disk or self._disk.has(tokens):
            return
        layers = trimmed(layers)
        mx.eval([layer.state for layer in layers])  # another thread writes them
        self._disk.write(tokens, layers)

    def keep_read(self, reading: Reading, mark: int, layers: Layers) -> None:
        """Keep a checkpoint of a prompt."""
        row = reading.row
        self.keep(row, row.tokens[:mark], layers, persist=self._outlives(row.request, mark))

    def make_room(self) -> None:
        """Give up what does not fit beside what has been set aside."""
        self._prefixes.shrink(max(0, self._ledger.room - self._ledger.used))

    def declare(self) -> None:
        """Tell the ledger how much is kept."""
        self._ledger.keeps(self._prefixes.nbytes)

    def _outlives(self, request: GenerationRequest, position: int) -> bool:
        """Whether a checkpoint is worth a place on disk: what others begin with, and what is likely to come.

        Where nothing is read ahead, the end of a prompt's history has to do for the latter.
        """
        if request.max_tokens == 0:
            self._reads_ahead = True
            return True
        return position in (request.checkpoints[:1] if self._reads_ahead else request.checkpoints)
