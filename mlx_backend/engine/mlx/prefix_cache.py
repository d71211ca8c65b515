"""The prefix cache: KV caches of prompt prefixes that need not be prefilled again.

The KV cache of a model with sliding windows (gpt-oss) cannot be cut back to an earlier position, so caches are stored
as they stood at a checkpoint: the end of the system part, of the history, of the prompt, of the answer. One rule for
every model: the longest cached prefix of a prompt is reused whole, never a part of one. What is cached is never
changed: a sequence that reuses it gets arrays that are copied when they are first written to.

Checkpoints of one conversation share what they have in common. Layers that hold every token are stored once, in the
longest checkpoint, and are views of it in the others, which have only their sliding windows to themselves.

The bytes are bounded. Eviction follows GreedyDual-Size (Cao and Irani 1997): what saves least for its size goes
first. A checkpoint saves the tokens that would have to be prefilled again; if there is a shorter one before it, only
those between the two. Everything ages by what was evicted before it.
"""

from __future__ import annotations

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
    compact_copies,
    keep_slice,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True, eq=False)
class _Entry:
    adapter: str
    tokens: bytes
    layers: LayerCaches
    own_bytes: int  # that no other entry holds
    priority: float = 0.0
    last_used: int = 0  # counted in uses of any entry
    owner: _Entry | None = None  # the longer one that its shareable layers are views of
    views: list[_Entry] = field(default_factory=list)  # the shorter ones whose layers are views of its own


class PrefixCache:
    """Token prefixes and their KV caches. Prefixes of one adapter ("": none) are never found for another.

    Tokens may be given as bytes (`as_bytes`): packing 100,000 of them takes milliseconds.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
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
        self, prompt: Sequence[int] | bytes, adapter: str = ""
    ) -> tuple[int, LayerCaches | None]:
        """Find the longest cached prefix of the prompt: its length, and layers that the caller may write to."""
        entry = self._find_longest(adapter, as_bytes(prompt))
        if entry is None:
            return 0, None
        self._touch(entry)
        return len(entry.tokens) // TOKEN_BYTES, [alias(layer) for layer in entry.layers]

    def covered_tokens(self, prompt: Sequence[int] | bytes, adapter: str = "") -> int:
        """Return how many tokens of the prompt, all but its last, are cached; not counted as use."""
        entry = self._find_longest(adapter, as_bytes(prompt)[:-TOKEN_BYTES])
        return len(entry.tokens) // TOKEN_BYTES if entry is not None else 0

    def has(self, tokens: Sequence[int] | bytes, adapter: str = "") -> bool:
        """Whether exactly this prefix is cached; it then counts as used."""
        entry = self._entries.get((adapter, as_bytes(tokens)))
        if entry is not None:
            self._touch(entry)
        return entry is not None

    def insert(self, tokens: Sequence[int] | bytes, layers: LayerCaches, adapter: str = "") -> bool:
        """Cache a prefix with its caches as they are now; False if they alone are too large."""
        key = as_bytes(tokens)
        if self.has(key, adapter):
            return True
        if not self.enabled:
            return False
        layers = compact_copies(layers)
        # Computed from now on, or they would hold on to all that they are still to be computed from.
        evaluate_async([layer.state for layer in layers])
        size = sum(layer.nbytes for layer in layers)
        if size > self.max_bytes:
            return False
        entry = _Entry(adapter, key, layers, size)
        longer = self._find_longer_owner(adapter, key)
        if longer is not None:
            self._share(entry, longer)
        shorter = self._find_longest(adapter, key)
        while shorter is not None:
            if shorter.owner is None:
                self._share(shorter, longer or entry)
            shorter = self._find_longest(adapter, key, below=len(shorter.tokens))
        self._entries[adapter, key] = entry
        insort(self._sorted.setdefault(adapter, []), key)
        self._nbytes += entry.own_bytes
        self._touch(entry)
        self.evict_to(self.max_bytes)
        return (adapter, key) in self._entries

    def evict_to(self, max_bytes: int) -> None:
        """Evict what saves least for its size until at most `max_bytes` are cached."""
        while self._nbytes > max_bytes and self._entries:
            least = min(self._entries.values(), key=lambda entry: (entry.priority, entry.last_used))
            self._age = max(self._age, least.priority)
            self._evict(least)

    def clear(self) -> None:
        """Drop everything, and at once: entries that refer to each other would wait for the garbage collector."""
        for entry in self._entries.values():
            entry.owner = None
            entry.views.clear()
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

    def _find_longer_owner(self, adapter: str, tokens: bytes) -> _Entry | None:
        """Find an entry that starts with `tokens` and owns its layers."""
        ordered = self._sorted.get(adapter, [])
        for at in range(bisect_right(ordered, tokens), len(ordered)):
            if not ordered[at].startswith(tokens):
                break
            entry = self._entries[adapter, ordered[at]]
            return entry.owner or entry
        return None

    def _touch(self, entry: _Entry) -> None:
        """Count a use of an entry and set its priority anew."""
        before = self._find_longest(entry.adapter, entry.tokens, below=len(entry.tokens))
        saved = (len(entry.tokens) - (len(before.tokens) if before else 0)) // TOKEN_BYTES
        entry.priority = self._age + saved / max(1, entry.own_bytes)
        self._uses += 1
        entry.last_used = self._uses

    def _share(self, entry: _Entry, longer: _Entry) -> None:
        """Make the shareable layers of `entry` and of its views into views of a longer entry's."""
        is_inserted = (entry.adapter, entry.tokens) in self._entries
        # Its bytes include the room for growth behind its tokens.
        shared = sum(mine.nbytes for mine, _ in _shareable(entry, longer))
        entry.own_bytes -= shared
        for view in (entry, *entry.views):
            self._repoint(view, longer)
        entry.views = []
        if is_inserted:
            self._nbytes -= shared
            self._touch(entry)

    def _repoint(self, view: _Entry, longer: _Entry) -> None:
        for mine, theirs in _shareable(view, longer):
            mine.keys = theirs.keys[..., : mine.offset, :]
            mine.values = theirs.values[..., : mine.offset, :]
        evaluate_async([layer.state for layer in view.layers])
        view.owner = longer
        longer.views.append(view)

    def _evict(self, entry: _Entry) -> None:
        del self._entries[entry.adapter, entry.tokens]
        ordered = self._sorted[entry.adapter]
        del ordered[bisect_left(ordered, entry.tokens)]
        self._nbytes -= entry.own_bytes
        if entry.owner is not None:
            entry.owner.views.remove(entry)
            return
        if entry.views:  # the longest of them gets a copy of what was shared, and the others views of that
            heir = max(entry.views, key=lambda view: len(view.tokens))
            for layer in heir.layers:
                if _holds_keys(layer):
                    keep_slice(layer, slice(None))
                    heir.own_bytes += layer.nbytes
                    self._nbytes += layer.nbytes
            mx.eval([layer.state for layer in heir.layers])
            heir.owner = None
            for view in entry.views:
                if view is not heir:
                    self._repoint(view, heir)
            self._touch(heir)


def _shareable(one: _Entry, other: _Entry) -> list[tuple[Any, Any]]:
    pairs = zip(one.layers, other.layers, strict=True)
    return [(mine, theirs) for mine, theirs in pairs if _holds_keys(mine) and _holds_keys(theirs)]


def _holds_keys(layer: Any) -> bool:
    """Whether a layer's cache can be shared in part. A layer without attention (Nemotron NAS has some) fills none."""
    return type(layer) is KVCache and layer.keys is not None
