"""The prefix cache: KV caches of prompt prefixes that need not be prefilled again.

The KV cache of a model with sliding windows (gpt-oss) cannot be cut back to an earlier position once tokens have left
a window, so caches are stored as they stood at a checkpoint: the end of the system part, of the history, of the prompt,
of the answer. The longest cached prefix of a prompt is reused. Where caches can be cut (models that attend to
everything, and texts that are shorter than the windows) that may be a part of a longer one, such as the instructions
that a classifier's prompts begin with. What is cached is never changed: a sequence that reuses it gets arrays that are
copied when they are first written to.

Checkpoints of one conversation share what they have in common. Layers that hold every token are stored once, in the
longest checkpoint; the others have only their sliding windows to themselves, and what they share is sliced out of the
longest when it is asked for. So a conversation's next checkpoint costs the same however many there are before it.

The bytes are bounded. Eviction follows GreedyDual-Size (Cao and Irani 1997): what saves least for its size goes
first. A checkpoint saves the tokens that would have to be prefilled again; if there is a shorter one before it, only
those between the two. Everything ages by what was evicted before it.

`PrefixStore` is what sequences use: the cache in memory and the checkpoints on disk together. It decides what is stored
where and what has to be evicted; not when something is stored. Nothing fails for want of a stored prefix: what cannot
be copied, loaded or evicted is left out, and logged. Only where other processes share the model it is an error, because
they would still have what is missing here.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.device.memory import format_bytes
from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.kv_cache import (
    TOKEN_BYTES,
    LayerCaches,
    alias,
    as_bytes,
    can_cut,
    can_share,
    compact_copies,
    hidden_bytes,
    keep_slice,
    rewind_copies,
    shared_copies,
)
from mlx_backend.engine.mlx.kv_cache import cut as cut_layers
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.sequences import DecodingSequence
    from mlx_backend.engine.mlx.vision.tower import Vision

log = logging.getLogger(__name__)

MIN_CUT_TOKENS, MIN_CUT_SHARE = 64, 0.25
"""What a part of a prefix has to save of a prompt to be cut off it: tokens, or a share of what is to be prefilled.

To take it costs some operations for each layer.
"""


@dataclass(slots=True, eq=False)
class _Branch:
    """A prefix that holds layers whole, and all that begin it, which hold only what those cannot be cut to."""

    owner: _CachedPrefix
    views: list[_CachedPrefix] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _CachedPrefix:
    adapter: str
    tokens: bytes
    layers: LayerCaches
    own_bytes: int  # that no other entry holds
    priority: float = 0.0
    last_used: int = 0  # counted in uses of any entry
    branch: _Branch = field(init=False)

    def __post_init__(self) -> None:
        self.branch = _Branch(self)

    @property
    def is_view(self) -> bool:
        """Whether a longer one holds what its own shareable layers lack."""
        return self.branch.owner is not self


class PrefixCache:
    """Token prefixes and their KV caches. Prefixes of one adapter ("": none) are never found for another.

    Tokens may be given as bytes (`as_bytes`): packing 100,000 of them takes milliseconds. `shared` is whether other
    processes cache and evict the same prefixes: one that is lost here alone is then an error.
    """

    def __init__(self, max_bytes: int, *, shared: bool = False) -> None:
        self.max_bytes = max_bytes
        self.shared = shared
        self._entries: dict[tuple[str, bytes], _CachedPrefix] = {}
        # The tokens of each adapter's entries; a prefix sorts before what it begins.
        self._sorted: dict[str, list[bytes]] = {}
        self._nbytes = 0
        self._age = 0.0
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """How many bytes are cached."""
        return self._nbytes

    @property
    def enabled(self) -> bool:
        """Whether anything is ever cached."""
        return self.max_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    def find_longest(
        self, prompt: Sequence[int] | bytes, adapter: str = "", *, cut: bool = False
    ) -> tuple[int, LayerCaches | None]:
        """Find the longest cached prefix of the prompt: its length, and layers that the caller may write to.

        With `cut` it may be a part of a prefix that goes on differently, if that can be cut and saves enough.
        """
        entry, length = self._find_reusable(adapter, as_bytes(prompt), cut=cut)
        if entry is None:
            return 0, None
        self._touch(entry)
        layers = _whole_layers(entry, entry.branch.owner)
        if length * TOKEN_BYTES < len(entry.tokens):
            cut_layers(layers, length)
        return length, layers

    def covered_tokens(self, prompt: Sequence[int] | bytes, adapter: str = "", *, cut: bool = False) -> int:
        """Return how many tokens of the prompt, all but its last, are cached; not counted as use."""
        return self._find_reusable(adapter, as_bytes(prompt)[:-TOKEN_BYTES], cut=cut)[1]

    def has(self, tokens: Sequence[int] | bytes, adapter: str = "") -> bool:
        """Whether exactly this prefix is cached; it then counts as used."""
        entry = self._entries.get((adapter, as_bytes(tokens)))
        if entry is not None:
            self._touch(entry)
        return entry is not None

    def insert(
        self,
        tokens: Sequence[int] | bytes,
        layers: LayerCaches,
        adapter: str = "",
        *,
        share: bool = False,
        others: int = 0,
    ) -> bool:
        """Cache a prefix with its caches as they are now; False if they alone are too large.

        With `share` the arrays of these caches are used, where that is possible, and not copied; the last step had
        `others` tokens next to the prefix's. `compact` has to be called when the caches are gone.
        """
        key = as_bytes(tokens)
        if self.has(key, adapter):
            return True
        if not self.enabled:
            return False
        hidden = 0
        if share and can_share(layers):
            hidden = hidden_bytes(layers, others)
            layers = shared_copies(layers, others)
        else:
            layers = compact_copies(layers)
            # Computed from now on, or they would hold on to all that they are still to be computed from.
            evaluate_async([layer.state for layer in layers])
        size = sum(layer.nbytes for layer in layers) + hidden
        if size > self.max_bytes:
            return False
        entry = _CachedPrefix(adapter, key, layers, size)
        longer = self._find_longer_owner(adapter, key)
        if longer is not None:
            _share(entry, longer)
        # Whatever is still shorter begins this one, and so shares already.
        shorter = self._find_longest(adapter, key)
        if shorter is not None and not shorter.is_view:
            self._nbytes -= _share(shorter, longer or entry)
            self._touch(shorter)
        self._entries[adapter, key] = entry
        insort(self._sorted.setdefault(adapter, []), key)
        self._nbytes += entry.own_bytes
        self._touch(entry)
        self.evict_to(self.max_bytes)
        return (adapter, key) in self._entries

    def compact(self, tokens: Sequence[int] | bytes, adapter: str = "") -> None:
        """Copy what a prefix needs of the arrays that it shared with caches, of those that no longer one has by now."""
        entry = self._entries.get((adapter, as_bytes(tokens)))
        if entry is None:
            return
        layers = compact_copies(entry.layers)
        evaluate_async([layer.state for layer in layers])
        saved = entry.own_bytes - sum(layer.nbytes for layer in layers)
        entry.layers = layers
        entry.own_bytes -= saved
        self._nbytes -= saved
        self._touch(entry)  # it saves as much for fewer bytes

    def evict_to(self, max_bytes: int) -> None:
        """Evict what saves least for its size until at most `max_bytes` are cached.

        Never raises, unless the cache is `shared`: what cannot be copied when another lets go of it is evicted too.
        """
        while self._nbytes > max_bytes and self._entries:
            least = min(self._entries.values(), key=lambda entry: (entry.priority, entry.last_used))
            self._age = max(self._age, least.priority)
            self._evict(least)

    def clear(self) -> None:
        """Drop everything, and at once: entries that refer to each other would wait for the garbage collector."""
        for entry in self._entries.values():
            del entry.branch
        self._entries.clear()
        self._sorted.clear()
        self._nbytes = 0
        self._age = 0.0

    def _find_longest(self, adapter: str, tokens: bytes, below: int | None = None) -> _CachedPrefix | None:
        """Find the longest cached prefix of `tokens`, or the longest of fewer than `below` bytes."""
        ordered = self._sorted.get(adapter, [])
        if below is not None:
            tokens = tokens[: below - TOKEN_BYTES]
        at = len(ordered)
        while at := bisect_right(ordered, tokens, 0, at):
            near = ordered[at - 1]
            if tokens.startswith(near):
                return self._entries[adapter, near]
            # Whatever is a prefix of `tokens` and sorts before `near` is a prefix of both.
            tokens = tokens[: common_prefix_length(tokens, near)]
        return None

    def _find_reusable(self, adapter: str, tokens: bytes, *, cut: bool) -> tuple[_CachedPrefix | None, int]:
        """Find the entry that saves most of a prompt, and how many tokens."""
        entry = self._find_longest(adapter, tokens)
        length = len(entry.tokens) // TOKEN_BYTES if entry is not None else 0
        if not cut:
            return entry, length
        ordered = self._sorted.get(adapter, [])
        at = bisect_right(ordered, tokens)  # what begins most like it sorts next to it
        common, near = max(
            (
                (common_prefix_length(tokens, each) // TOKEN_BYTES, each)
                for each in ordered[max(0, at - 1) : at + 1]
            ),
            default=(0, b""),
        )
        remaining = len(tokens) // TOKEN_BYTES - length
        if common - length < min(MIN_CUT_TOKENS, max(1, MIN_CUT_SHARE * remaining)):
            return entry, length
        other: _CachedPrefix | None = self._entries[adapter, near]
        while other is not None and len(other.tokens) > common * TOKEN_BYTES:
            if can_cut(other.layers):
                return other, common
            other = self._find_longest(adapter, near, below=len(other.tokens))  # as before a reply
        return entry, length

    def _find_longer_owner(self, adapter: str, tokens: bytes) -> _CachedPrefix | None:
        """Find an entry that is longer than `tokens`, starts with them, and owns its layers."""
        ordered = self._sorted.get(adapter, [])
        at = bisect_right(ordered, tokens)  # whatever starts with them comes next
        if at == len(ordered) or not ordered[at].startswith(tokens):
            return None
        return self._entries[adapter, ordered[at]].branch.owner  # which starts with what it owns

    def _touch(self, entry: _CachedPrefix) -> None:
        """Count a use of an entry and set its priority anew."""
        before = self._find_longest(entry.adapter, entry.tokens, below=len(entry.tokens))
        saved = (len(entry.tokens) - (len(before.tokens) if before else 0)) // TOKEN_BYTES
        entry.priority = self._age + saved / max(1, entry.own_bytes)
        self._uses += 1
        entry.last_used = self._uses

    def _evict(self, entry: _CachedPrefix) -> None:
        branch = entry.branch
        self._forget(entry)
        if entry is not branch.owner:
            branch.views.remove(entry)
        elif branch.views:
            self._bequeath(branch)

    def _forget(self, entry: _CachedPrefix) -> None:
        del self._entries[entry.adapter, entry.tokens]
        ordered = self._sorted[entry.adapter]
        del ordered[bisect_left(ordered, entry.tokens)]
        self._nbytes -= entry.own_bytes
        del entry.branch  # a circle of references would wait for the garbage collector

    def _bequeath(self, branch: _Branch) -> None:
        """Give the views of an evicted owner another: one of another branch, or the longest of them.

        Where that cannot be given a copy of what it shared, all of them are evicted with their owner.
        """
        heir = max(branch.views, key=lambda view: len(view.tokens))
        longer = self._find_longer_owner(heir.adapter, heir.tokens)
        if longer is not None:
            _move(branch.views, longer.branch)
        else:
            try:
                copied = _take_over(heir, branch.owner)
            except Exception as error:
                # As text: an exception holds on to all that its frames do.
                log.warning("%d cached prefixes could not be copied: %s", len(branch.views), repr(error))
                for view in branch.views:
                    self._forget(view)
                if self.shared:
                    raise
                return
            self._nbytes += copied
            branch.owner = heir
            branch.views.remove(heir)
        self._touch(heir)


def _take_over(heir: _CachedPrefix, owner: _CachedPrefix) -> int:
    """Give an entry copies of what it shared with its owner; return their bytes. If that raises, it is as it was."""
    layers, copied = _whole_layers(heir, owner), 0
    for layer, before in zip(layers, owner.layers, strict=True):
        if _is_shareable(layer, before):
            keep_slice(layer, slice(None))  # a copy
            copied += layer.nbytes
    mx.eval([layer.state for layer in layers])
    heir.layers = layers
    heir.own_bytes += copied
    return copied


def _share(entry: _CachedPrefix, longer: _CachedPrefix) -> int:
    """Have an entry, and its views, take from a longer one what that has too; return the bytes that are freed."""
    freed = 0
    for mine, theirs in zip(entry.layers, longer.layers, strict=True):
        if _is_shareable(mine, theirs):
            freed += mine.nbytes  # the room for growth after its tokens included
            mine.keys = mine.values = None
    entry.own_bytes -= freed
    if longer.branch.views:
        _move([entry, *entry.branch.views], longer.branch)
    else:  # however many views there are
        entry.branch.owner = longer
        entry.branch.views.append(entry)
        longer.branch = entry.branch
    return freed


def _move(entries: Sequence[_CachedPrefix], branch: _Branch) -> None:
    for entry in entries:
        entry.branch = branch
        branch.views.append(entry)


def _whole_layers(entry: _CachedPrefix, owner: _CachedPrefix) -> LayerCaches:
    """Return copies of an entry's layers, with what its owner holds of them."""
    layers = [alias(layer) for layer in entry.layers]
    for mine, theirs in zip(layers, owner.layers, strict=True):
        if type(mine) is KVCache and mine.keys is None and theirs.keys is not None:
            mine.keys = theirs.keys[..., : mine.offset, :]
            mine.values = theirs.values[..., : mine.offset, :]
    return layers


def _is_shareable(mine: Any, theirs: Any) -> bool:
    """Whether a layer's cache can be shared in part. A layer without attention (Nemotron NAS has some) fills none."""
    are_plain = type(mine) is KVCache and type(theirs) is KVCache
    return are_plain and mine.keys is not None and theirs.keys is not None


FEATURES_SHARE = 0.125
"""Share of the room for prefixes that features of images may take at most: a prefix saves more than those."""


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
        self.prefixes = prefixes
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
        return self.prefixes.enabled or self._disk is not None

    def covered_tokens(self, sequence: DecodingSequence) -> int:
        """Return how many tokens of a prompt are cached in memory; not counted as use."""
        tokens = sequence.packed(len(sequence.tokens))
        return self.prefixes.covered_tokens(tokens, sequence.adapter, cut=not sequence.images)

    def find(self, sequence: DecodingSequence, max_tokens: int) -> tuple[int, LayerCaches | None]:
        """Find the longest stored prefix of at most `max_tokens` tokens: its length, and caches to continue on."""
        try:
            tokens = sequence.packed(max_tokens)
            # Images may not be cut.
            length, layers = self.prefixes.find_longest(tokens, sequence.adapter, cut=not sequence.images)
            if self._disk is not None and sequence.adapter == self._disk_adapter:
                stored = self._disk.find_longest(tokens, beyond=length)
                if stored is not None and (loaded := self._disk.read(stored)) is not None:
                    length, layers = stored.length, loaded
                    self.store(sequence, length, loaded)
            if length == len(sequence.tokens) and layers is not None:
                # A warm-up, of which nothing is left to prefill.
                self.store(sequence, length, layers, persist=self._is_worth_disk(sequence.request, length))
        except Exception as error:
            self._on_failure(error, "The stored prefixes of a prompt could not be used")
            return 0, None
        return length, layers

    def store_checkpoint(
        self, sequence: DecodingSequence, position: int, layers: LayerCaches, *, surplus: int, others: int
    ) -> None:
        """Store a prompt's prefix up to a checkpoint. The parameters are those of `store`."""
        persist = self._is_worth_disk(sequence.request, position)
        self.store(sequence, position, layers, surplus=surplus, others=others, persist=persist)

    def store(
        self,
        sequence: DecodingSequence,
        length: int,
        layers: LayerCaches,
        *,
        surplus: int = 0,
        others: int | None = None,
        persist: bool = False,
    ) -> None:
        """Store the caches of a sequence's first tokens as they are now, with `persist` on disk too.

        They hold `surplus` tokens more than those, all of the last step. If that step had `others` tokens next to the
        sequence's first ones, nothing is copied as long as there is room for its arrays: `settle` has to be called when
        the caches are gone. Without `others` they are copied.
        """
        if not (self.enabled and sequence.images.can_store(length)):
            return
        persist = persist and self._disk is not None and sequence.adapter == self._disk_adapter
        try:
            tokens = sequence.packed(length)
            if not (known := self.prefixes.has(tokens, sequence.adapter)) or persist:
                layers = rewind_copies(layers, surplus)
            if not known:
                self._insert(sequence, tokens, layers, others)
            if persist and self._disk is not None and not self._disk.has(tokens):
                layers = compact_copies(layers)
                mx.eval([layer.state for layer in layers])  # another thread writes them
                self._disk.write(tokens, layers)
        except Exception as error:
            self._on_failure(error, f"The caches of a prefix of {length} tokens could not be stored")

    def _insert(
        self, sequence: DecodingSequence, tokens: bytes, layers: LayerCaches, others: int | None
    ) -> None:
        share = False
        if others is not None:
            size = sum(layer.nbytes for layer in layers) + hidden_bytes(layers, others)
            share = self.prefixes.nbytes + size <= self._room()
        if not self.prefixes.insert(tokens, layers, sequence.adapter, share=share, others=others or 0):
            self._note_too_large(len(tokens) // TOKEN_BYTES, layers)
        if share:
            self._sharing.setdefault(sequence.key, []).append(tokens)
        self.evict_to_fit()

    def _note_too_large(self, length: int, layers: LayerCaches) -> None:
        """Log, once, that a prefix is larger than all of them may be: who waits for its next turn should know why."""
        size, limit = sum(layer.nbytes for layer in layers), self.prefixes.max_bytes
        if self._has_noted_too_large or not self.prefixes.enabled or size <= limit:
            return
        self._has_noted_too_large = True
        log.warning(
            "A prompt of %d tokens is not cached, and the next one that begins with it will be prefilled from the "
            "start: its caches take %s, and all cached prompts together may take %s. --cache-gb can allow more.",
            length,
            format_bytes(size),
            format_bytes(limit),
        )

    def clear(self) -> None:
        """Drop all prefixes that are cached in memory."""
        self.prefixes.clear()
        self.report_usage()

    def settle(self, sequence: DecodingSequence) -> None:
        """Have the stored prefixes of a sequence, whose caches are gone, take no more memory than they have to.

        Before its memory is released, which wakes other models: what was stored of it has to be counted by then.
        """
        for tokens in self._sharing.pop(sequence.key, ()):
            try:
                self.prefixes.compact(tokens, sequence.adapter)
            except Exception as error:
                self._on_failure(error, "A cached prefix could not be compacted")
        self.report_usage()

    def _on_failure(self, error: Exception, message: str) -> None:
        """Log an exception; raise it where other processes do not know of it."""
        if self.prefixes.shared:
            raise error
        log.warning("%s: %r", message, error)

    def evict_to_fit(self, start: int = 0, chunk: int = 0) -> None:
        """Evict what does not fit next to the memory that is reserved, and to a chunk from position `start`."""
        room = self._cache_budget.prefix_room(start, chunk)
        self._features.evict_to(int(room * FEATURES_SHARE))
        self.prefixes.evict_to(room - self._features.nbytes)

    def give_up_needed(self) -> None:
        """Evict as much as other models have asked for."""
        if (nbytes := self._cache_budget.reservation.needed_by_others) <= 0:
            return
        log.debug("Cached prompts are evicted to give another model %s of memory.", format_bytes(nbytes))
        kept = max(0, self.prefixes.nbytes + self._features.nbytes - nbytes)
        self._features.evict_to(self._features.nbytes - nbytes)
        self.prefixes.evict_to(kept - self._features.nbytes)
        self.report_usage()

    def _room(self) -> int:
        """Return how many bytes prefixes may take now."""
        room = self._cache_budget.prefix_room() - self._features.nbytes
        return min(self.prefixes.max_bytes, room)

    def report_usage(self) -> None:
        """Tell the memory budget how much all this takes."""
        self._cache_budget.set_prefix_bytes(self.prefixes.nbytes + self._features.nbytes)

    def _is_worth_disk(self, request: GenerationRequest, position: int) -> bool:
        """Whether to write a checkpoint: what other prompts start with, and what is likely to come next.

        The latter are warm-ups; where there are none, the end of a prompt's history takes their place.
        """
        if request.max_tokens == 0:
            self._has_prewarmed = True
            return True
        return position in (request.checkpoints[:1] if self._has_prewarmed else request.checkpoints)
