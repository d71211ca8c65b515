"""The prefix cache: KV caches of prompt prefixes that need not be prefilled again.

The KV cache of a model with sliding windows (gpt-oss) cannot be cut back to an earlier position once tokens have left
a window, so caches are stored as they stood at a checkpoint: the end of the system part, of the history, of the prompt,
of the answer. The longest cached prefix of a prompt is reused. Where caches can be cut (models that attend to
everything, and texts that are shorter than the windows) that may be a part of a longer one, such as the instructions
that a classifier's prompts begin with.

Checkpoints of one conversation share what they have in common, and share it with the sequence that goes on from them. A
`_Trunk` holds the keys and values of a text's tokens in the layers that keep all of them; a checkpoint is how much of
that is its own, and its sliding windows. One sequence at a time appends to a trunk, in place: neither its turn nor the
checkpoints in it copy what is there, however long that is. Where it appends, nothing of a checkpoint may be left: a few
tokens of other checkpoints, such as those of a reply that the client did not send back, are moved out of the trunk
before, into tails. If those are many, or another sequence appends already, the sequence gets a copy instead.

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
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import mlx.core as mx

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.device.memory import format_bytes
from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.kv_cache import (
    MAX_SLACK,
    TOKEN_BYTES,
    LayerCaches,
    alias,
    as_bytes,
    can_cut,
    compact_copies,
    is_growing,
    rewind_copies,
)
from mlx_backend.engine.mlx.kv_cache import cut as cut_layers
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import AppendLease, GrowingKVCache
from mlx_backend.engine.mlx.vision.image_memory import FeatureCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import SharedArrays
    from mlx_backend.engine.mlx.sequences import DecodingSequence
    from mlx_backend.engine.mlx.vision.tower import Vision

log = logging.getLogger(__name__)

MIN_CUT_TOKENS, MIN_CUT_SHARE = 64, 0.25
"""What a part of a prefix has to save of a prompt to be cut off it: tokens, or a share of what is to be prefilled.

To take it costs some operations for each layer.
"""


@dataclass(slots=True, eq=False)
class _Trunk:
    """The keys and values of a text, `tokens`, by the numbers of the layers; and the prefixes that begin with them.

    While a sequence appends to them they are part of its own memory, and not counted here; `lease` then refers to
    something that lives as long as its caches.
    """

    adapter: str
    tokens: bytes
    arrays: dict[int, SharedArrays]
    lease: ReferenceType[AppendLease] | None = None
    counted: int = 0  # bytes
    prefixes: list[_CachedPrefix] = field(default_factory=list)  # by how much of it they need, ascending

    @property
    def is_live(self) -> bool:
        """Whether a sequence may append to it."""
        return self.lease is not None and self.lease() is not None

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return _nbytes(self.arrays)

    @property
    def needed(self) -> int:
        """How many of its tokens some prefix needs."""
        return self.prefixes[-1].in_trunk if self.prefixes else 0

    def add(self, prefixes: Sequence[_CachedPrefix]) -> None:
        """Add prefixes that begin with its tokens, in the same order."""
        in_order = self.needed <= prefixes[0].in_trunk
        self.prefixes += prefixes
        if not in_order:
            self.sort()

    def sort(self) -> None:
        """Bring its prefixes into their order."""
        self.prefixes.sort(key=lambda each: each.in_trunk)


@dataclass(slots=True, eq=False)
class _CachedPrefix:
    """A prefix: `in_trunk` of its tokens are in the trunk, and those after them are in `tails`.

    `layers` are those of other kinds than a trunk's, and None for those.
    """

    adapter: str
    tokens: bytes
    layers: LayerCaches
    own_bytes: int  # that no other entry holds
    trunk: _Trunk
    in_trunk: int
    tails: dict[int, SharedArrays] = field(default_factory=dict)
    priority: float = 0.0
    last_used: int = 0  # counted in uses of any entry

    @property
    def length(self) -> int:
        """Its number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def own_layers(self) -> LayerCaches:
        """The layers that it has to itself."""
        return [layer for layer in self.layers if layer is not None]


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
        # By their first arrays' ids.
        self._trunks: dict[int, _Trunk] = {}
        self._live: list[_Trunk] = []
        self._nbytes = 0
        self._age = 0.0
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """How many bytes are cached, apart from those that running sequences go on with."""
        self._count_released()
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
        return length, self._continued(entry, length)

    def covered_tokens(self, prompt: Sequence[int] | bytes, adapter: str = "", *, cut: bool = False) -> int:
        """Return how many tokens of the prompt, all but its last, are cached; not counted as use."""
        return self._find_reusable(adapter, as_bytes(prompt)[:-TOKEN_BYTES], cut=cut)[1]

    def has(self, tokens: Sequence[int] | bytes, adapter: str = "") -> bool:
        """Whether exactly this prefix is cached; it then counts as used."""
        entry = self._entries.get((adapter, as_bytes(tokens)))
        if entry is not None:
            self._touch(entry)
        return entry is not None

    def insert(self, tokens: Sequence[int] | bytes, layers: LayerCaches, adapter: str = "") -> bool:
        """Cache a prefix with its caches as they are now; False if they alone are too large.

        Keys and values of all tokens (GrowingKVCache) are used as they are. The others, such as windows, are copied.
        """
        key = as_bytes(tokens)
        if self.has(key, adapter):
            return True
        if not self.enabled:
            return False
        growing = {at: layer for at, layer in enumerate(layers) if is_growing(layer)}
        own = compact_copies([layer for at, layer in enumerate(layers) if at not in growing])
        size = sum(layer.nbytes for layer in own)
        if size + sum(layer.nbytes for layer in growing.values()) > self.max_bytes:
            return False
        # Computed from now on, or they would hold on to all that they are still to be computed from.
        evaluate_async([layer.state for layer in [*own, *growing.values()]])
        trunk = self._trunk_for(adapter, key, growing)
        copies = iter(own)
        held = [None if at in growing else next(copies) for at in range(len(layers))]
        entry = _CachedPrefix(adapter, key, held, size, trunk, len(key) // TOKEN_BYTES)
        trunk.add([entry])
        self._entries[adapter, key] = entry
        insort(self._sorted.setdefault(adapter, []), key)
        self._nbytes += size
        self._touch(entry)
        self.evict_to(self.max_bytes)
        return (adapter, key) in self._entries

    def evict_to(self, max_bytes: int) -> None:
        """Evict what saves least for its size until at most `max_bytes` are cached.

        Never raises, unless the cache is `shared`: what cannot be copied when another lets go of it is evicted too.
        """
        while self.nbytes > max_bytes and self._entries:
            least = min(self._entries.values(), key=lambda entry: (entry.priority, entry.last_used))
            self._age = max(self._age, least.priority)
            self._evict(least)

    def clear(self) -> None:
        """Drop everything, and at once: entries that refer to each other would wait for the garbage collector."""
        for trunk in self._trunks.values():
            trunk.prefixes.clear()
        self._entries.clear()
        self._sorted.clear()
        self._trunks.clear()
        self._live.clear()
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
            if can_cut(other.own_layers):
                return other, common
            other = self._find_longest(adapter, near, below=len(other.tokens))  # as before a reply
        return entry, length

    def _touch(self, entry: _CachedPrefix) -> None:
        """Count a use of an entry and set its priority anew."""
        before = self._find_longest(entry.adapter, entry.tokens, below=len(entry.tokens))
        saved = (len(entry.tokens) - (len(before.tokens) if before else 0)) // TOKEN_BYTES
        trunk = entry.trunk
        nbytes = entry.own_bytes + (trunk.counted if trunk.prefixes[-1] is entry else 0)
        entry.priority = self._age + saved / max(1, nbytes)
        self._uses += 1
        entry.last_used = self._uses

    def _evict(self, entry: _CachedPrefix) -> None:
        self._forget(entry)
        if not entry.trunk.is_live:
            self._fit(entry.trunk)

    def _forget(self, entry: _CachedPrefix) -> None:
        del self._entries[entry.adapter, entry.tokens]
        ordered = self._sorted[entry.adapter]
        del ordered[bisect_left(ordered, entry.tokens)]
        self._nbytes -= entry.own_bytes
        entry.trunk.prefixes.remove(entry)  # a circle of references would wait for the garbage collector

    # -- trunks ----------------------------------------------------------------------------------------------

    def _trunk_for(self, adapter: str, tokens: bytes, layers: dict[int, GrowingKVCache]) -> _Trunk:
        """Return the trunk of a prefix: that of its layers, one that has its tokens, or a new one."""
        first = next(iter(layers.values()), None)
        trunk = self._trunks.get(id(first.arrays)) if first is not None else None
        if trunk is not None:
            if len(tokens) > len(trunk.tokens):
                trunk.tokens = tokens
            return trunk
        trunk = self._trunk_with(adapter, tokens)
        if trunk is not None and first is not None:
            return trunk
        shorter = self._find_longest(adapter, tokens)
        trunk = _Trunk(adapter, tokens, {at: layer.arrays for at, layer in layers.items()})
        if first is not None:
            self._trunks[id(first.arrays)] = trunk
            self._hold(trunk, first.lease)
            if shorter is not None and not shorter.trunk.is_live:
                self._absorb(shorter.trunk)
        return trunk

    def _trunk_with(self, adapter: str, tokens: bytes, other: _Trunk | None = None) -> _Trunk | None:
        """Find a trunk that begins with these tokens, and is not the `other`."""
        return next(
            (
                each
                for each in self._trunks.values()
                if each is not other and each.adapter == adapter and each.tokens.startswith(tokens)
            ),
            None,
        )

    def _hold(self, trunk: _Trunk, lease: AppendLease) -> None:
        """Note that a sequence may append to a trunk as long as its lease lives."""
        if trunk not in self._live:
            self._live.append(trunk)
        trunk.lease = ref(lease)
        self._count(trunk, 0)

    def _count_released(self) -> None:
        """Count the trunks to which no sequence appends any more, without the room that they left."""
        for trunk in [each for each in self._live if not each.is_live]:
            self._live.remove(trunk)
            self._fit(trunk, slack=MAX_SLACK)

    def _count(self, trunk: _Trunk, nbytes: int) -> None:
        self._nbytes += nbytes - trunk.counted
        trunk.counted = nbytes

    def _fit(self, trunk: _Trunk, *, slack: float = 1.0) -> None:
        """Have a trunk hold no more than its prefixes need, or `slack` times that.

        Where that cannot be copied all of them are evicted.
        """
        needed = trunk.needed
        if not needed:
            self._drop(trunk)
            return
        if self._absorb(trunk):
            return
        trunk.tokens = trunk.tokens[: needed * TOKEN_BYTES]
        try:
            if any(each.room > slack * needed for each in trunk.arrays.values()):
                parts = {at: each.part(0, needed) for at, each in trunk.arrays.items()}
                own_memory(parts)
                mx.eval([part.arrays for part in parts.values()])
                for at, part in parts.items():
                    trunk.arrays[at].arrays = part.arrays
        except Exception as error:
            # As text: an exception holds on to all that its frames do.
            log.warning("%d cached prefixes could not be copied: %s", len(trunk.prefixes), repr(error))
            for each in list(trunk.prefixes):
                self._forget(each)
            self._drop(trunk)
            if self.shared:
                raise
            return
        self._count(trunk, trunk.nbytes)
        self._touch(trunk.prefixes[-1])

    def _absorb(self, trunk: _Trunk) -> bool:
        """Move a trunk's prefixes to another that has all that they need of it; return whether there is one."""
        needed = trunk.tokens[: trunk.needed * TOKEN_BYTES]
        other = self._trunk_with(trunk.adapter, needed, trunk)
        if other is None:
            return False
        for each in trunk.prefixes:
            each.trunk = other
        other.add(trunk.prefixes)
        trunk.prefixes.clear()
        self._drop(trunk)
        return True

    def _drop(self, trunk: _Trunk) -> None:
        self._count(trunk, 0)
        first = next(iter(trunk.arrays.values()), None)
        self._trunks.pop(id(first), None)
        if trunk in self._live:
            self._live.remove(trunk)

    def _continued(self, entry: _CachedPrefix, length: int) -> LayerCaches:
        """Return caches of an entry's first tokens that the caller may append to."""
        layers: LayerCaches = [
            None if layer is None else GrowingKVCache.of(alias(layer)) for layer in entry.layers
        ]
        if length < entry.length:
            cut_layers([layer for layer in layers if layer is not None], length)
        trunk, start, lease = entry.trunk, min(entry.in_trunk, length), AppendLease()
        is_taken = self._take_over(trunk, start)
        for at, arrays in trunk.arrays.items():
            layer = GrowingKVCache(arrays if is_taken else arrays.beginning(start), start, lease)
            if length > start:
                layer.append(entry.tails[at].part(0, length - start))
            layers[at] = layer
        if is_taken:
            self._hold(trunk, lease)
            if length == entry.length and entry.tails:  # they are in the trunk again
                self._set_tails(entry, length, {})
                trunk.tokens = entry.tokens
                trunk.sort()
        else:  # at once: whoever appends to the trunk would copy all of it, as long as this is to be computed from it
            mx.eval([layer.state for at, layer in enumerate(layers) if at in trunk.arrays])
        return layers

    def _take_over(self, trunk: _Trunk, start: int) -> bool:
        """Have nothing of any prefix in a trunk after `start`, if that is little; return whether to append there."""
        if trunk.is_live or not trunk.arrays:
            return False
        beyond = [each for each in trunk.prefixes if each.in_trunk > start]
        if sum(each.in_trunk - start for each in beyond) > (MAX_SLACK - 1) * start:
            return False
        tails = [_tails_from(each, start) for each in beyond]
        mx.eval([part.arrays for parts in tails for part in parts.values()])
        for each, parts in zip(beyond, tails, strict=True):
            self._set_tails(each, start, parts)
        trunk.tokens = trunk.tokens[: start * TOKEN_BYTES]
        return True

    def _set_tails(self, entry: _CachedPrefix, in_trunk: int, tails: dict[int, SharedArrays]) -> None:
        added = _nbytes(tails) - _nbytes(entry.tails)
        entry.in_trunk, entry.tails = in_trunk, tails
        entry.own_bytes += added
        self._nbytes += added


def _nbytes(parts: dict[int, SharedArrays]) -> int:
    return sum(part.nbytes for part in parts.values())


def _tails_from(entry: _CachedPrefix, start: int) -> dict[int, SharedArrays]:
    """Return copies of what an entry has after `start`, which is in its trunk."""
    parts = {at: arrays.part(start, entry.in_trunk) for at, arrays in entry.trunk.arrays.items()}
    for at, tail in entry.tails.items():
        parts[at] = parts[at].followed_by(tail)
    return own_memory(parts)


def own_memory(parts: dict[int, SharedArrays]) -> dict[int, SharedArrays]:
    """Have slices hold only what they show."""
    return {at: part.own_memory() for at, part in parts.items()}


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
        self.is_paused = False  # while it is, nothing is stored
        self._features = vision.features if vision is not None else FeatureCache()
        self._disk = disk
        self._cache_budget = cache_budget
        self._disk_adapter = disk_adapter
        self._has_prewarmed = False
        self._has_noted_too_large = False

    @property
    def enabled(self) -> bool:
        """Whether anything is stored."""
        return not self.is_paused and (self.prefixes.enabled or self._disk is not None)

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
                    length, layers = stored.length, list(map(GrowingKVCache.of, loaded))
                    self.store(sequence, length, layers)
            if length == len(sequence.tokens) and layers is not None:
                # A warm-up, of which nothing is left to prefill.
                self.store(sequence, length, layers, persist=self._is_worth_disk(sequence.request, length))
        except Exception as error:
            self._on_failure(error, "The stored prefixes of a prompt could not be used")
            return 0, None
        return length, layers

    def store_checkpoint(
        self, sequence: DecodingSequence, position: int, layers: LayerCaches, *, surplus: int
    ) -> None:
        """Store a prompt's prefix up to a checkpoint. The parameters are those of `store`."""
        persist = self._is_worth_disk(sequence.request, position)
        self.store(sequence, position, layers, surplus=surplus, persist=persist)

    def store(
        self,
        sequence: DecodingSequence,
        length: int,
        layers: LayerCaches,
        *,
        surplus: int = 0,
        persist: bool = False,
    ) -> None:
        """Store the caches of a sequence's first tokens as they are now, with `persist` on disk too.

        They hold `surplus` tokens more than those, all of the last step.
        """
        if not (self.enabled and sequence.images.can_store(length)):
            return
        persist = persist and self._disk is not None and sequence.adapter == self._disk_adapter
        try:
            tokens = sequence.packed(length)
            if not (known := self.prefixes.has(tokens, sequence.adapter)) or persist:
                layers = rewind_copies(layers, surplus)
            if not known:
                if not self.prefixes.insert(tokens, layers, sequence.adapter):
                    self._note_too_large(length, layers)
                self.evict_to_fit()
            if persist and self._disk is not None and not self._disk.has(tokens):
                layers = compact_copies(layers)
                mx.eval([layer.state for layer in layers])  # another thread writes them
                self._disk.write(tokens, layers)
        except Exception as error:
            self._on_failure(error, f"The caches of a prefix of {length} tokens could not be stored")

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

    def report_usage(self) -> None:
        """Tell the memory budget how much all this takes, and evict what is too much of it."""
        # Sequences may have left their caches, which were their own memory and are counted only now.
        self.prefixes.evict_to(self.prefixes.max_bytes if self._cache_budget.keeps_prefixes else 0)
        self._cache_budget.set_prefix_bytes(self.prefixes.nbytes + self._features.nbytes)

    def _is_worth_disk(self, request: GenerationRequest, position: int) -> bool:
        """Whether to write a checkpoint: what other prompts start with, and what is likely to come next.

        The latter are warm-ups; where there are none, the end of a prompt's history takes their place.
        """
        if request.max_tokens == 0:
            self._has_prewarmed = True
            return True
        return position in (request.checkpoints[:1] if self._has_prewarmed else request.checkpoints)
