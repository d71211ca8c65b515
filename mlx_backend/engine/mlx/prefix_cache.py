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
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_backend.common_prefix import common_prefix_length
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
    shared_copies,
)
from mlx_backend.engine.mlx.kv_cache import cut as cut_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

# What a part of a prefix has to save of a prompt to be cut off it: so many tokens, or this share of what is to be
# prefilled. To take it costs some operations for each layer.
MIN_CUT_TOKENS = 64
MIN_CUT_SHARE = 0.25


@dataclass(slots=True, eq=False)
class _Family:
    """A prefix that holds layers whole, and all that begin it, which hold only what those cannot be cut to."""

    owner: _Entry
    views: list[_Entry] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Entry:
    adapter: str
    tokens: bytes
    layers: LayerCaches
    own_bytes: int  # that no other entry holds
    priority: float = 0.0
    last_used: int = 0  # counted in uses of any entry
    family: _Family = field(init=False)

    def __post_init__(self) -> None:
        self.family = _Family(self)

    @property
    def is_view(self) -> bool:
        """Whether a longer one holds what its own shareable layers lack."""
        return self.family.owner is not self


class PrefixCache:
    """Token prefixes and their KV caches. Prefixes of one adapter ("": none) are never found for another.

    Tokens may be given as bytes (`as_bytes`): packing 100,000 of them takes milliseconds. `shared` is whether other
    processes cache and evict the same prefixes: one that is lost here alone is then an error.
    """

    def __init__(self, max_bytes: int, *, shared: bool = False) -> None:
        self.max_bytes = max_bytes
        self.shared = shared
        self._entries: dict[tuple[str, bytes], _Entry] = {}
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
        layers = _whole_layers(entry, entry.family.owner)
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

        With `share` the arrays of these caches are used, where that is possible, and not copied; the last step had so
        many `others` beside the prefix's tokens. `compact` has to be called when the caches are gone.
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
        entry = _Entry(adapter, key, layers, size)
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
            del entry.family
        self._entries.clear()
        self._sorted.clear()
        self._nbytes = 0
        self._age = 0.0

    def _find_longest(self, adapter: str, tokens: bytes, below: int | None = None) -> _Entry | None:
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

    def _find_reusable(self, adapter: str, tokens: bytes, *, cut: bool) -> tuple[_Entry | None, int]:
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
        other: _Entry | None = self._entries[adapter, near]
        while other is not None and len(other.tokens) > common * TOKEN_BYTES:
            if can_cut(other.layers):
                return other, common
            other = self._find_longest(adapter, near, below=len(other.tokens))  # as before a reply
        return entry, length

    def _find_longer_owner(self, adapter: str, tokens: bytes) -> _Entry | None:
        """Find an entry that is longer than `tokens`, starts with them, and owns its layers."""
        ordered = self._sorted.get(adapter, [])
        at = bisect_right(ordered, tokens)  # whatever starts with them comes next
        if at == len(ordered) or not ordered[at].startswith(tokens):
            return None
        return self._entries[adapter, ordered[at]].family.owner  # which starts with what it owns

    def _touch(self, entry: _Entry) -> None:
        """Count a use of an entry and set its priority anew."""
        before = self._find_longest(entry.adapter, entry.tokens, below=len(entry.tokens))
        saved = (len(entry.tokens) - (len(before.tokens) if before else 0)) // TOKEN_BYTES
        entry.priority = self._age + saved / max(1, entry.own_bytes)
        self._uses += 1
        entry.last_used = self._uses

    def _evict(self, entry: _Entry) -> None:
        family = entry.family
        self._forget(entry)
        if entry is not family.owner:
            family.views.remove(entry)
        elif family.views:
            self._bequeath(family)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.adapter, entry.tokens]
        ordered = self._sorted[entry.adapter]
        del ordered[bisect_left(ordered, entry.tokens)]
        self._nbytes -= entry.own_bytes
        del entry.family  # a circle of references would wait for the garbage collector

    def _bequeath(self, family: _Family) -> None:
        """Give the views of an evicted owner another: one of another branch, or the longest of them.

        Where that cannot be given a copy of what it shared, all of them are evicted with their owner.
        """
        heir = max(family.views, key=lambda view: len(view.tokens))
        longer = self._find_longer_owner(heir.adapter, heir.tokens)
        if longer is not None:
            _move(family.views, longer.family)
        else:
            try:
                copied = _take_over(heir, family.owner)
            except Exception as error:
                # As text: an exception holds on to all that its frames do.
                log.warning("%d cached prefixes could not be copied: %s", len(family.views), repr(error))
                for view in family.views:
                    self._forget(view)
                if self.shared:
                    raise
                return
            self._nbytes += copied
            family.owner = heir
            family.views.remove(heir)
        self._touch(heir)


def _take_over(heir: _Entry, owner: _Entry) -> int:
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


def _share(entry: _Entry, longer: _Entry) -> int:
    """Have an entry, and its views, take from a longer one what that has too; return the bytes that are freed."""
    freed = 0
    for mine, theirs in zip(entry.layers, longer.layers, strict=True):
        if _is_shareable(mine, theirs):
            freed += mine.nbytes  # the room for growth behind its tokens included
            mine.keys = mine.values = None
    entry.own_bytes -= freed
    if longer.family.views:
        _move([entry, *entry.family.views], longer.family)
    else:  # however many views there are
        entry.family.owner = longer
        entry.family.views.append(entry)
        longer.family = entry.family
    return freed


def _move(entries: Sequence[_Entry], family: _Family) -> None:
    for entry in entries:
        entry.family = family
        family.views.append(entry)


def _whole_layers(entry: _Entry, owner: _Entry) -> LayerCaches:
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
