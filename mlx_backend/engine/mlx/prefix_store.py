"""The prefix cache in memory and the checkpoints on disk, as one store that requests look their prompts up in.

Decides what is stored where and what has to be evicted; not when something is stored.

Nothing fails for want of a stored prefix: what cannot be copied, loaded or evicted is left out, and logged. Only where
other processes share the model it is an error, because they would still have what is missing here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.memory import format_bytes
from mlx_backend.engine.mlx.kv_cache import compact_copies, hidden_bytes, rewind_copies
from mlx_backend.engine.mlx.vision.features import FeatureCache

if TYPE_CHECKING:
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefill_plan import PrefillJob
    from mlx_backend.engine.mlx.prefix_cache import PrefixCache
    from mlx_backend.engine.mlx.sequences import DecodingSequence
    from mlx_backend.engine.mlx.vision.tower import Vision

log = logging.getLogger(__name__)

FEATURES_SHARE = 0.125  # of the room for prefixes, at most; a prefix spares more than an image's features


class PrefixStore:
    """Cached prefixes, and what `vision` has made of images. They get the memory that nothing has reserved.

    On disk are only the prefixes of `disk_adapter`, the adapter of requests that name none.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        disk: DiskCheckpoints | None,
        cache_budget: KVCacheBudget,
        disk_adapter: str = "",
        vision: Vision | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._features = vision.features if vision is not None else FeatureCache()
        self._disk = disk
        self._cache_budget = cache_budget
        self._disk_adapter = disk_adapter
        self._has_prewarmed = False
        self._has_noted_too_large = False
        self._sharing: dict[int, list[bytes]] = {}  # by sequence: prefixes that share arrays with its caches

    @property
    def enabled(self) -> bool:
        """Whether anything is ever stored."""
        return self._prefixes.enabled or self._disk is not None

    def covered_tokens(self, sequence: DecodingSequence) -> int:
        """Return how many tokens of a prompt are cached in memory; not counted as use."""
        tokens = sequence.packed(len(sequence.tokens))
        return self._prefixes.covered_tokens(tokens, sequence.adapter, cut=sequence.images is None)

    def find(self, sequence: DecodingSequence, max_tokens: int) -> tuple[int, LayerCaches | None]:
        """Find the longest stored prefix of at most `max_tokens` tokens: its length, and caches to continue on."""
        try:
            return self._find(sequence, max_tokens)
        except Exception as error:
            self._on_failure(error, "The stored prefixes of a prompt could not be used")
            return 0, None

    def _find(self, sequence: DecodingSequence, max_tokens: int) -> tuple[int, LayerCaches | None]:
        tokens = sequence.packed(max_tokens)
        is_text = sequence.images is None  # images may not be cut
        length, layers = self._prefixes.find_longest(tokens, sequence.adapter, cut=is_text)
        if self._disk is not None and sequence.adapter == self._disk_adapter:
            stored = self._disk.find_longest(tokens, beyond=length)
            if stored is not None and (loaded := self._disk.read(stored)) is not None:
                length, layers = stored.length, loaded
                self.store(sequence, length, loaded)
        if (
            length == len(sequence.tokens) and layers is not None
        ):  # a warm-up, of which nothing is left to prefill
            self.store(sequence, length, layers, persist=self._is_worth_disk(sequence.request, length))
        return length, layers

    def store(
        self,
        sequence: DecodingSequence,
        length: int,
        layers: LayerCaches,
        *,
        surplus: int = 0,
        share: bool = False,
        others: int = 0,
        persist: bool = False,
    ) -> None:
        """Store the caches of a sequence's first tokens as they are now, with `persist` on disk too.

        They hold `surplus` tokens more than those, all of the last step. With `share` nothing is copied as long as
        there is room for the arrays of that step, which had so many `others` beside the sequence's first tokens:
        `settle` has to be called when the caches are gone.
        """
        if not (self.enabled and sequence.can_store(length)):
            return
        try:
            self._store(sequence, length, layers, surplus, share=share, others=others, persist=persist)
        except Exception as error:
            self._on_failure(error, f"The caches of a prefix of {length} tokens could not be stored")

    def _store(
        self,
        sequence: DecodingSequence,
        length: int,
        layers: LayerCaches,
        surplus: int,
        *,
        share: bool,
        others: int,
        persist: bool,
    ) -> None:
        tokens = sequence.packed(length)
        persist = persist and self._disk is not None and sequence.adapter == self._disk_adapter
        if not (known := self._prefixes.has(tokens, sequence.adapter)) or persist:
            layers = rewind_copies(layers, surplus)
        if not known:
            if share:
                size = sum(layer.nbytes for layer in layers) + hidden_bytes(layers, others)
                share = self._prefixes.nbytes + size <= self._room()
            if not self._prefixes.insert(tokens, layers, sequence.adapter, share=share, others=others):
                self._note_too_large(length, layers)
            if share:
                self._sharing.setdefault(sequence.key, []).append(tokens)
            self.evict_to_fit()
        if not persist or self._disk is None or self._disk.has(tokens):
            return
        layers = compact_copies(layers)
        mx.eval([layer.state for layer in layers])  # another thread writes them
        self._disk.write(tokens, layers)

    def _note_too_large(self, length: int, layers: LayerCaches) -> None:
        """Log, once, that a prefix is larger than all of them may be: who waits for its next turn should know why."""
        size, limit = sum(layer.nbytes for layer in layers), self._prefixes.max_bytes
        if self._has_noted_too_large or not self._prefixes.enabled or size <= limit:
            return
        self._has_noted_too_large = True
        log.warning(
            "A prompt of %d tokens is not cached, and the next one that begins with it will be prefilled from the "
            "start: its caches take %s, and all cached prompts together may take %s. --cache-gb can allow more.",
            length,
            format_bytes(size),
            format_bytes(limit),
        )

    def settle(self, sequence: DecodingSequence) -> None:
        """Have the stored prefixes of a sequence, whose caches are gone, take no more memory than they have to.

        Before its memory is released, which wakes other models: what was stored of it has to be counted by then.
        """
        for tokens in self._sharing.pop(sequence.key, ()):
            try:
                self._prefixes.compact(tokens, sequence.adapter)
            except Exception as error:
                self._on_failure(error, "A cached prefix could not be compacted")
        self.report_usage()

    def _on_failure(self, error: Exception, message: str) -> None:
        """Log an exception; raise it where other processes do not know of it."""
        if self._prefixes.shared:
            raise error
        log.warning("%s: %r", message, error)

    def store_checkpoint(
        self, job: PrefillJob, position: int, layers: LayerCaches, surplus: int, others: int
    ) -> None:
        """Store a prompt's prefix up to a checkpoint.

        The layers hold `surplus` tokens more, all of the last step, which had so many `others` beside the prefix's.
        """
        sequence = job.sequence
        persist = self._is_worth_disk(sequence.request, position)
        self.store(sequence, position, layers, surplus=surplus, share=True, others=others, persist=persist)

    def evict_to_fit(self, start: int = 0, chunk: int = 0) -> None:
        """Evict what does not fit beside the memory that is reserved, and a chunk from position `start`."""
        room = self._cache_budget.prefix_room(start, chunk)
        self._features.evict_to(int(room * FEATURES_SHARE))
        self._prefixes.evict_to(room - self._features.nbytes)

    def give_up_needed(self) -> None:
        """Evict as much as other models have asked for."""
        if (nbytes := self._cache_budget.needed_by_others) <= 0:
            return
        log.debug("Cached prompts are evicted to give another model %s of memory.", format_bytes(nbytes))
        kept = max(0, self._prefixes.nbytes + self._features.nbytes - nbytes)
        self._features.evict_to(self._features.nbytes - nbytes)
        self._prefixes.evict_to(kept - self._features.nbytes)
        self.report_usage()

    def _room(self) -> int:
        """Return how many bytes prefixes may take now."""
        room = self._cache_budget.prefix_room() - self._features.nbytes
        return min(self._prefixes.max_bytes, room)

    def report_usage(self) -> None:
        """Tell the memory budget how much all this takes."""
        self._cache_budget.set_prefix_bytes(self._prefixes.nbytes + self._features.nbytes)

    def _is_worth_disk(self, request: GenerationRequest, position: int) -> bool:
        """Whether to write a checkpoint: what other prompts start with, and what is likely to come next.

        The latter are warm-ups; where there are none, the end of a prompt's history takes their place.
        """
        if request.max_tokens == 0:
            self._has_prewarmed = True
            return True
        return position in (request.checkpoints[:1] if self._has_prewarmed else request.checkpoints)
