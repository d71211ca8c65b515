"""Prompt prefixes that need not be read again.

The KV cache of a model with sliding windows (gpt-oss) cannot be cut back to an earlier position, so caches
are kept as they stood at a checkpoint: the end of the system part, of the history, of the prompt, of the
answer. One rule for every model: the longest kept prefix of a prompt is reused, never a part of one. What is
kept is never changed: whoever reuses it gets arrays that are copied when they are first written to.

Checkpoints of one conversation share what they have in common. The layers that hold every token are kept once,
in the longest of them, and are views of it in the others; of those a checkpoint has only its windows to itself.

The bytes are bounded. What goes first is what is worth least for its size (GreedyDual-Size, Cao and Irani
1997): worth is the number of tokens that would have to be read again, which for a checkpoint with a shorter
one before it are only those between the two, and everything ages by what was given up before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_backend.engine.mlx.kv_cache import TOKEN, LayerCaches, alias, as_bytes, compact_copies, keep_slice

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True, eq=False)
class _Entry:
    adapter: str
    tokens: bytes
    layers: LayerCaches
    own: int  # bytes that nobody else holds
    priority: float = 0.0
    used: int = 0  # when, counted in uses of anything
    inside: _Entry | None = None  # the longer one that its shareable layers are views of
    views: list[_Entry] = field(default_factory=list)


class PrefixCache:
    """Token prefixes and the KV caches that hold them. A `space` (an adapter) never sees another's."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: dict[tuple[str, bytes], _Entry] = {}
        self._sorted: dict[
            str, list[bytes]
        ] = {}  # the tokens of each space; a prefix stands before what it begins
        self._nbytes = 0
        self._age = 0.0
        self._uses = 0

    @property
    def nbytes(self) -> int:
        """What is kept, in bytes."""
        return self._nbytes

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self.max_bytes > 0

    def __len__(self) -> int:
        return len(self._kept)

    def find_longest(self, prompt: Sequence[int], adapter: str = "") -> tuple[int, LayerCaches | None]:
        """Find the longest kept prefix of the prompt, and layers that the caller may write to."""
        tokens = as_bytes(prompt)
        found = self._find_longest(adapter, tokens)
        if found is None:
            return 0, None
        self._touch(found)
        return len(found.tokens) // TOKEN, [alias(layer) for layer in found.layers]

    def covered_tokens(self, prompt: Sequence[int], adapter: str = "") -> int:
        """Return how many tokens of the prompt need not be read, without counting it as use."""
        found = self._find_longest(adapter, as_bytes(prompt[:-1]))
        return len(found.tokens) // TOKEN if found is not None else 0

    def has(self, tokens: Sequence[int], adapter: str = "") -> bool:
        """Whether exactly this prefix is kept; it then counts as used."""
        found = self._kept.get((adapter, as_bytes(tokens)))
        if found is not None:
            self._touch(found)
        return found is not None

    def keep(self, tokens: Sequence[int], layers: LayerCaches, adapter: str = "") -> bool:
        """Keep the caches of a prefix as they are now; False if they alone are too large."""
        key = as_bytes(tokens)
        if self.has(tokens, adapter):
            return True
        if not self.enabled:
            return False
        layers = compact_copies(layers)
        # Begun now, or they would hold on to all that they are still to be computed from.
        mx.async_eval([layer.state for layer in layers])  # type: ignore[no-untyped-call]
        size = sum(layer.nbytes for layer in layers)
        if size > self.max_bytes:
            return False
        kept = _Entry(adapter, key, layers, size)
        longer = self._owner_beyond(adapter, key)
        if longer is not None:
            self._share(kept, longer)
        shorter = self._find_longest(adapter, key)
        while shorter is not None:
            if shorter.inside is None:
                self._share(shorter, longer or kept)
            shorter = self._find_longest(adapter, key, below=len(shorter.tokens))
        self._kept[adapter, key] = kept
        insort(self._sorted.setdefault(adapter, []), key)
        self._nbytes += kept.own
        self._touch(kept)
        self.evict_to(self.max_bytes)
        return (adapter, key) in self._kept

    def evict_to(self, max_bytes: int) -> None:
        """Give up what is worth least until no more than so many bytes are kept."""
        while self._nbytes > max_bytes and self._kept:
            least = min(self._kept.values(), key=lambda kept: (kept.priority, kept.used))
            self._age = max(self._age, least.priority)
            self._evict(least)

    def clear(self) -> None:
        """Forget everything, at once: what points at each other would wait for the garbage collector."""
        for kept in self._kept.values():
            kept.inside = None
            kept.views.clear()
        self._kept.clear()
        self._sorted.clear()
        self._nbytes = 0
        self._age = 0.0

    def _find_longest(self, adapter: str, tokens: bytes, below: int | None = None) -> _Entry | None:
        """Find the longest kept prefix of `tokens`, or the longest of fewer than `below` bytes."""
        ordered = self._sorted.get(adapter, [])
        if below is not None:
            tokens = tokens[: below - TOKEN]
        at = len(ordered)
        while at := bisect_right(ordered, tokens, 0, at):
            near = ordered[at - 1]
            if tokens.startswith(near):
                return self._kept[adapter, near]
            # Whatever is a prefix of `tokens` and stands before `near` is a prefix of both.
            tokens = tokens[: _common(tokens, near)]
        return None

    def _owner_beyond(self, adapter: str, tokens: bytes) -> _Entry | None:
        """Find a checkpoint that goes on behind `tokens` and has its layers to itself."""
        ordered = self._sorted.get(adapter, [])
        for at in range(bisect_right(ordered, tokens), len(ordered)):
            if not ordered[at].startswith(tokens):
                break
            kept = self._kept[adapter, ordered[at]]
            return kept.inside or kept
        return None

    def _touch(self, kept: _Entry) -> None:
        before = self._find_longest(kept.adapter, kept.tokens, below=len(kept.tokens))
        worth = (len(kept.tokens) - (len(before.tokens) if before else 0)) // TOKEN
        kept.priority = self._age + worth / max(1, kept.own)
        self._uses += 1
        kept.used = self._uses

    def _share(self, kept: _Entry, longer: _Entry) -> None:
        """Make the shareable layers of `kept`, and of those that are views of it, views of a longer checkpoint's."""
        counted = (kept.adapter, kept.tokens) in self._kept
        # Its bytes count the room behind its tokens, too.
        shared = sum(mine.nbytes for mine, _ in _shareable(kept, longer))
        kept.own -= shared
        for view in (kept, *kept.views):
            self._repoint(view, longer)
        kept.views = []
        if counted:
            self._nbytes -= shared
            self._touch(kept)

    def _repoint(self, view: _Entry, longer: _Entry) -> None:
        for mine, theirs in _shareable(view, longer):
            mine.keys = theirs.keys[..., : mine.offset, :]
            mine.values = theirs.values[..., : mine.offset, :]
        mx.async_eval([layer.state for layer in view.layers])  # type: ignore[no-untyped-call]
        view.inside = longer
        longer.views.append(view)

    def _evict(self, kept: _Entry) -> None:
        del self._kept[kept.adapter, kept.tokens]
        ordered = self._sorted[kept.adapter]
        del ordered[bisect_left(ordered, kept.tokens)]
        self._nbytes -= kept.own
        if kept.inside is not None:
            kept.inside.views.remove(kept)
            return
        if kept.views:  # the longest of them gets a copy of what was shared, and the others views of that
            heir = max(kept.views, key=lambda view: len(view.tokens))
            for layer in heir.layers:
                if type(layer) is KVCache:
                    keep_slice(layer, slice(None))
                    heir.own += layer.nbytes
                    self._nbytes += layer.nbytes
            mx.eval([layer.state for layer in heir.layers])
            heir.inside = None
            for view in kept.views:
                if view is not heir:
                    self._repoint(view, heir)
            self._touch(heir)


def _shareable(one: _Entry, other: _Entry) -> list[tuple[Any, Any]]:
    pairs = zip(one.layers, other.layers, strict=True)
    return [(mine, theirs) for mine, theirs in pairs if type(mine) is KVCache and type(theirs) is KVCache]


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes two texts begin with together, by halving: comparing slices is one memcmp each."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
